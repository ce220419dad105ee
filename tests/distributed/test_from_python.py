"""The same Python program in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.small_tables import write_tables

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("launcher", "onnx", "stages"),
    [
        ("fork", "pretended", (3,)),
        pytest.param("torchrun", "real", (1, 3), marks=pytest.mark.exhaustive),
    ],
)
def test_two_processes_learn_and_predict_the_same_as_one(
    launcher, onnx, stages, run_program, tmp_path
) -> None:
    tables = write_tables(tmp_path / "tables")

    def run(launcher: str, *more: Any) -> Any:
        out = tmp_path / f"{launcher}.json"
        arguments = ("--tables", tables, "--folder", tmp_path / launcher, "--out", out)
        arguments = (*arguments, *more)
        run_program(Path(__file__).with_name("from_python.py"), *arguments, launcher=launcher)
        return json.loads(out.read_text())

    one, two = run("python", "--stages", 2), run(launcher, "--onnx", onnx, "--stages", *stages)
    # While the first process writes it, the other waits.
    assert (tmp_path / launcher / "hf/onnx/model.onnx").is_file()
    assert one["steps"] == two["steps"] == {"classification": 6, "howmany": 12}
    assert two["scores"].keys() == {"classification", "howmany"}
    scores = [each["evaluated"]["howmany"]["minus_error"] for each in (one, two)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert one["evaluated"]["classification"].keys() == two["evaluated"]["classification"].keys()
    for mine, theirs in zip(
        one["predictions"]["howmany"], two["predictions"]["howmany"], strict=True
    ):
        assert mine["value"] == pytest.approx(theirs["value"], abs=1e-4)
    logits = [[p["logits"] for p in each["predictions"]["classification"]] for each in (one, two)]
    assert len(logits[0]) == 9
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    for each in (one, two):  # gradient checkpointing, under ZeRO 2 and 3, with dropout
        for found in each["recomputed"]:
            np.testing.assert_allclose(found, one["plain"], atol=1e-4)
