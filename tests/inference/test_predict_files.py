"""Files to predict may have any labels, or none; a run that was interrupted continues."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import palm_ds.inference.predictor
from palm_ds.inference.predict_files import PredictionJob, PredictionSummary, predict_files
from palm_ds.inference.prediction_files import _ByRow
from palm_ds.inference.trained_model import TrainedModel
from tests.helpers.saved_model import TITLE, save_model, write_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tasks = {"titles": TITLE, "mood": {"kind": "classification", "source": "texts"}}
    folder = tmp_path_factory.mktemp("run")
    return save_model(folder, stages=tuple(tasks), tasks=tasks)


def predicted(run: Path, folder: Path, name: str, rows: Any) -> PredictionSummary:
    file = str(write_rows(folder / "rows.jsonl", rows))
    job = PredictionJob(inputs=[file], output=folder / "out")
    found = predict_files(TrainedModel.open(run).predictor([name]), job)
    assert found is not None and found.rows == len(rows)
    return found


@pytest.mark.parametrize(
    ("name", "row", "label"),
    [("titles", {"source": "so good"}, "target"), ("mood", {"text_a": "so good"}, "label")],
)
def test_labels_that_are_missing_are_noted(run, name, row, label, tmp_path) -> None:
    whole = predicted(run, tmp_path, name, [row | {label: "good"}] * 2)
    assert list(whole.scores) == [name]
    written = (tmp_path / "out" / f"{name}.predictions.json").read_text()
    (tmp_path / "none").mkdir()
    without = predicted(run, tmp_path / "none", name, [row | {label: None}] * 2)
    assert not without.scores and "labels ignored" in without.notes[0]
    assert (tmp_path / "none" / "out" / f"{name}.predictions.json").read_text() == written


def test_rows_without_a_label_and_those_that_training_drops_are_not_scored(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    source = {"table": f"{folder}/texts.jsonl", "tokenizer": f"{folder}/vocabulary"}
    read = {"drop": {"label": ["?"]}}
    run = save_model(folder, ("mood",), sources={"texts": {**source, "read": read}})
    good, bad = {"text_a": "so good", "label": "good"}, {"text_a": "bad", "label": "bad"}
    (tmp_path / "whole").mkdir()
    whole = predicted(run, tmp_path / "whole", "mood", [good, bad])
    found = predicted(
        run, tmp_path, "mood", [good, good | {"label": "?"}, bad | {"label": ""}, bad]
    )
    assert found.scores == whole.scores and not whole.notes
    (note,) = found.notes
    assert note == "mood: not scored: 2 rows without a label, or that training drops"


def good_rate(predictions: list[dict[str, Any]], labels: list[str]) -> float:
    return sum(each["label"] == "good" for each in predictions) / len(labels)


def test_rows_are_scored_by_metrics_of_the_users_own(tmp_path: Path) -> None:
    """Which the recipe names; the others remain where they cannot be imported."""
    rows = [{"text_a": "so good", "label": "good"}, {"text_a": "bad", "label": "bad"}]
    for number, (name, many) in enumerate({__name__: 1, "nowhere": 0}.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        metrics = {"mood": [f"{name}.good_rate"]}
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(sys.modules, name, sys.modules[__name__])
            run = save_model(folder / "run", ("mood",), evaluate={"metrics": metrics})
        found = predicted(run, folder, "mood", rows)
        assert list(found.scores["mood"]).count("good_rate") == many
        assert "accuracy" in found.scores["mood"]
        assert any("cannot import 'nowhere'" in note for note in found.notes) == (not many)


@pytest.mark.parametrize(
    ("known", "other"),
    [
        ({"tokens": ["good"], "tags": ["B-X"]}, {"tokens": ["good"], "tags": ["B-Y"]}),
        (
            {"text_a": "good", "spans": [{"start": 0, "end": 4, "type": "X"}]},
            {"text_a": "good", "spans": [{"start": 0, "end": 4, "type": "Y"}]},
        ),
    ],
)
def test_rows_of_other_chunks_are_noted(known: Any, other: Any, tmp_path: Path) -> None:
    """Scores are those of all rows, or none."""
    tasks = {"names": {"kind": "tagging", "source": "words"}}
    run = save_model(tmp_path / "run", ("names",), tasks=tasks)
    assert list(predicted(run, tmp_path, "names", [known, known]).scores) == ["names"]
    found = predicted(run, tmp_path, "names", [known, other])
    assert not found.scores and "unknown tag 'B-Y'" in found.notes[0]


def test_a_worse_text_is_all_that_pairwise_matching_is_scored_by(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "pairs.jsonl", [{"text_a": "good", "text_b": "so"}] * 2)
    tasks = {"pair": {"kind": "matching", "source": "pairs", "strategy": "pairwise"}}
    run = save_model(tmp_path / "run", ("pair",), tasks=tasks)
    job = PredictionJob(inputs=[str(file)], output=tmp_path / "out")
    bare = predict_files(TrainedModel.open(run).predictor(), job)
    assert bare is not None and not bare.scores
    rows = [{"text_a": "good", "text_b": x, "text_b_neg": y} for x, y in ("ab", "ba")]
    assert predicted(run, tmp_path, "pair", rows).scores == {"pair": {"accuracy": 0.5}}


def interrupted(run: Path, job: PredictionJob, chunks: int) -> None:
    """Predict all but the last of some chunks."""
    predictor = TrainedModel.open(run).predictor()

    def done(rows: int, of: int) -> None:
        nonlocal chunks
        chunks -= 1
        if not chunks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict_files(predictor, job, done=done)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PredictionJob:
    """Rows of both tasks, in chunks of four."""
    monkeypatch.setattr(palm_ds.inference.predictor, "CHUNK", 4)
    words = ["so", "good", "bad", "very"]
    rows = [
        {"text_a": f"{words[i % 4]} {words[i % 3]}", "source": words[i % 4], "label": "good"}
        for i in range(11)
    ]
    file = str(write_rows(tmp_path / "rows.jsonl", rows))
    columns = {role: role for role in ("text_a", "source", "label")}
    return PredictionJob(inputs=[file], output=tmp_path / "out", columns=columns, tsv=True)


def test_an_interrupted_run_continues(run, job) -> None:
    whole = replace(job, output=job.output.with_name("whole"))
    summary = predict_files(TrainedModel.open(run).predictor(), whole)
    assert summary is not None and (summary.continued, summary.passes) == (0, 2)
    interrupted(run, job, 4)  # all three chunks of one pass, one of the other
    assert not job.output.exists()
    again = predict_files(TrainedModel.open(run).predictor(), job)
    assert again is not None and again.continued == 11 + 4
    assert (again.scores, again.cut) == (summary.scores, summary.cut)
    assert contents(job.output) == contents(whole.output)
    assert not list(job.output.parent.glob(".*.parts"))


@pytest.mark.parametrize("change", ["rows", "weights", "tasks", "settings", "code"])
def test_parts_of_anything_else_are_not_continued(run, job, change, tmp_path, monkeypatch) -> None:
    model = shutil.copytree(run, tmp_path / "model")
    interrupted(model, job, 2)
    if change == "rows":
        with open(job.inputs[0], "a", encoding="utf-8") as file:
            file.write('{"text_a": "good", "source": "so", "label": "bad"}\n')
    if change == "weights":
        weights = next(model.rglob("*.safetensors"))
        os.utime(weights, ns=(0, 0))
    predictor = TrainedModel.open(model).predictor(["mood"] if change == "tasks" else [])
    if change == "settings":
        predictor = predictor.generating({"beams": 2})
    if change == "code":
        monkeypatch.setattr(palm_ds.inference.predict_files, "source_code", lambda cls: "edited")
    found = predict_files(predictor, job)
    assert found is not None and found.continued == 0


def test_predictions_without_labels_are_never_all_in_memory(run, job, monkeypatch) -> None:
    monkeypatch.setattr(_ByRow, "_known", property(lambda _: pytest.fail("all were read")))
    unlabeled = replace(job, columns={"text_a": "text_a", "label": ""})
    found = predict_files(TrainedModel.open(run).predictor(["mood"]), unlabeled)
    assert found is not None and not found.scores and found.rows == 11
