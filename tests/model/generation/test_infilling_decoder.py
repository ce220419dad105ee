"""The cached decoder returns what one dense pass over everything returns."""

from __future__ import annotations

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import EncoderConfig
from palm_ds.model.encoder.transformer import TransformerEncoder
from palm_ds.model.generation.infilling_decoder import InfillingDecoder
from palm_ds.model.inputs.batch import Batch
from tests.helpers.infilling import FORMAT, next_scores, prompt, small_model

SOURCES = ([1, 5, 6, 7, 2], [1, 8, 2], [1, 9, 10, 11, 5, 6, 7, 8, 2])


@torch.inference_mode()
def test_steps_equal_dense_passes_over_prompts_of_different_lengths() -> None:
    encoder, head = small_model()
    prompts = [prompt(source, task_id=k) for k, source in enumerate(SOURCES)]
    decoder = InfillingDecoder(encoder, head.logits, prompts, FORMAT)
    targets = [[FORMAT.begin] for _ in prompts]
    for token in (5, 9, 7, 11):
        found = decoder.step(torch.tensor([target[-1] for target in targets]))
        for given, target, scores in zip(prompts, targets, found, strict=True):
            wanted = next_scores(encoder, head, given, target)
            assert torch.allclose(scores, wanted, atol=1e-5)
            target.append((token + given.source.task_id) % 12)


@torch.inference_mode()
def test_hypotheses_may_be_reordered_and_prompts_dropped() -> None:
    encoder, head = small_model()
    prompts = [prompt(source) for source in SOURCES]
    decoder = InfillingDecoder(encoder, head.logits, prompts, FORMAT)
    decoder.widen(2)
    decoder.step(torch.full((6,), FORMAT.begin))
    decoder.step(torch.tensor([5, 6, 7, 8, 9, 10]))
    decoder.select(torch.tensor([1, 1, 5, 4]), torch.tensor([0, 2]))  # the second prompt is done
    found = decoder.step(torch.tensor([11, 9, 5, 6]))
    chosen = [(0, [1, 6, 11]), (0, [1, 6, 9]), (2, [1, 10, 5]), (2, [1, 9, 6])]
    for scores, (number, target) in zip(found, chosen, strict=True):
        wanted = next_scores(encoder, head, prompts[number], target)
        assert torch.allclose(scores, wanted, atol=1e-5)


def test_an_encoder_with_a_forward_of_its_own_does_not_generate() -> None:
    class Own(TransformerEncoder):
        def forward(self, batch: Batch, at: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(batch, at)

    _, head = small_model()
    config = EncoderConfig(vocab_size=12, hidden_size=16, num_layers=1, num_heads=2)
    with pytest.raises(UserError, match="or a forward pass of its own"):
        InfillingDecoder(Own(config), head.logits, [prompt([1, 2])], FORMAT)
