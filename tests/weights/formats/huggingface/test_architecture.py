"""Folders of transformers' encoders, with each of their heads: read, computed, written as they
came."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from palm_ds.weights.convert.convert import ConversionOptions, convert
from palm_ds.weights.convert.parity import compare, inputs_for
from palm_ds.weights.formats.huggingface.read import open_contents
from palm_ds.weights.formats.huggingface.run import in_transformers
from palm_ds.weights.formats.runnable import in_palm_ds, load_encoder
from palm_ds.weights.weights_folder import export_hf
from tests.helpers.hf_architectures import CASES, HEADS, model_of, saved
from tests.helpers.hf_names import from_names
from tests.model.encoder.test_transformer import padded, texts, weighted

EXHAUSTIVE = pytest.mark.exhaustive
REFUSED = [(kind, *each) for kind, case in CASES.items() for each in case.refused]


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        pytest.param(kind, ending, marks=[] if few else EXHAUSTIVE)
        for number, kind in enumerate(CASES)
        for at, ending in enumerate(HEADS)
        for few in [ending == "ForMaskedLM" or at == number]
    ],
)
def test_every_class_is_computed_and_written_as_it_was_read(
    tmp_path: Path, kind: str, ending: str
) -> None:
    source, target = saved(model_of(kind, ending), tmp_path / "in"), tmp_path / "out"
    contents = open_contents(source)
    report = compare(
        in_transformers(contents), in_palm_ds(contents), inputs_for(contents, contents, None)
    )
    assert report.passed and report.worst.largest < 1e-5
    compared = {each.name for each in report.differences}
    assert {f"head {x}" for x in contents.heads} <= compared and "layer 3" in compared
    assert contents.heads or ending == "Model"
    convert(source, target, "huggingface", ConversionOptions(strict=True))
    written, read = state_of(target), state_of(source)
    assert written.keys() == read.keys()
    assert all(torch.equal(written[x], read[x]) for x in read)
    opened: Any = getattr(transformers, f"{CASES[kind].prefix}{ending}")
    model, loading = opened.from_pretrained(target, output_loading_info=True)
    assert not any(loading.values())
    assert model.config.rope_parameters == opened.from_pretrained(source).config.rope_parameters


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        *((kind, {"rope_theta": 77}) for kind in CASES),
        ("gte", {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ],
)
def test_a_rotary_base_under_the_key_of_earlier_versions(
    tmp_path: Path, kind: str, values: dict[str, Any]
) -> None:
    source = saved(model_of(kind), tmp_path / "in")
    about = json.loads((source / "config.json").read_text())
    del about["rope_parameters"]
    (source / "config.json").write_text(json.dumps(about | values))
    contents, batch = open_contents(source), padded()
    real = batch.sequence_ids >= 0
    its = transformers.AutoModel.from_pretrained(source).eval()
    expected = its(input_ids=batch.input_ids, attention_mask=real.long()).last_hidden_state[real]
    torch.testing.assert_close(load_encoder(contents)(batch)[real], expected, atol=1e-5, rtol=1e-5)
    convert(source, tmp_path / "out", "huggingface", ConversionOptions(strict=True))


@pytest.mark.parametrize("width", ["narrow", pytest.param("published", marks=EXHAUSTIVE)])
@pytest.mark.parametrize("kind", list(CASES))
def test_published_heads_have_transformers_outputs_and_gradients(
    tmp_path: Path, kind: str, width: str
) -> None:
    """Texts of 300 tokens, padding in the batch, the gradient of every parameter."""
    model = model_of(kind, **getattr(CASES[kind], width), num_hidden_layers=2)
    encoder, batch = load_encoder(open_contents(saved(model, tmp_path))), padded()
    real = batch.sequence_ids >= 0
    given: Any = {"input_ids": batch.input_ids, "attention_mask": real.long()}
    if model.config.to_dict().get("type_vocab_size", 0) > 1:
        batch.token_type_ids.copy_(batch.input_ids % 2)
        given["token_type_ids"] = batch.token_type_ids
    expected, found = model(**given).last_hidden_state[real], encoder(batch)[real]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # In fp64, as the rounding of sums over all tokens depends on the processor.
    weighted(model.double()(**given).last_hidden_state[real]).backward()
    weighted(encoder.double()(batch)[real]).backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    named, lost = from_names(gradients, kind)
    mine = {f"backbone.{name}": x.grad for name, x in encoder.named_parameters()}
    assert not lost and named.keys() == {name for name, x in mine.items() if x is not None}
    for name, gradient in named.items():
        # transformers' rotations and norms are of fp32: up to 5.1e-6 apart, by processor
        bound = 2e-5 * float(gradient.abs().max())
        torch.testing.assert_close(mine[name], gradient, atol=bound, rtol=0, msg=name)


@pytest.mark.parametrize("kind", [kind for kind, case in CASES.items() if case.gate])
def test_swapped_halves_of_a_gate_are_noticed(tmp_path: Path, kind: str) -> None:
    right, wrong = (saved(model_of(kind), tmp_path / x) for x in "ab")
    state, names = state_of(wrong), CASES[kind].gate
    halves = [half for name in names for half in state[name].chunk(3 - len(names))][::-1]
    swapped = torch.cat(halves).chunk(len(names))
    state |= {name: x.clone() for name, x in zip(names, swapped, strict=True)}
    save_file(state, wrong / "model.safetensors", {"format": "pt"})
    a, b = open_contents(right), open_contents(wrong)
    assert not compare(in_transformers(a), in_palm_ds(b), inputs_for(a, b, None)).passed


@pytest.mark.parametrize("kind", list(CASES))
def test_a_text_is_the_same_in_a_packed_row(tmp_path: Path, kind: str) -> None:
    """Positions begin anew; without that outputs stay, as attention is confined to a text."""
    encoder = load_encoder(open_contents(saved(model_of(kind), tmp_path)))
    several = texts((30, 1, 9))
    batch, start = Batch.from_rows([several], length=48, pad=0), 0
    packed = encoder(batch)[0]
    for text in several:
        size = len(text.input_ids)
        alone = encoder(Batch.from_rows([[text]], length=size, pad=0))[0]
        torch.testing.assert_close(packed[start : start + size], alone, atol=1e-5, rtol=1e-5)
        start += size
    moved = replace(batch, position_ids=torch.arange(48)[None])
    torch.testing.assert_close(encoder(moved)[0, :start], packed[:start], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", list(CASES))
def test_a_task_embedding_is_folded_into_another_table(tmp_path: Path, kind: str) -> None:
    config = replace(open_contents(saved(model_of(kind), tmp_path / "in")).config, task_types=3)
    encoder = build_encoder(config).eval()
    head = MaskedLMHead(encoder).eval()
    with torch.no_grad():
        encoder.get_parameter("task.weight").normal_()
    state = {f"backbone.{name}": x for name, x in encoder.state_dict().items()}
    state |= {f"heads.words.{name}": x for name, x in head.state_dict().items()}
    export_hf(state, tmp_path / "hf", config=config, task_id=2)
    model: Any = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    batch = padded()
    batch.task_ids.fill_(2)
    real = batch.sequence_ids >= 0
    its = model(input_ids=batch.input_ids, attention_mask=real.long()).logits[real]
    mine = head.logits(encoder(batch)[real])
    pairs = [x.log_softmax(-1) for x in (its, mine)]
    torch.testing.assert_close(*pairs, atol=1e-5, rtol=1e-5)
    batch.task_ids.fill_(0)
    other = head.logits(encoder(batch)[real]).log_softmax(-1)
    assert not torch.allclose(other, pairs[1], atol=1e-3)


@pytest.mark.parametrize(("kind", "values", "message"), REFUSED)
def test_another_model_is_refused(
    tmp_path: Path, kind: str, values: dict[str, Any], message: str
) -> None:
    folder = saved(model_of(kind), tmp_path)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | values))
    with pytest.raises(UserError, match=f"config.json: .*{message}"):
        open_contents(folder)


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
def test_eurobert_classifies_texts_as_transformers(tmp_path: Path, pooling: str) -> None:
    """The scores of each of its poolings, and the loss and gradients through the packed batch of a
    task, some of whose batches have no label."""
    its = model_of(
        "eurobert", "ForSequenceClassification", num_labels=3, classifier_pooling=pooling
    )
    contents = open_contents(saved(its, tmp_path))
    report = compare(
        in_transformers(contents), in_palm_ds(contents), inputs_for(contents, contents, None)
    )
    assert report.passed and report.worst.largest < 1e-5
    head = ClassHead(48, 3, pooled=True)
    model = Model(build_encoder(contents.config), {"classifier": head}, {"task": "classifier"})
    state, lost = from_names(its.state_dict(), "eurobert")
    assert not lost
    model.load_state_dict(state)
    several, labels = texts((30, 11)), torch.tensor([2, 0])
    batch = Batch.from_rows([several], length=44, pad=0)
    assert model.eval()(batch)["task"].loss_sum.item() == 0
    batch.labels["task"] = torch.tensor([0, 30]), labels
    loss = model(batch)["task"].loss_sum / 2
    alone = Batch.from_rows([[text] for text in several], length=30, pad=0)
    real = (alone.sequence_ids >= 0).long()
    expected = its(alone.input_ids, real, labels=labels).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients, _ = from_names({name: x.grad for name, x in its.named_parameters()}, "eurobert")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("preset", "words", "millions"),
    [
        ("eurobert-210m", 128_256, 211.7),
        ("eurobert-610m", 128_256, 607.8),
        ("eurobert-2.1b", 128_256, 2107),
        ("gte-multilingual-base", 250_048, 305.4),
        ("gte-base-en-v1.5", 30_528, 136.8),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(
    preset: str, words: int, millions: float
) -> None:
    """With one table and without a pooler."""
    config = EncoderConfig.from_dict({"preset": preset, "vocab_size": words})
    with torch.device("meta"):
        encoder = build_encoder(config)
    count = sum(x.numel() for name, x in encoder.named_parameters() if "pooler" not in name)
    assert count / 1e6 == pytest.approx(millions, rel=1e-3)
