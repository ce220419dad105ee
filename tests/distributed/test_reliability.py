"""Lost processes are named in one line, and nobody waits for them."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.distributed.test_commands import (
    MASKS,
    PACED,
    PRETRAIN,
    ROOT,
    SECONDS,
    records,
    wait_for,
    write_machine,
    write_recipe,
)
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.warm_python import clear_away, start_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SILENCE = 4
"""Seconds after which a process that gives no sign of life is lost; 30 unless a test sets it."""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A recipe and a DeepSpeed file."""
    folder = tmp_path_factory.mktemp("lost")
    write_small_corpus(folder / "corpus")
    stages = [{MASKS: 200}]
    recipe = write_recipe(folder, folder / "corpus", stages=stages, evaluate={}, save={"every": 2})
    return recipe, write_machine(folder, palm_ds={"peer_seconds": SILENCE})


@pytest.mark.parametrize(
    ("number", "lost", "code", "what"),
    [
        (signal.SIGKILL, 1, 1, "was killed or crashed"),
        (signal.SIGKILL, 0, 1, "was killed or crashed"),
        (signal.SIGSTOP, 1, 42, f"has given no sign of life for {SILENCE} seconds"),
    ],
)
def test_a_lost_process_is_named_by_the_others(files, tmp_path, number, lost, code, what) -> None:
    recipe, ds_config = files
    run = tmp_path / "run"
    words = [PACED, PRETRAIN, recipe, "--deepspeed_config", ds_config, "--run_dir", run]
    programs = start_together(2, words, env={"PYTHONPATH": str(ROOT)})
    try:
        wait_for(run, 3, programs[0], programs[0].output)
        os.kill(programs[lost].pid, number)
        began = time.monotonic()
        output, _ = programs[1 - lost].communicate(SECONDS)
        assert programs[1 - lost].returncode == code, output[-4000:]
        assert time.monotonic() - began < 30
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        last = records(run)[-1]["step"]
        name = f"rank {lost} on {socket.gethostname()} (last step "
        assert line.startswith(f"error: {name}") and what in line
        assert abs(int(line[len(f"error: {name}") :].split(")")[0]) - last) <= 3
        assert "Traceback" not in output
    finally:
        clear_away(programs)
