"""ModernBERT's folders, with each of its heads: read, computed, written as they came."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.convert.parity import compare, inputs_for
from palm_ds.weights.formats.huggingface.read import open_contents
from palm_ds.weights.formats.huggingface.run import in_transformers
from palm_ds.weights.formats.runnable import in_palm_ds, load_encoder
from palm_ds.weights.weights_folder import export_hf
from tests.helpers.modernbert import modernbert
from tests.model.encoder.test_transformer import LENGTHS, padded, weighted

CLASSES: dict[str, Callable[[], Any]] = {
    "Model": partial(modernbert, "Model"),
    "ForMaskedLM": partial(modernbert, "ForMaskedLM"),
    "ForMaskedLM of another activation": partial(
        modernbert, "ForMaskedLM", hidden_activation="relu", classifier_activation="silu"
    ),
    "ForSequenceClassification": partial(modernbert, "ForSequenceClassification", num_labels=3),
    "ForSequenceClassification of means": partial(
        modernbert, "ForSequenceClassification", num_labels=3, classifier_pooling="mean"
    ),
    "ForTokenClassification": partial(modernbert, "ForTokenClassification", num_labels=5),
    "ForQuestionAnswering": partial(modernbert, "ForQuestionAnswering"),
    "ForMultipleChoice": partial(modernbert, "ForMultipleChoice"),
}
FEW = (
    "ForMaskedLM",
    "ForMaskedLM of another activation",
    "ForSequenceClassification",
    "ForSequenceClassification of means",
)
"""Those with parameters or a way of their own."""
NARROW: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 192,
    "global_rope_theta": 160_000.0,
}
# Real head sizes, windows and rotary bases; fewer layers, heads and tokens.
SHAPES: dict[str, dict[str, Any]] = {
    "two bases": {**NARROW, "local_rope_theta": 10_000.0},
    "one base": {**NARROW, "local_rope_theta": 160_000.0},
}
WIDE: dict[str, dict[str, Any]] = {
    "modernbert-base": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
    },
    "mmbert-small": {
        "hidden_size": 384,
        "num_attention_heads": 6,
        "intermediate_size": 1152,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 160_000.0,
    },
    "ettin-17m": {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 384},
}


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in FEW else pytest.mark.exhaustive) for x in CLASSES],
)
def test_every_class_is_computed_and_written_as_it_was_read(tmp_path: Path, name: str) -> None:
    source, target = saved(CLASSES[name](), tmp_path / "in"), tmp_path / "out"
    contents = open_contents(source)
    report = compare(
        in_transformers(contents), in_palm_ds(contents), inputs_for(contents, contents, None)
    )
    assert report.passed and report.worst.largest < 1e-5
    compared = {each.name for each in report.differences}
    assert {f"head {head}" for head in contents.heads} <= compared and "layer 4" in compared
    convert(source, target, to="huggingface", options=ConversionOptions(strict=True))
    written, read = state_of(target), state_of(source)
    assert written.keys() == read.keys()
    assert all(torch.equal(written[x], read[x]) for x in read)
    opened: Any = getattr(transformers, f"ModernBert{name.split()[0]}")
    _, loading = opened.from_pretrained(target, output_loading_info=True)
    assert not any(loading.values())
    before, after = (json.loads((x / "config.json").read_text()) for x in (source, target))
    assert before["classifier_pooling"] == after["classifier_pooling"]
    again = opened.from_pretrained(target).config
    assert again.rope_parameters == opened.from_pretrained(source).config.rope_parameters
    assert again.layer_types == before["layer_types"]


@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in WIDE)]
)
def test_published_shapes_have_transformers_outputs_and_gradients(
    tmp_path: Path, shape: str
) -> None:
    """Texts of 300 tokens at a radius of 64, padding in the batch."""
    model = modernbert(**{**SHAPES, **WIDE}[shape], local_attention=128)
    encoder, batch = load_encoder(open_contents(saved(model, tmp_path))), padded()
    assert max(LENGTHS) > 2 * 64
    real = batch.sequence_ids >= 0
    expected = model(input_ids=batch.input_ids, attention_mask=real.long()).last_hidden_state[real]
    found = encoder(batch)[real]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weighted(expected).backward()
    weighted(found).backward()
    pairs: Any = zip(encoder.layers, model.layers, strict=True)
    for layer, other in pairs:
        for mine, its in ((layer.qkv, other.attn.Wqkv), (layer.contract, other.mlp.Wo)):
            scale = float(its.weight.grad.abs().max())
            torch.testing.assert_close(mine.weight.grad, its.weight.grad, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("changed", ["halves of a gate", "query and key", "bases"])
def test_what_shapes_do_not_show_is_noticed(tmp_path: Path, changed: str) -> None:
    model = modernbert("ForMaskedLM")
    right, wrong = saved(model, tmp_path / "a"), saved(model, tmp_path / "b")
    state, config = state_of(wrong), json.loads((wrong / "config.json").read_text())
    if changed == "bases":
        parameters = config["rope_parameters"]
        bases = [parameters[x]["rope_theta"] for x in ("full_attention", "sliding_attention")]
        parameters["full_attention"]["rope_theta"] = bases[1]
        parameters["sliding_attention"]["rope_theta"] = bases[0]
        (wrong / "config.json").write_text(json.dumps(config))
    else:
        gated = changed == "halves of a gate"
        name = f"model.layers.1.{'mlp.Wi' if gated else 'attn.Wqkv'}.weight"
        first, second, *rest = state[name].chunk(2 if gated else 3)
        state[name] = torch.cat([second, first, *rest]).contiguous()
        save_file(state, wrong / "model.safetensors", {"format": "pt"})
    a, b = open_contents(right), open_contents(wrong)
    report = compare(in_transformers(a), in_palm_ds(b), inputs_for(a, b, None))
    assert not report.passed


def test_a_masked_lm_folder_starts_a_classifier_with_its_head(tmp_path: Path) -> None:
    folder = saved(modernbert("ForMaskedLM"), tmp_path)
    encoder = load_encoder(open_contents(folder))
    its: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    rows = torch.randn(3, 48)
    torch.testing.assert_close(encoder.pooler(rows), its.head(rows))


def test_a_task_embedding_is_folded_into_the_words_and_changes_no_probability(
    tmp_path: Path,
) -> None:
    config = replace(open_contents(saved(modernbert(), tmp_path / "in")).config, task_types=3)
    encoder = build_encoder(config).eval()
    head = MaskedLMHead(encoder).eval()
    with torch.no_grad():
        encoder.get_submodule("task").weight.normal_()  # type: ignore[operator, union-attr]
    state = {f"backbone.{name}": x for name, x in encoder.state_dict().items()}
    state |= {f"heads.words.{name}": x for name, x in head.state_dict().items()}
    export_hf(state, tmp_path / "hf", config=config, task_id=2)
    model: Any = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    assert (model.config.cls_token_id, model.config.eos_token_id) == (None, None)  # not 50281
    batch = padded()
    batch.task_ids.fill_(2)
    real = batch.sequence_ids >= 0
    given = {"input_ids": batch.input_ids, "attention_mask": real.long()}
    hidden = encoder(batch)[real]
    torch.testing.assert_close(model.model(**given).last_hidden_state[real], hidden)
    mine, its = head.logits(hidden).log_softmax(-1), model(**given).logits[real].log_softmax(-1)
    torch.testing.assert_close(its, mine, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(its, head.logits(encoder(replace_tasks(batch))[real]).log_softmax(-1))


def replace_tasks(batch: Batch) -> Batch:
    batch.task_ids.fill_(0)
    return batch


def test_both_spellings_of_its_config_are_read(tmp_path: Path) -> None:
    values = {"global_attn_every_n_layers": 2, "local_attention": 10}
    model = modernbert(**values, global_rope_theta=5e4, local_rope_theta=2e3)
    folder = saved(model, tmp_path)
    new = json.loads((folder / "config.json").read_text())
    read = open_contents(folder).config
    assert read.options == {
        "global_every": 2,
        "window": 5,
        "global_rotary_base": 5e4,
        "local_rotary_base": 2e3,
    }
    kept = {x: y for x, y in new.items() if x not in ("layer_types", "rope_parameters")}
    old = {**kept, **values, "global_rope_theta": 5e4, "local_rope_theta": 2e3}
    (folder / "config.json").write_text(json.dumps(old))
    assert open_contents(folder).config == read


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm_bias": True}, "norm_bias: must be False here, got True"),
        ({"decoder_bias": False}, "decoder_bias: must be True here"),
        ({"classifier_pooling": "max"}, "classifier_pooling: must be cls or mean, got 'max'"),
        ({"local_attention": "128"}, "local_attention: expected a whole number from 2"),
        ({"sliding_window": 3}, "sliding_window: must be "),
        ({"norm_eps": float("nan")}, "norm_eps: expected a number above 0"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: must be full_attention for the"),
        ({"layer_types": 3}, "layer_types: must be full_attention for the first"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters.full_attention.rope_type: must be default here",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": "x"}}},
            "rope_parameters.sliding_attention.rope_theta: expected a number above 1",
        ),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling: must be null here"),
        ({"hidden_activation": "swish2"}, "swish2"),
    ],
)
def test_a_config_that_is_another_model_is_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    folder = saved(modernbert(), tmp_path)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | values))
    with pytest.raises(UserError, match="config.json: .*" + message.replace("(", r"\(")):
        open_contents(folder)


def test_a_missing_tensor_and_another_family_are_refused(tmp_path: Path) -> None:
    folder = saved(modernbert("ForMaskedLM"), tmp_path / "in")
    with pytest.raises(UserError, match="family: bert is another architecture; this one is modern"):
        convert(folder, tmp_path / "out", "huggingface", ConversionOptions(family="bert"))
    state = state_of(folder)
    del state["model.layers.2.mlp_norm.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="incomplete, it has no model.layers.2.mlp_norm.weight"):
        open_contents(folder)


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("modernbert-base", 149.7),
        ("modernbert-large", 395.9),
        ("ettin-17m", 16.9),
        ("ettin-32m", 32.1),
        ("ettin-68m", 68.5),
        ("ettin-1b", 1031),
        ("mmbert-small", 140.9),
        ("mmbert-base", 307.8),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(preset: str, millions: float) -> None:
    """With one table, the head and its bias."""
    words = 256_000 if preset.startswith("mmbert") else 50_368
    config = EncoderConfig.from_dict({"preset": preset, "vocab_size": words})
    with torch.device("meta"):
        encoder = build_encoder(config)
    count = words + sum(x.numel() for x in encoder.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=2e-3)


def test_a_dropout_that_the_encoder_has_no_setting_for_is_said(tmp_path: Path) -> None:
    modernbert("ForMaskedLM", embedding_dropout=0.1, mlp_dropout=0.2).save_pretrained(tmp_path)
    contents = open_contents(tmp_path)
    assert contents.config.dropout == 0.1
    assert "config.json: mlp_dropout is 0.2, but training drops 0.1 there" in contents.notes
    assert not any("mlp_dropout" in note for note in contents.notes_on_use)
    modernbert("ForMaskedLM", embedding_dropout=0.1, mlp_dropout=0.1).save_pretrained(tmp_path)
    assert not any("mlp_dropout" in note for note in open_contents(tmp_path).notes)
