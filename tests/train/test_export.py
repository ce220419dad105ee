"""Which head is exported to Hugging Face, and that transformers predicts the same with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from palm_ds.common.errors import UserError
from palm_ds.inference.predictor import Predictor
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.outputs import ExportedHead
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.text.exported_tokenizer import text_tokenizer
from palm_ds.train.export import check_family, head_taken
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import open_data, preparation_of
from palm_ds.train.train import train
from palm_ds.weights import weights_folder
from palm_ds.weights.convert.convert import ConversionOptions, convert
from tests.helpers.saved_model import TASKS, recipe_of, save_model
from tests.helpers.small_encoders import small_transformer
from tests.helpers.text_tables import source_of

DS_CONFIG = make_ds_config({"zero_optimization": {"stage": 0}})
KINDS: dict[str, tuple[dict[str, Any], str, int]] = {  # task: (its keys, the class, its outputs)
    "mood": ({}, "AutoModelForSequenceClassification", 3),
    "topic": ({}, "AutoModelForSequenceClassification", 2),
    "size": ({}, "AutoModelForSequenceClassification", 1),
    "pair": ({"strategy": "pointwise"}, "AutoModelForSequenceClassification", 2),
    "answer": ({}, "AutoModelForQuestionAnswering", 2),
}
PROBLEMS = {"topic": "multi_label_classification", "size": "regression"}
SCALED = {"size": {**TASKS["size"], "scale": True}}
TEXTS = ["so good .", "very bad , so bad ?", "a", "good bad so very"]


def predicted(asked: Predictor, task: str, folder: Path) -> list[Mapping[str, Any]]:
    (each,) = (x for x in asked.passes if task in [y.name for y in x.tasks])
    source = source_of(folder, [{"text_a": text} for text in TEXTS])
    (chunk,) = asked.predict(each, asked.source(source.table))
    return list(chunk.predictions[task])


def predicted_by_transformers(folder: Path) -> list[list[dict[str, Any]]]:
    """The scores of all classes from its own pipeline."""
    pipeline = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    found: Any = pipeline(TEXTS, top_k=None)
    return found


def compare(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Sequence[dict]], labels: Sequence[str]
) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        scores = {each["label"]: each["score"] for each in other}
        if not labels:
            assert scores == pytest.approx({"LABEL_0": mine["value"]}, abs=1e-5)
            continue
        wanted = dict(zip(labels, mine["probs"], strict=True))
        assert scores == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_the_head_of_a_single_task_is_exported(tmp_path: Path, name: str) -> None:
    more, opener, outputs = KINDS[name]
    run = save_model(tmp_path / "run", [name], tasks={name: {**TASKS[name], **more}})
    asked = TrainedModel.open(run).predictor()
    taken = head_taken(recipe_of(run), asked.model.state_dict())
    assert isinstance(taken, ExportedHead)
    config = asked.model.backbone.config
    weights_folder.export_hf(asked.model, tmp_path / "hf", config=config, head=taken)
    theirs = getattr(transformers, opener).from_pretrained(tmp_path / "hf")
    labels = getattr(asked.tasks[name], "labels", ())
    if labels:
        assert tuple(theirs.config.id2label.values()) == labels
    assert theirs.config.problem_type == PROBLEMS.get(name)
    out = theirs.qa_outputs if name == "answer" else theirs.classifier
    assert out.out_features == outputs
    ours = asked.model.state_dict()[f"heads.{name}.out.weight"]
    torch.testing.assert_close(out.weight.detach(), ours, atol=0, rtol=0)


@pytest.mark.parametrize("simplify", [True, False])
def test_simplified_rows_give_the_weights_a_tokenizer_that_does_it(
    tmp_path: Path, simplify: bool
) -> None:
    recipe = recipe_of(save_model(tmp_path, ("mood",)))
    sources = {
        name: replace(each, read=replace(each.read, simplify=simplify))
        for name, each in recipe.sources.items()
    }
    recipe = replace(recipe, sources=sources)
    data = open_data(recipe)
    found = text_tokenizer(data.tokenizer, preparation_of(recipe, data))
    assert (found is not None) == simplify
    if found:
        assert found.backend.normalizer.normalize_str("臺灣").split() == ["台", "湾"]


def test_no_head_of_several_tasks_is_exported(tmp_path: Path) -> None:
    both = save_model(tmp_path / "both", ["mood", "topic"])
    assert (
        head_taken(recipe_of(both), TrainedModel.open(both).predictor().model.state_dict()) is None
    )
    tasks = {"mood": dict(TASKS["mood"]), "topic": {**TASKS["topic"], "auxiliary": True}}
    one = save_model(tmp_path / "one", ["mood", "topic"], tasks=tasks)
    taken = head_taken(recipe_of(one), TrainedModel.open(one).predictor().model.state_dict())
    assert taken is not None and taken.name == "mood"


def test_a_run_of_several_heads_writes_a_folder_for_each(tmp_path: Path) -> None:
    """`export_heads`: hf_heads/TASK, with what palm-ds convert --head TASK writes."""
    tasks: dict[str, Any] = {name: dict(TASKS[name]) for name in ("mood", "size", "topic")}
    tasks["topic"]["auxiliary"] = True
    saved = save_model(tmp_path / "saved", ["mood", "size", "topic"], tasks=tasks)
    recipe = replace(recipe_of(saved), export_heads=True, export_onnx=())
    run = RunSpec(recipe=recipe, ds_config=DS_CONFIG, folder=tmp_path / "run")
    assert train(run) == 0
    heads = tmp_path / "run/hf_heads"
    assert sorted(x.name for x in heads.iterdir()) == ["mood", "size"]
    assert not any("classifier" in x for x in load_file(tmp_path / "run/hf/model.safetensors"))
    for name in ("mood", "size"):
        options = ConversionOptions(head=name)
        convert(tmp_path / "run", tmp_path / name, "huggingface", options)
        ours, theirs = (load_file(x / "model.safetensors") for x in (heads / name, tmp_path / name))
        assert ours.keys() == theirs.keys() and "classifier.weight" in ours
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
        assert "- `" + name + "`: " in (heads / name / "README.md").read_text()


def test_exported_regression_uses_the_units_of_the_file(tmp_path: Path) -> None:
    run = save_model(tmp_path / "run", ["size"], tasks=SCALED)
    asked = TrainedModel.open(run).predictor()
    taken = head_taken(recipe_of(run), asked.model.state_dict())
    assert taken is not None and taken.outputs.deviation != 1
    weights_folder.export_hf(
        asked.model,
        tmp_path / "hf",
        config=asked.model.backbone.config,
        head=taken,
        tokenizer=asked.tokenizer,
    )
    compare(predicted(asked, "size", tmp_path), predicted_by_transformers(tmp_path / "hf"), ())


@pytest.mark.parametrize("name", ["mood", "topic", "size"])
def test_any_exported_head_predicts_the_same(tmp_path: Path, name: str) -> None:
    """Its classes keep their names, its texts the embedding of its task."""
    chosen = {x: {**TASKS[x], **SCALED.get(x, {})} for x in ("mood", "topic", "size")}
    run = save_model(tmp_path / "run", list(chosen), tasks=chosen)
    asked = TrainedModel.open(run).predictor()
    ours, labels = predicted(asked, name, tmp_path), getattr(asked.tasks[name], "labels", ())
    options = ConversionOptions(head=name)
    assert convert(run, tmp_path / "hf", "huggingface", options).parity
    compare(ours, predicted_by_transformers(tmp_path / "hf"), labels)
    for source, target, to in (("hf", "ours", "palm_ds"), ("ours", "again", "huggingface")):
        done = convert(tmp_path / source, tmp_path / target, to)
        assert done.parity and done.parity.passed
    compare(ours, predicted_by_transformers(tmp_path / "again"), labels)
    done = convert(run, tmp_path / "copy")  # all heads, with what they mean
    assert done.parity and not done.report.skipped
    convert(tmp_path / "copy", tmp_path / "of copy", "huggingface", options)
    compare(ours, predicted_by_transformers(tmp_path / "of copy"), labels)
    assert np.isfinite([x.get("value", 0) for x in ours]).all()


@pytest.mark.parametrize(
    ("kind", "pad", "options"),
    [
        ("mpnet", 0, {}),
        ("mpnet", 1, {}),
        ("mpnet", 1, {"relative_buckets": 8}),
        ("bert", 0, {}),
        ("bert", 1, {}),
    ],
)
def test_an_encoder_that_no_family_has_is_refused_at_the_start(
    kind: str, pad: int, options: dict[str, Any]
) -> None:
    """Hugging Face's MPNet and Roberta have padding 1 alone, and its MPNet 32 buckets."""
    config = small_transformer(kind, position_offset=2, pad=pad, options=options)
    recipe: Any = SimpleNamespace(export_family="")
    if pad == 1 and not options:
        check_family(recipe, build_encoder(config))
        return
    with pytest.raises(UserError, match="^backbone: hf/ could not be written after the run: Hugg"):
        check_family(recipe, build_encoder(config))
