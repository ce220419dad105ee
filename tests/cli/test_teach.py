"""`palm-ds teach` takes what training takes: shipped recipes and overrides."""

from __future__ import annotations

import sys

import pytest

from palm_ds.cli.main import main
from palm_ds.inference.distillation import teach
from palm_ds.runtime.processes import processes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chnsenticorp_bow", "--output: missing; name the file to write, such as scores.parquet"),
        ("chnsenticorp_bwo", 'no shipped recipe has this name; did you mean "finetune/chnsent'),
        ("chnsenticorp_bow scores.parquet", "override 'scores.parquet': expected key=value"),
    ],
)
def test_recipes_by_name(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["teach", *words.split()])
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_the_training_to_run_next_has_the_same_overrides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores of other batches would be refused."""
    done = teach.TeachSummary(rows=9, by="rows of tables", parts=1, continued=0)
    monkeypatch.setattr(teach, "teach", lambda *_, **__: done)
    for name in ("start", "stop"):
        monkeypatch.setattr(processes, name, lambda *_: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["teach", "chnsenticorp_bow", "batch=4 examples", "--output", "my scores"]) == 0
    given = "chnsenticorp_bow 'batch=4 examples' --deepspeed_config FILE 'teacher.file=my scores'"
    assert f"palm-ds finetune {given}\n" in capsys.readouterr().err
