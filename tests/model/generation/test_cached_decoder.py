"""The cached decoder returns what one dense pass over everything returns."""

from __future__ import annotations

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.encoder.transformer import TransformerEncoder
from palm_ds.model.generation.cached_decoder import CachedDecoder, Prompt, TargetFormat
from palm_ds.model.generation.generate import DecodingSettings, TokenRules, generate
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from tests.helpers.infilling import FORMAT, NEXT, next_scores, prompt, small_model

SOURCES = ([1, 5, 6, 7, 2], [1, 8, 2], [1, 9, 10, 11, 5, 6, 7, 8, 2])


FRAMES = pytest.mark.parametrize("frame", [FORMAT, NEXT], ids=["queries", "next"])


@FRAMES
@torch.inference_mode()
def test_steps_equal_dense_passes_over_prompts_of_different_lengths(frame: TargetFormat) -> None:
    encoder, head = small_model()
    prompts = [prompt(source, task_id=k) for k, source in enumerate(SOURCES)]
    decoder = CachedDecoder(encoder, head.logits, prompts, frame)
    targets = [[frame.begin] for _ in prompts]
    for token in (5, 9, 7, 11):
        found = decoder.step(torch.tensor([target[-1] for target in targets]))
        for given, target, scores in zip(prompts, targets, found, strict=True):
            wanted = next_scores(encoder, head, given, target, frame)
            assert torch.allclose(scores, wanted, atol=1e-5)
            target.append((token + given.source.task_id) % 12)


@FRAMES
@torch.inference_mode()
def test_hypotheses_may_be_reordered_and_prompts_dropped(frame: TargetFormat) -> None:
    encoder, head = small_model()
    prompts = [prompt(source) for source in SOURCES]
    decoder = CachedDecoder(encoder, head.logits, prompts, frame)
    decoder.widen(2)
    decoder.step(torch.full((6,), frame.begin))
    decoder.step(torch.tensor([5, 6, 7, 8, 9, 10]))
    decoder.select(torch.tensor([1, 1, 5, 4]), torch.tensor([0, 2]))  # the second prompt is done
    found = decoder.step(torch.tensor([11, 9, 5, 6]))
    chosen = [(0, [1, 6, 11]), (0, [1, 6, 9]), (2, [1, 10, 5]), (2, [1, 9, 6])]
    for scores, (number, target) in zip(found, chosen, strict=True):
        wanted = next_scores(encoder, head, prompts[number], target, frame)
        assert torch.allclose(scores, wanted, atol=1e-5)


class DenseDecoder:
    """A decoder without caches: one pass over the whole for each step of each hypothesis."""

    def __init__(self, model: tuple[Encoder, MaskedLMHead], prompts: list[Prompt]):
        self.model, self.prompts, self.begun = model, prompts, [[] for _ in prompts]

    def widen(self, hypotheses: int) -> None:
        self.prompts = [x for x in self.prompts for _ in range(hypotheses)]
        self.begun = [[] for _ in self.prompts]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.begun = [[*x, y] for x, y in zip(self.begun, tokens.tolist(), strict=True)]
        pairs = zip(self.prompts, self.begun, strict=True)
        return torch.stack([next_scores(*self.model, x, y, NEXT) for x, y in pairs])

    def select(self, hypotheses: torch.Tensor, prompts: torch.Tensor | None = None) -> None:
        self.prompts = [self.prompts[i] for i in hypotheses]
        self.begun = [self.begun[i] for i in hypotheses]


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_equal_those_without_a_cache(beams: int) -> None:
    """Greedy and beam search by next tokens, which end with the token of `NEXT`."""
    model = encoder, head = small_model(seed=5)
    prompts = [prompt(source) for source in SOURCES]
    how = DecodingSettings(beams=beams, max_tokens=8, min_tokens=2, no_repeat_ngram=1)
    decoders = CachedDecoder(encoder, head.logits, prompts, NEXT), DenseDecoder(model, prompts)
    cached, dense = (
        generate(decoder, NEXT.begin, [8] * 3, how, TokenRules(end=NEXT.end, blocked=(0, 1)))
        for decoder in decoders
    )
    assert [x.tokens for x in cached] == [x.tokens for x in dense]
    assert len({x.tokens for x in cached}) > 1
    assert [x.score for x in cached] == pytest.approx([x.score for x in dense], abs=1e-5)


def test_an_encoder_with_a_forward_of_its_own_does_not_generate() -> None:
    class Own(TransformerEncoder):
        def forward(self, batch: Batch, at: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(batch, at)

    _, head = small_model()
    config = EncoderConfig(vocab_size=12, hidden_size=16, num_layers=1, num_heads=2)
    with pytest.raises(UserError, match="or a forward pass of its own"):
        CachedDecoder(Own(config), head.logits, [prompt([1, 2])], FORMAT)
