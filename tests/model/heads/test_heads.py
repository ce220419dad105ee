"""Heads: initial weights, sums in fp32, tied embeddings, equality with Hugging Face's masked-LM
heads; the loss of generated texts."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ErnieConfig,
    ErnieForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import palm_ds.tasks
from palm_ds.data.tasks.task import build
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import Encoder, build_encoder
from palm_ds.model.heads.heads import (
    ClassHead,
    GenerationHead,
    MaskedLMHead,
)
from palm_ds.model.heads.pooled import ChoiceHead, MultiLabelHead, PairHead, RegressionHead
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.weights.formats.foreign_config import read_encoder_config
from palm_ds.weights.formats.huggingface.architecture import MASKED_WORDS
from tests.helpers.hf_names import from_names
from tests.helpers.waits import Waits

SMALL = dict(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=20,
)
HF = {
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL, hidden_act="relu")),
    "ernie": lambda: ErnieForMaskedLM(ErnieConfig(**SMALL, use_task_id=True, layer_norm_eps=1e-5)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**SMALL, pad_token_id=1)),
}


def backbone(**kernels: str) -> Encoder:
    torch.manual_seed(1)
    config = EncoderConfig(
        vocab_size=61, hidden_size=16, num_layers=1, num_heads=2, max_positions=20
    )
    return build_encoder(config, Kernels(**kernels))


@pytest.mark.parametrize("kernel", ["plain", "chunked"])
@pytest.mark.parametrize("kind", list(HF))
def test_masked_lm_scores_equal_hugging_face(kind: str, kernel: str) -> None:
    torch.manual_seed(2)
    hf = HF[kind]().eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    state, skipped = from_names(hf.state_dict(), kind)
    assert skipped == []
    body = build_encoder(read_encoder_config(hf.config.to_dict()), Kernels(masked_lm_loss=kernel))
    model = Model(body, {MASKED_WORDS: MaskedLMHead(body)}, {"t": MASKED_WORDS}).eval()
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert missing == ["backbone.pooler.dense.weight", "backbone.pooler.dense.bias"]
    rows, targets = torch.randn(7, 16), torch.randint(0, 61, (7,))
    expected = hf.lm_head(rows) if kind == "roberta" else hf.cls(rows)
    head = model.heads[MASKED_WORDS]
    torch.testing.assert_close(head.logits(rows), expected, atol=1e-5, rtol=0)  # type: ignore[operator]
    loss, correct = head(rows, targets)
    torch.testing.assert_close(loss, F.cross_entropy(expected, targets, reduction="sum"))
    assert correct == (expected.argmax(-1) == targets).sum()


def test_tied_embeddings_are_one_parameter_and_saved_once() -> None:
    body = backbone()
    head = MaskedLMHead(body)
    assert head.tied_words is body.word.weight
    assert "tied_words" in dict(head.named_parameters())  # ZeRO 3 gathers it for this module
    model = Model(body, {"words": head, "kind": ClassHead(16, 3)}, {"a": "words", "b": "kind"})
    assert sum(p is body.word.weight for p in model.parameters()) == 1
    state = model.state_dict()
    assert not [name for name in state if "tied" in name]
    other = Model(body, {"words": head, "kind": ClassHead(16, 3)}, {"a": "words", "b": "kind"})
    other.load_state_dict(state, strict=True)
    del state["heads.words.dense.weight"]
    with pytest.raises(RuntimeError, match="heads.words.dense.weight"):
        other.load_state_dict(state, strict=True)


@pytest.mark.parametrize("kernel", ["plain", "chunked"])
def test_an_untied_head_learns_its_own_output_embeddings(kernel: str) -> None:
    torch.manual_seed(5)
    config = replace(backbone().config, tie_word_embeddings=False)
    body = build_encoder(config, Kernels(masked_lm_loss=kernel))
    head = MaskedLMHead(body)
    assert head.decoder.shape == body.word.weight.shape and "decoder" in head.state_dict()
    rows, targets = torch.randn(7, 16), torch.randint(0, len(head.decoder), (7,))
    logits = F.linear(head.transform(rows), head.decoder, head.bias)
    torch.testing.assert_close(head.logits(rows), logits)
    expected = torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), head.decoder)
    head(rows, targets).loss_sum.backward()
    torch.testing.assert_close(head.decoder.grad, expected[0], atol=1e-5, rtol=1e-4)
    assert body.word.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_is_a_sum_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    head = ClassHead(16, 4, pooled=True).to(dtype)
    rows, targets = torch.randn(9, 16, dtype=dtype), torch.randint(0, 4, (9,))
    loss, correct = head(rows, targets)
    assert head.pooled and loss.dtype == torch.float32 and loss.ndim == 0
    halves = head(rows[:4], targets[:4]), head(rows[4:], targets[4:])
    torch.testing.assert_close(loss, halves[0].loss_sum + halves[1].loss_sum, atol=1e-4, rtol=1e-4)
    assert correct == halves[0].correct + halves[1].correct
    assert head.logits(rows).shape == (9, 4)


def test_correct_predictions_are_counted() -> None:
    head = ClassHead(2, 2)
    with torch.no_grad():
        head.out.weight.copy_(torch.eye(2))
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert head(rows, torch.tensor([0, 1, 1])).correct == 2


# Initial weights -------------------------------------------------------------------------------

FINE_TUNING: dict[str, list[dict[str, Any]]] = {
    "classification": [{"labels": ["a", "b"], "pooling": x} for x in ("pooler", "mean")],
    "multi_label": [{"labels": ["a", "b"]}],
    "regression": [{}],
    "matching": [{"strategy": "pointwise"}, {"strategy": "pairwise"}],
    "ranking": [{}],
    "multiple_choice": [{}],
    "tagging": [{"labels": ["B-X", "I-X", "O"], "crf": crf} for crf in (False, True)],
    "reading": [{}],
}
PRETRAINING = ("sentence_order", "sentence_distance", "capitalization", "sentence_reordering")
PRETRAINING += ("next_sentence_prediction", "token_document_relation", "dialogue_language_model")


def largest_and_deviation(
    kind: str, settings: dict[str, Any], init_range: float
) -> tuple[float, float]:
    """Of the initial weights of a task's head, divided by the encoder's `init_range`."""
    torch.manual_seed(1)
    config = EncoderConfig(
        vocab_size=9,
        hidden_size=1024,
        num_layers=1,
        num_heads=2,
        intermediate_size=1,
        max_positions=4,
        init_range=init_range,
    )
    encoder = build_encoder(config)
    head = build("task", {"kind": kind, "source": "s", **settings}).head(encoder)
    weights = next(x for x in head.parameters() if x.ndim == 2).detach() / init_range
    return float(weights.abs().max()), float(weights.std())


@pytest.mark.parametrize(
    ("kind", "settings"), [(kind, each) for kind in FINE_TUNING for each in FINE_TUNING[kind]]
)
def test_fine_tuning_heads_start_from_a_normal_distribution(kind, settings) -> None:
    """As in transformers, with the deviation of the encoder's configuration."""
    largest, deviation = largest_and_deviation(kind, settings, 0.05)
    assert largest > 2.5
    assert deviation == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("kind", PRETRAINING)
