"""Prediction of the next token: against transformers' decoders, beside masked words, and read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import (
    AutoModelForMaskedLM,
    BertLMHeadModel,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
)

from palm_ds.common.errors import UserError
from palm_ds.common.rng import keyed_generator
from palm_ds.data.tasks.example import Example, collate, layouts
from palm_ds.inference.held_out_loss import score_minimal_pairs
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.pretrain.causal_language_model import CausalLanguageModel
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking
from palm_ds.text.tokenizer import SPECIALS, wordpiece
from palm_ds.text.tokens import TokenSpan
from palm_ds.weights.formats.huggingface.model_card import Provenance
from palm_ds.weights.weights_folder import WeightsInfo, export_hf, save_weights

WORDS = [*"abcdefghijklmnopqrstuvwxyz"]
TOKENIZER = wordpiece([*SPECIALS, *WORDS], lower=True)
SIZES: Any = {"hidden_size": 32, "num_layers": 4, "num_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "bert": EncoderConfig(
        vocab_size=TOKENIZER.size, init_range=0.2, task_types=0, max_positions=64, **SIZES
    ),
    "modernbert": EncoderConfig(
        kind="modernbert",
        vocab_size=TOKENIZER.size,
        init_range=0.2,
        token_types=1,
        task_types=0,
        activation="gelu",
        layer_norm_eps=1e-5,
        max_positions=64,
        options={"window": 5},
        **SIZES,
    ),
}
CLM, MASKS = "causal_language_model", "knowledge_masking"


class Texts:
    """All that the tasks need of a source: a text of random tokens."""

    vocabulary = TOKENIZER.vocabulary
    ids = np.random.default_rng(4).choice(TOKENIZER.vocabulary.regular, 200)

    def read(self, start: int, end: int) -> TokenSpan:
        return TokenSpan(start, self.ids[start:end], {})


def example(task: CausalLanguageModel | KnowledgeMasking, tokens: int, end: int) -> Example:
    layout = layouts(np.array([tokens]), end=np.array([end]))[0]
    made = task.example(layout, Texts(), keyed_generator(1, end))  # type: ignore[arg-type]
    task.label(made, Texts(), keyed_generator(2, end))  # type: ignore[arg-type]
    return made


def model_of(kind: str, attention: str = "tiles") -> Model:
    torch.manual_seed(5)
    backbone = build_encoder(CONFIGS[kind], Kernels(attention=attention)).eval()
    return Model(backbone, {MASKS: MaskedLMHead(backbone)}, {MASKS: MASKS, CLM: MASKS}).eval()


def exported(model: Model, folder: Path, kind: str, reading: Any = "causal") -> Path:
    export_hf(
        model,
        folder,
        config=CONFIGS[kind],
        tokenizer=TOKENIZER,
        outputs={MASKS: HeadOutputs(reading=reading)},
        made=Provenance(source="a test"),
    )
    return folder


def bert_decoder(folder: Path) -> nn.Module:
    return BertLMHeadModel.from_pretrained(folder, is_decoder=True).eval()


def modernbert_decoder(folder: Path) -> nn.Module:
    """Ettin's decoders: the same tensors, query, key and value apart."""
    config, window = CONFIGS["modernbert"], 5
    decoder = ModernBertDecoderForCausalLM(
        ModernBertDecoderConfig(
            vocab_size=TOKENIZER.size,
            hidden_size=config.hidden_size,
            intermediate_size=config.feed_forward_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=64,
            local_attention=2 * (window + 1),  # its windows count the token itself
            layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
            **dict.fromkeys(("pad_token_id", "cls_token_id", "bos_token_id"), 0),
            **dict.fromkeys(("sep_token_id", "eos_token_id"), 1),
        )
    )
    state: dict[str, torch.Tensor] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if ".Wqkv." in name:
            parts = zip("qkv", values.chunk(3), strict=True)
            state |= {name.replace("Wqkv", f"{part}_proj"): x for part, x in parts}
        else:
            state[f"lm_{name}" if name.startswith("head.") else name] = values
    missing = decoder.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"decoder.weight"}
    decoder.tie_weights()
    return decoder.eval()


DECODERS = {"bert": bert_decoder, "modernbert": modernbert_decoder}


@pytest.mark.parametrize("kind", [*DECODERS])
def test_packed_rows_are_those_of_a_decoder(kind: str, tmp_path: Path) -> None:
    task = CausalLanguageModel(name=CLM)
    texts = [example(task, *each) for each in ((18, 40), (20, 90), (30, 150))]
    model = model_of(kind)
    decoder = DECODERS[kind](exported(model, tmp_path / "hf", kind))
    rows = [[(texts[0], 0), (texts[1], 0)], [(texts[2], 0)]]
    batch = collate(rows, length=40, pad=0)
    with torch.no_grad():
        mine, loss = model.logits(batch, CLM), model(batch)[CLM].loss_sum
        alone = [decoder(torch.from_numpy(text.input_ids)[None]).logits[0] for text in texts]
    theirs = torch.cat([logits[:-2] for logits in alone])
    torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-3)
    targets = np.concatenate([text.input_ids[1:-1] for text in texts])
    expected = F.cross_entropy(theirs, torch.from_numpy(targets), reduction="sum")
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", [*DECODERS])
def test_beside_masked_words_a_text_is_as_alone(kind: str) -> None:
    """Both kinds of examples in one row, one head, and where each predicts."""
    masks = KnowledgeMasking(name=MASKS, units=("token",), shifted=True)
    masked, causal = example(masks, 17, 60), example(CausalLanguageModel(name=CLM), 19, 90)
    at, targets = masked.labels[MASKS]
    assert masked.unmasked_ids[at + 1].tolist() == targets.tolist()
    assert (masked.input_ids[at + 1] != targets).any()
    assert not {*at.tolist()} & {len(masked) - 2, len(masked) - 1}
    model = model_of(kind)
    with torch.no_grad():
        both = model(collate([[(masked, 0), (causal, 0)]], length=40, pad=0))
        for name, text in ((MASKS, masked), (CLM, causal)):
            alone = model(collate([[(text, 0)]], length=len(text), pad=0))[name]
            torch.testing.assert_close(both[name].loss_sum, alone.loss_sum, atol=1e-4, rtol=1e-5)


