"""The progress bar of commands that use a model."""

from __future__ import annotations

import re
import sys
import time

import pytest

from palm_ds.cli.inference_options import progress


@pytest.mark.parametrize("total", [8, None])
def test_one_report_has_a_speed(
    total: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an output in one chunk, or whose chunks take long, it was 0 to the end."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress("embed", True) as done:
        time.sleep(0.05)
        done(8, total)
    last = capsys.readouterr().err.rpartition("rows  ")[2]
    speed = re.match(r"([\d,]+) rows/s", last)
    assert speed and 0 < int(speed[1].replace(",", "")) <= 160, last
