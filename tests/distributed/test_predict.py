"""launch/predict.py in several processes: the same files, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.inference.predictor import CHUNK
from tests.helpers.saved_model import save_model, texts, write_rows

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PREDICT = str(Path(__file__).resolve().parent.parent.parent / "launch" / "predict.py")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_any_number_of_processes_writes_the_same_files(run_program, tmp_path, every) -> None:
    """`every`: of a real launcher too."""
    run = save_model(tmp_path / "run", ["mood", "topic", "size"])
    rows = write_rows(tmp_path / "rows.jsonl", texts(3 * CHUNK + 100, seed=6, longest=8))
    found = {}
    launchers = {"python": 1, "fork": 2} | ({"deepspeed": 3} if every else {})
    for launcher, processes in launchers.items():
        out = tmp_path / str(processes)
        arguments = (run, "--input", rows, "--output", out, "--tsv")
        done = run_program(PREDICT, *arguments, processes=processes, launcher=launcher)
        by = "1 process" if processes == 1 else f"{processes} processes"
        assert f"{3 * CHUNK + 100:,} rows in 1 pass by {by}, " in done.output
        found[processes] = contents(out)
    assert set(found[1]) >= {"mood.predictions.json", "topic.tsv", "scores.json", "about.json"}
    assert all(each == found[1] for each in found.values())