def test_who_can_share_a_head() -> None:
    masks, causal = KnowledgeMasking(name=MASKS), CausalLanguageModel(name=CLM)
    assert causal.with_head_of(masks) is causal and masks.with_head_of(causal) is masks
    assert not CausalLanguageModel.labels_others()


# Reading such a head --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """weights/ and hf/ of a model with one head for both tasks."""
    folder, model = tmp_path_factory.mktemp("trained"), model_of("bert")
    info = WeightsInfo(
        backbone=CONFIGS["bert"],
        head_of=model.head_of,
        task_ids={MASKS: 0, CLM: 0},
        export_task=MASKS,
        heads={MASKS: HeadOutputs(reading="shifted")},
        recipe={"tasks": {MASKS: {"source": "x", "shifted": True}, CLM: {"source": "x"}}},
    )
    save_weights(model, folder / "weights", info, tokenizer=TOKENIZER)
    exported(model, folder / "hf", "bert", "shifted")
    return folder


def test_a_folder_says_where_its_head_predicts(trained: Path) -> None:
    assert json.loads((trained / "hf/config.json").read_text())["palm_ds_reading"] == "shifted"
    card = (trained / "hf/README.md").read_text()
    assert "predicts the next token" in card and "fill-mask" not in card
    opened = TrainedModel.open(trained / "weights")
    assert opened.filler().reading == "shifted" and opened.filler(CLM).reading == "causal"
    assert TrainedModel.open(trained / "hf").filler().reading == "shifted"


def test_masks_are_filled_from_the_place_before(trained: Path) -> None:
    hf = AutoModelForMaskedLM.from_pretrained(trained / "hf").eval()
    filled = TrainedModel.open(trained / "hf").filler().fill("a b [MASK] d [MASK] f", top=3)
    with torch.no_grad():
        scores = hf(torch.from_numpy(filled.ids)[None]).logits[0].softmax(-1)
    for hidden in filled.hidden:
        best = scores[hidden.position - 1].topk(3)
        assert [token for token, _ in hidden.guesses] == best.indices.tolist()
    reader = TrainedModel.open(trained / "weights").filler(CLM)
    first = reader.fill("a b [MASK] d e", top=2).hidden[0].guesses
    assert first == reader.fill("a b [MASK] z", top=2).hidden[0].guesses
    with pytest.raises(UserError, match="from left to right and predicts one"):
        reader.fill("a [MASK] c [MASK]", top=1)


def test_minimal_pairs_are_read_as_the_task_does(trained: Path, tmp_path: Path) -> None:
    rng, lines = np.random.default_rng(3), []
    for _ in range(16):
        lines.append(" ".join(rng.choice(WORDS, int(rng.integers(2, 9)))))
    (tmp_path / "x.txt").write_text("\n".join(lines))
    opened = TrainedModel.open(trained / "weights")
    causal, full = (
        bert_decoder(trained / "hf"),
        AutoModelForMaskedLM.from_pretrained(trained / "hf"),
    )
    full.eval()

    def losses(of: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
        found = []
        for ids, _ in TOKENIZER.encode_texts(lines):
            vocabulary = TOKENIZER.vocabulary
            whole = torch.tensor([vocabulary.cls, *ids.tolist(), vocabulary.sep])
            with torch.no_grad():
                found.append(float(of(whole)))
        return np.array(found)

    def left_to_right(ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(causal(ids[None]).logits[0, :-2], ids[1:-1], reduction="sum")

    def as_it_is(ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(full(ids[None]).logits[0, :-2], ids[1:-1])

    def one_by_one(ids: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for at in range(1, len(ids) - 1):
            hidden = ids.clone()
            hidden[at] = TOKENIZER.vocabulary.mask
            total += F.cross_entropy(full(hidden[None]).logits[0, at - 1], ids[at])
        return total

    for task, score, restated in (
        (CLM, "unmasked", left_to_right),
        (MASKS, "unmasked", as_it_is),
        (MASKS, "masked", one_by_one),
    ):
        expected = losses(restated)
        bad, good = expected[::2], expected[1::2]
        found = score_minimal_pairs(opened, str(tmp_path / "x.txt"), score, task=task)  # type: ignore[arg-type]
        assert found.loss == pytest.approx(good.mean(), rel=1e-4)
        assert found.mean == pytest.approx((good < bad).mean())
    with pytest.raises(UserError, match="score pairs unmasked"):
        score_minimal_pairs(opened, str(tmp_path / "x.txt"), "masked", task=CLM)