def test_pretraining_heads_start_from_a_truncated_normal_distribution(kind) -> None:
    """As in BERT and ERNIE."""
    largest, deviation = largest_and_deviation(kind, {}, 0.02)
    assert largest <= 2
    assert deviation < 0.95


def test_every_kind_of_fine_tuning_is_covered() -> None:
    kinds = {each.name for each in pkgutil.iter_modules(palm_ds.tasks.__path__) if not each.ispkg}
    without_parameters = {"class_pairs", "cross_modal_contrast", "retrieval", "similarity"}
    # the head begins as in pretraining
    of_masked_words = {"masked_words", "generation", "sparse_retrieval"}
    of_images = {
        *("image_text_matching", "masked_regions", "referring_expressions"),
        "scene_graph_prediction",
    }
    others = of_masked_words | without_parameters | of_images
    assert kinds - others == FINE_TUNING.keys()


HEADS: dict[str, Any] = {
    "class": lambda: (ClassHead(16, 3, weights=(1.0, 2.0, 3.0), smoothing=0.1), torch.int64),
    "class of means": lambda: (ClassHead(16, 3, means=True, weights=(1.0, 2.0, 3.0)), torch.int64),
    "masked words": lambda: (MaskedLMHead(backbone(masked_lm_loss="chunked")), torch.int64),
    "several labels": lambda: (MultiLabelHead(16, 1), torch.float32),
    "number": lambda: (RegressionHead(16), torch.float32),
    "pair": lambda: (PairHead(16), torch.int64),
    "choice": lambda: (ChoiceHead(16), torch.int64),
}


