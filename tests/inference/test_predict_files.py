"""Files to predict may have any labels, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palm_ds.inference.predict_files import PredictionJob, PredictionSummary, predict_files
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
