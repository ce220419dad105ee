"""NeoBERT's folders against the formulas of its published code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.inputs.batch import Batch
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.formats.huggingface.read import open_contents
from palm_ds.weights.formats.runnable import load_encoder, load_masked_lm, read_values
from tests.helpers.neobert import CONFIG, NeoBERT
from tests.model.encoder.test_transformer import padded, texts, weighted

NARROW = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
PUBLISHED = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


def by_part(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows by head as rows of all queries, keys and values."""
    return torch.cat([x.flatten(0, 1) for x in rows.unflatten(0, (heads, 3, -1)).unbind(1)])


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {**NARROW, "num_hidden_layers": 2},
        pytest.param({**PUBLISHED, "num_hidden_layers": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_outputs_and_gradients_are_the_published_ones(
    tmp_path: Path, sizes: dict[str, Any]
) -> None:
    model: Any = NeoBERT(**sizes)
    batch = padded()
    contents = open_contents(model.save(tmp_path))
    encoder: Any = load_encoder(contents)
    real = batch.sequence_ids >= 0
    expected, found = model(batch.input_ids, real)[real], encoder(batch)[real]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    scores = load_masked_lm(contents, "masked_words", encoder).logits(found)
    torch.testing.assert_close(scores, model.masked_lm(expected), atol=1e-5, rtol=1e-5)
    weighted(expected).backward()
    weighted(found).backward()
    for layer, other in zip(encoder.layers, model.transformer_encoder, strict=True):
        qkv = by_part(other.qkv.weight.grad, model.about["num_attention_heads"])
        pairs = [(layer.qkv, qkv), (layer.project, other.wo.weight.grad)]
        pairs += [(layer.expand, other.ffn["w12"].weight.grad)]
        pairs += [(layer.output_norm, other.ffn_norm.weight.grad)]
        pairs += [(encoder.word, model.encoder.weight.grad)]
        for mine, gradient in pairs:
            scale = float(gradient.abs().max())
            torch.testing.assert_close(mine.weight.grad, gradient, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("architecture", ["NeoBERTLMHead", "NeoBERTForSequenceClassification"])
def test_every_class_is_written_as_it_was_read(tmp_path: Path, architecture: str) -> None:
    source, target = NeoBERT().save(tmp_path / "in", architecture), tmp_path / "out"
    convert(source, target, "huggingface", ConversionOptions(strict=True))
    written, read = (load_file(x / "model.safetensors") for x in (target, source))
    assert written.keys() == read.keys()
    assert all(torch.equal(written[x], read[x]) for x in read)
    about = json.loads((target / "config.json").read_text())
    assert about["architectures"] == [architecture] and "auto_map" not in about
    kept = [key for key in CONFIG if key not in ("architectures", "auto_map")]
    assert all(about[key] == CONFIG[key] for key in kept)


def test_texts_are_classified_as_published(tmp_path: Path) -> None:
    model, batch = NeoBERT(), padded()
    contents = open_contents(model.save(tmp_path, "NeoBERTForSequenceClassification"))
    encoder, real = load_encoder(contents), batch.sequence_ids >= 0
    rows = encoder.pooled_texts(encoder(batch), real)
    weight, bias = (read_values(contents, f"heads.classifier.out.{x}") for x in ("weight", "bias"))
    expected = model.classify(model(batch.input_ids, real))
    torch.testing.assert_close(rows @ weight.T + bias, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changed", ["gate", "rows", "halves"])
def test_what_shapes_do_not_show_is_noticed(tmp_path: Path, changed: str) -> None:
    folder, batch = NeoBERT().save(tmp_path), padded()
    right = load_encoder(open_contents(folder))(batch)
    state = load_file(folder / "model.safetensors")
    part = "ffn.w12" if changed == "gate" else "qkv"
    name = f"model.transformer_encoder.1.{part}.weight"
    if changed == "gate":
        state[name] = torch.cat(state[name].chunk(2)[::-1])
    elif changed == "rows":
        state[name] = by_part(state[name], 4)
    else:
        state[name] = state[name].unflatten(0, (12, 6, 2)).transpose(1, 2).flatten(0, 2)
    save_file({x: y.contiguous() for x, y in state.items()}, folder / "model.safetensors")
    assert (load_encoder(open_contents(folder))(batch) - right).abs().max() > 1e-3


def test_the_halves_of_a_gate_may_be_two_matrices(tmp_path: Path) -> None:
    folder, batch = NeoBERT().save(tmp_path), padded()
    right, state = load_encoder(open_contents(folder))(batch), {}
    for name, x in load_file(folder / "model.safetensors").items():
        names = [name.replace("w12", each) for each in ("w1", "w2")] if "w12" in name else [name]
        state |= {y: z.clone() for y, z in zip(names, x.chunk(len(names)), strict=True)}
    save_file(state, folder / "model.safetensors")
    assert torch.equal(load_encoder(open_contents(folder))(batch), right)


def test_a_text_is_the_same_in_a_packed_row(tmp_path: Path) -> None:
    encoder = load_encoder(open_contents(NeoBERT().save(tmp_path)))
    several = texts((30, 1, 9))
    packed, start = encoder(Batch.from_rows([several], length=48, pad=0))[0], 0
    for text in several:
        size = len(text.input_ids)
        alone = encoder(Batch.from_rows([[text]], length=size, pad=0))[0]
        torch.testing.assert_close(packed[start : start + size], alone, atol=1e-5, rtol=1e-5)
        start += size


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rms_norm": False}, "rms_norm: must be True here, got false"),
        ({"rope": False}, "rope: must be True here"),
        ({"hidden_act": "gelu"}, "hidden_act: must be 'swiglu' here, got .gelu"),
        ({"intermediate_size": "96"}, "intermediate_size: expected a whole number"),
        ({"norm_eps": float("nan")}, "norm_eps: expected a number above 0"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = NeoBERT().save(tmp_path)
    (folder / "config.json").write_text(json.dumps(CONFIG | values))
    with pytest.raises(UserError, match=f"config.json: {message}"):
        open_contents(folder)


def test_the_preset_has_the_published_number_of_parameters() -> None:
    """With two tables, a bias and no pooler."""
    config = EncoderConfig.from_dict({"preset": "neobert", "vocab_size": 30_522})
    with torch.device("meta"):
        encoder = build_encoder(config)
    count = sum(x.numel() for name, x in encoder.named_parameters() if "pooler" not in name)
    assert (count + 30_522 * 769) / 1e6 == pytest.approx(245, rel=2e-3)