@pytest.mark.parametrize("name", list(HEADS))
def test_no_head_waits_for_the_device_in_training(name: str) -> None:
    head, dtype = HEADS[name]()
    rows = torch.randn(6, 16, requires_grad=True)
    targets = torch.tensor([0, 1, 1, 0, 0, 1]).to(dtype)
    targets = targets[:, None] if name == "several labels" else targets
    groups = (torch.tensor([0, 0, 1, 1, 2, 2]),) if head.grouped else ()
    with Waits() as waits:
        head(rows, targets, *groups).loss_sum.backward()
    assert waits.found == set()
    if name == "class":  # it finds what waits
        with Waits() as waits:
            float(rows.detach().sum())
        assert waits.found == {"?: _local_scalar_dense"}


CONFIG = EncoderConfig(vocab_size=30, hidden_size=16, num_layers=1, num_heads=2)
ROWS, TOKENS = torch.randn(6, 16), torch.tensor([3, 4, 5, 3, 9, 29])
FLOWS = torch.tensor([0, 0, 0, 1, 1, 1])


def head(kernel: str = "chunked", **options) -> GenerationHead:
    torch.manual_seed(0)
    return GenerationHead(build_encoder(CONFIG, Kernels(masked_lm_loss=kernel)), **options)


def test_it_is_a_masked_lm_head_without_options() -> None:
    torch.manual_seed(0)
    plain = MaskedLMHead(build_encoder(CONFIG, Kernels(masked_lm_loss="chunked")))
    mine = head()
    assert mine.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(mine(ROWS, TOKENS).loss_sum, plain(ROWS, TOKENS).loss_sum)
    both = torch.stack([TOKENS, FLOWS], 1)
    assert torch.equal(mine(ROWS, both).loss_sum, plain(ROWS, TOKENS).loss_sum)
    assert head(weights=(1.0, 1.0)).weights == ()


@pytest.mark.parametrize("kernel", ["plain", "chunked"])
def test_smoothing_and_weights_are_for_training_only(kernel: str) -> None:
    mine = head(kernel, smoothing=0.1, weights=(1.5, 0.5))
    both = torch.stack([TOKENS, FLOWS], 1)
    logits = mine.logits(ROWS)
    smooth = F.cross_entropy(logits, TOKENS, reduction="none", label_smoothing=0.1)
    expected = 1.5 * smooth[:3].sum() + 0.5 * smooth[3:].sum()
    torch.testing.assert_close(mine(ROWS, both).loss_sum, expected)
    plain = F.cross_entropy(logits, TOKENS, reduction="sum")
    torch.testing.assert_close(mine.eval()(ROWS, both).loss_sum, plain)


def test_the_loss_of_no_labels_is_finite() -> None:
    mine = head(smoothing=0.1, weights=(1.5, 0.5))
    target = mine.dummy_target(torch.device("cpu"))
    assert mine(torch.zeros(1, 16), target).loss_sum.isfinite()
