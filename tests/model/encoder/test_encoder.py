"""The encoder equals Hugging Face's, packed or not; its config accepts all known aliases."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertModel,
    ErnieConfig,
    ErnieModel,
    RobertaConfig,
    RobertaModel,
)

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.config.config import PRESETS, EncoderConfig
from palm_ds.model.encoder.encoder import Encoder, build_encoder
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.weights.formats.foreign_config import read_encoder_config
from tests.helpers.hf_names import from_names

WORDS, LENGTH = 97, 40
TOLERANCE = dict(atol=1e-5, rtol=0)
SMALL = dict(
    vocab_size=WORDS,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=52,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    attn_implementation="eager",
)
HF = {
    "ernie": lambda: ErnieModel(
        ErnieConfig(
            **SMALL,
            max_position_embeddings=LENGTH,
            type_vocab_size=4,
            task_type_vocab_size=5,
            use_task_id=True,
            layer_norm_eps=1e-5,
        )
    ),
    "bert": lambda: BertModel(
        BertConfig(**SMALL, max_position_embeddings=LENGTH, hidden_act="relu")
    ),
    "roberta": lambda: RobertaModel(
        RobertaConfig(
            **SMALL,
            max_position_embeddings=LENGTH + 2,
            type_vocab_size=1,
            pad_token_id=1,
            layer_norm_eps=1e-5,
        )
    ),
}


def hf_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(3)
    model = HF[kind]().eval()
    with torch.no_grad():  # larger than the usual first weights, biases and scales of all sizes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def same_backbone(model: torch.nn.Module, **kernels: str) -> Encoder:
    config = read_encoder_config(model.config.to_dict())
    state, left_over = from_names(model.state_dict(), model.config.model_type)
    assert left_over == []
    backbone = build_encoder(config, Kernels(**kernels)).eval()
    backbone.load_state_dict({k.removeprefix("backbone."): v for k, v in state.items()})
    return backbone


def example(rng: np.random.Generator, size: int, segments: int) -> Example:
    """A text of `size` tokens in up to three segments."""
    cuts = np.sort(rng.integers(0, size, 2))
    return Example(
        input_ids=rng.integers(2, WORDS, size),  # 0 and 1 are padding for one or the other
        token_type_ids=np.searchsorted(cuts, np.arange(size), side="right") % segments,
        source_offsets=np.arange(size),
        annotations={},
    )


def examples(seed: int, sizes: list[int], segments: int) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [example(rng, size, segments) for size in sizes]


def hidden_of(backbone: Encoder, batch: Batch) -> list[torch.Tensor]:
    """The vectors of each sequence that is not padding, in order."""
    flat, starts = backbone(batch).flatten(0, 1), batch.cu_seqlens.tolist()
    real = batch.sequence_ids.flatten() >= 0
    return [flat[a:b] for a, b in zip(starts, starts[1:], strict=False) if real[a]]


@torch.no_grad()
def hf_hidden(model: torch.nn.Module, text: Example, task: int) -> torch.Tensor:
    inputs = {
        "input_ids": torch.from_numpy(text.input_ids)[None],
        "token_type_ids": torch.from_numpy(text.token_type_ids)[None],
    }
    if model.config.model_type == "ernie":
        inputs["task_type_ids"] = torch.full_like(inputs["input_ids"], task)
    return model(**inputs)


@pytest.mark.parametrize("attention", ["plain", "sdpa", "tiles"])
@pytest.mark.parametrize("kind", list(HF))
def test_equals_hugging_face_one_text_a_row_and_packed(kind: str, attention: str) -> None:
    model = hf_model(kind)
    backbone = same_backbone(model, attention=attention)
    config = backbone.config
    texts = examples(5, [LENGTH, 1, 17, 9, 13, 30, 3, 2], config.token_types)
    tasks = [k % max(config.task_types, 1) for k in range(len(texts))]
    pairs = list(zip(texts, tasks, strict=True))
    alone = collate([[pair] for pair in pairs], length=LENGTH, pad=config.pad)
    rows = [pairs[:1], pairs[1:5], pairs[5:], []]
    packed = collate(rows, length=LENGTH, pad=config.pad)
    with torch.no_grad():
        ours = hidden_of(backbone, alone), hidden_of(backbone, packed)
        for (text, task), one, other in zip(pairs, *ours, strict=True):
            theirs = hf_hidden(model, text, task)
            torch.testing.assert_close(one, theirs.last_hidden_state[0], **TOLERANCE)
            torch.testing.assert_close(other, theirs.last_hidden_state[0], **TOLERANCE)
            pooled = backbone.pooler(other[:1])
            torch.testing.assert_close(pooled, theirs.pooler_output, **TOLERANCE)


def small(attention: str = "plain", **changes: object) -> Encoder:
    torch.manual_seed(1)
    values = dict(
        vocab_size=WORDS,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        max_positions=LENGTH,
        init_range=0.3,
    )
    off = dict(dropout=0.0, attention_dropout=0.0)
    config = EncoderConfig(**{**values, **off, **changes})  # type: ignore[arg-type]
    return build_encoder(config, Kernels(attention=attention))


def packing(sizes: list[int], order: list[int], chances: list[bool]) -> list[list[int]]:
    """Rows of indices: next fit in the given order, sometimes opening a row early."""
    rows: list[list[int]] = [[]]
    for index, early in zip(order, chances, strict=True):
        if early or sum(sizes[k] for k in rows[-1]) + sizes[index] > LENGTH:
            rows.append([])
        rows[-1].append(index)
    return rows


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    sizes = draw(st.lists(st.integers(1, LENGTH), min_size=1, max_size=7))
    order = draw(st.permutations(range(len(sizes))))
    chances = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    return sizes, packing(sizes, order, chances)


@settings(max_examples=40, deadline=None)
@given(packings(), st.sampled_from(["plain", "sdpa", "tiles"]))
def test_any_packing_gives_the_same_vectors(case: tuple, attention: str) -> None:
    sizes, rows = case
    backbone = small(attention).eval()
    texts = examples(sum(sizes), sizes, segments=3)
    alone = collate([[(text, k % 16)] for k, text in enumerate(texts)], length=LENGTH, pad=0)
    packed = collate([[(texts[k], k % 16) for k in row] for row in rows], length=LENGTH, pad=0)
    with torch.no_grad():
        expected, got = hidden_of(small().eval(), alone), hidden_of(backbone, packed)
    for k, hidden in zip([k for row in rows for k in row], got, strict=True):
        torch.testing.assert_close(hidden, expected[k], **TOLERANCE)


@pytest.mark.parametrize("attention", ["plain", "sdpa", "tiles"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_do_not_depend_on_packing(attention: str, recompute: bool) -> None:
    sizes = [LENGTH, 5, 1, 12, 20, 7, 33]
    texts = examples(2, sizes, segments=3)
    target = [
        torch.randn(size, 16, generator=torch.Generator().manual_seed(size)) for size in sizes
    ]
    grads = []
    for rows in ([[k] for k in range(7)], [[0], [1, 2, 3, 4], [5, 6], []]):
        backbone = small(attention)
        backbone.recompute = recompute
        batch = collate([[(texts[k], k) for k in row] for row in rows], length=LENGTH, pad=0)
        loss = sum((h * y).sum() for h, y in zip(hidden_of(backbone, batch), target, strict=True))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        grads.append({n: p.grad for n, p in backbone.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 20
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["plain", "sdpa", "tiles"])
def test_padding_is_finite_and_has_no_effect(attention: str) -> None:
    backbone = small(attention, dropout=0.1, attention_dropout=0.1)
    [text] = examples(1, [11], segments=2)
    batch = collate([[(text, 0)], [], []], length=LENGTH, pad=0)
    hidden = backbone(batch)
    assert torch.isfinite(hidden).all()
    hidden.sum().backward()
    for parameter in backbone.parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()
    backbone.eval()
    with torch.no_grad():
        before = backbone(batch)[0, :11]
        batch.input_ids[batch.sequence_ids < 0] = 7  # another word at the padding
        batch.token_type_ids[batch.sequence_ids < 0] = 3
        torch.testing.assert_close(backbone(batch)[0, :11], before, atol=0, rtol=0)


def test_recompute_gives_the_same_gradients_with_dropout() -> None:
    texts = examples(2, [30, 10, 25], segments=3)
    batch = collate([[(t, 0) for t in texts[:2]], [(texts[2], 1)]], length=LENGTH, pad=0)
    grads = []
    for recompute in (False, True):
        backbone = small("tiles", dropout=0.2, attention_dropout=0.3)
        backbone.recompute = recompute
        torch.manual_seed(8)
        backbone(batch).square().sum().backward()
        grads.append([p.grad for p in backbone.parameters() if p.grad is not None])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_initial_weights_depend_only_on_the_seed() -> None:
    first, second = small().state_dict(), small().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(2)
    backbone = build_encoder(
        EncoderConfig(vocab_size=4000, hidden_size=64, num_layers=2, num_heads=2)
    )
    for name, value in backbone.state_dict().items():
        if name.endswith("bias"):
            assert (value == 0).all(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            assert value.abs().max() <= 0.04, name  # cut at two deviations of 0.02
    words = backbone.word.weight
    # A normal distribution cut at two deviations keeps 0.8796 of its own.
    assert abs(words.std().item() / 0.02 - 0.8796) < 0.01 and abs(words.mean().item()) < 1e-3


def test_eval_has_no_dropout_and_training_has() -> None:
    texts = examples(2, [30], segments=3)
    batch = collate([[(texts[0], 0)]], length=LENGTH, pad=0)
    backbone = small("tiles", dropout=0.5, attention_dropout=0.5)
    assert not torch.equal(backbone(batch), backbone(batch))
    backbone.eval()
    assert torch.equal(backbone(batch), backbone(batch))


# ---- config ----


def test_presets_are_the_published_sizes() -> None:
    base = EncoderConfig.from_dict({"preset": "ernie-2.0-base"})
    assert (base.hidden_size, base.num_layers, base.num_heads, base.feed_forward_size) == (
        768,
        12,
        12,
        3072,
    )
    assert (base.max_positions, base.token_types, base.task_types, base.layer_norm_eps) == (
        512,
        4,
        16,
        1e-5,
    )
    assert base.activation == "gelu"
    large = EncoderConfig.from_dict({"preset": "ernie-2.0-large"})
    assert (large.hidden_size, large.num_layers, large.num_heads) == (1024, 24, 16)
    chinese = EncoderConfig.from_dict({"preset": "ernie-1.0-base"})
    assert (chinese.activation, chinese.max_positions, chinese.token_types) == ("relu", 513, 2)
    assert chinese.task_types == 0
    for name in PRESETS:
        assert EncoderConfig.from_dict({"preset": name, "dropout": 0.0}).dropout == 0.0


@pytest.mark.parametrize(
    ("name", "layers", "positions", "token_types", "task_types"),
    [
        ("ernie-2.0-base-zh", 12, 513, 4, 16),
        ("ernie-2.0-large-zh", 24, 512, 4, 16),
        ("ernie-tiny", 3, 600, 2, 0),
    ],
)
def test_chinese_presets_have_relu_and_the_published_tables(
    name: str, layers: int, positions: int, token_types: int, task_types: int
) -> None:
    config = EncoderConfig.from_dict({"preset": name})
    assert (config.activation, config.layer_norm_eps) == ("relu", 1e-5)
    assert (config.num_layers, config.max_positions) == (layers, positions)
    assert (config.token_types, config.task_types) == (token_types, task_types)


def test_the_documented_presets_are_those_of_the_code(root: Path) -> None:
    page = (root / "docs/model.md").read_text()
    rows = re.findall(r"^\| (\[?`.*?) \|.*\| (\d), (\w+)", page, re.M)
    shown = {name: row for row in rows for name in re.findall(r"`([\w.-]+)`", row[0])}
    assert shown.keys() == PRESETS.keys()
    for name, (_, token_types, task_types) in shown.items():
        config = EncoderConfig.from_dict({"preset": name})
        assert (str(config.token_types), str(config.task_types or "none")) == (
            token_types,
            task_types,
        )


@pytest.mark.parametrize("kind", list(HF))
def test_config_reads_hugging_face(kind: str) -> None:
    hf = HF[kind]().config
    config = read_encoder_config(json.loads(hf.to_json_string()))
    assert (config.hidden_size, config.num_layers, config.num_heads, config.feed_forward_size) == (
        24,
        3,
        3,
        52,
    )
    assert (config.activation, config.layer_norm_eps) == (hf.hidden_act, hf.layer_norm_eps)
    assert config.task_types == (5 if kind == "ernie" else 0)
    assert config.max_length == LENGTH
    assert config.pad == hf.pad_token_id


def test_config_reads_ernie_and_palm() -> None:
    sizes = {
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "relu",
        "hidden_size": 48,
        "max_position_embeddings": 513,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 18000,
    }
    ernie1 = read_encoder_config({**sizes, "type_vocab_size": 2})
    assert (ernie1.token_types, ernie1.task_types, ernie1.layer_norm_eps) == (2, 0, 1e-5)
    two = {"sent_type_vocab_size": 4, "type_vocab_size": 2, "task_type_vocab_size": 16}
    ernie2 = read_encoder_config({**sizes, **two, "use_task_id": True})
    assert (ernie2.token_types, ernie2.task_types, ernie2.vocab_size) == (4, 16, 18000)
    palm = read_encoder_config({**sizes, **two, "use_task_emb": True})
    assert (palm.task_types, palm.layer_norm_eps) == (16, 1e-6)
    unsaid = read_encoder_config({**sizes, **two})  # PALM's own files do not name the switch
    assert (unsaid.task_types, unsaid.layer_norm_eps) == (16, 1e-6)
    without = read_encoder_config({**sizes, **two, "use_task_emb": False})
    assert (without.task_types, without.layer_norm_eps) == (0, 1e-6)


def test_a_preset_accepts_foreign_keys_too() -> None:
    config = read_encoder_config({"preset": "ernie-2.0-base", "hidden_dropout_prob": 0.0})
    assert (config.dropout, config.token_types, config.task_types) == (0.0, 4, 16)


def test_options_of_a_preset_stay_unless_they_are_named() -> None:
    config = read_encoder_config({"preset": "eurobert-610m", "options": {"text_pooling": "cls"}})
    assert config.options == {"kv_heads": 6, "text_pooling": "cls"}
    config = read_encoder_config({"preset": "eurobert-610m", "options": {"kv_heads": 3}})
    assert config.options == {"kv_heads": 3}
    other = {"preset": "eurobert-610m", "kind": "neobert", "options": {"rotary_base": 5e3}}
    assert read_encoder_config(other).options == {"rotary_base": 5e3}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 10, "num_heads": 3}, ["heads", "10", "3"]),
        ({"activation": "gleu"}, ["activation", "gleu", "gelu"]),
        ({"hidden_act": "quick_gelu"}, ["activation", "quick_gelu"]),
        ({"num_layer": 3}, ["num_layer", "num_layers"]),
        ({"hiden_size": 3}, ["hiden_size", "hidden_size"]),
        ({"preset": "ernie-3"}, ["preset", "ernie-3"]),
        ({"width": 64}, ["width", "unknown"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"dropout": -0.1}, ["dropout", "-0.1"]),
        ({"attention_dropout": 2}, ["attention_dropout", "2"]),
        ({"num_layers": 0}, ["num_layers", "0"]),
        ({"num_layers": "many"}, ["num_layers", "many"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"layer_norm_eps": 0.0}, ["layer_norm_eps"]),
        ({"init_range": -1.0}, ["init_range"]),
        ({"task_types": -1}, ["task_types", "-1"]),
        ({"max_positions": 2, "position_offset": 2}, ["position_offset", "2"]),
        ({"vocab_size": 10, "pad": 10}, ["pad", "10"]),
        ({"model_type": "gpt2"}, ["model_type", "gpt2"]),
        ({"hidden_size": 12, "position_embedding_type": "relative_key"}, ["relative_key"]),
        ({"hidden_size": 12, "tie_word_embeddings": "maybe"}, ["tie_word_embeddings"]),
        ({"hidden_size": 12, "emb_size": 8}, ["emb_size"]),
        ("ernie", ["ernie"]),
    ],
)
def test_config_mistakes_are_one_clear_line(values: object, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_encoder_config(values, "recipe.yaml: backbone")  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message and message.startswith("recipe.yaml: backbone")
    assert all(word in message for word in words), message
