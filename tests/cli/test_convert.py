"""`palm-ds convert` that is interrupted: one line, and nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.weights.weights_folder import WeightsInfo, save_weights
from tests.helpers.warm_python import Program
from tests.weights.convert.test_convert import CONFIG, WORDS, model

STOPPED = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under `nohup`
from palm_ds.weights.convert import parity
parity.compare = lambda *_, **__: signal.raise_signal(signal.{number})
from palm_ds.cli.convert import COMMAND
COMMAND.start(sys.argv[1:])
"""


@pytest.mark.slow
def test_signals_clean_up(tmp_path: Path) -> None:
    save_weights(model(), tmp_path / "source", WeightsInfo(backbone=CONFIG), tokenizer=WORDS)
    ends = {"SIGINT": (130, "interrupted"), "SIGTERM": (143, "ended by SIGTERM")}
    ends["SIGHUP"] = (129, "ended by SIGHUP")
    running = {
        name: Program(["-c", STOPPED.format(number=name), tmp_path / "source", tmp_path / name])
        for name in ends
    }
    for name, program in running.items():
        said = program.communicate(timeout=120)[0]
        assert (program.returncode, said.splitlines()[-1:]) == (ends[name][0], [ends[name][1]])
        assert len(said.splitlines()) == 1, said
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
