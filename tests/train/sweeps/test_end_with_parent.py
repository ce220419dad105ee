"""A command that `spawn` started ends with its parent, however that ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from palm_ds.train.sweeps.subprocesses import interrupt_all, spawn

WAITING = """
import pathlib, signal, subprocess, sys
done = pathlib.Path(sys.argv[1])
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
# Waited for, not handled: a KeyboardInterrupt may come before `try`, or be lost in a destructor.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
done.with_suffix(".started").write_text(str(worker.pid))
signal.sigwait({signal.SIGINT})
worker.wait()
done.write_text("saved")
"""
STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).with_suffix(".started").write_text("0")
time.sleep(60)
"""
PARENT = """
import sys
from palm_ds.train.sweeps import subprocesses
subprocesses._GRACE_SECONDS = float(sys.argv[3])
child = subprocesses.spawn([sys.executable, "-c", sys.argv[1], sys.argv[2]])
print(child.pid, flush=True)
child.wait()
"""


def until(holds, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def killed_parent(code: str, done: Path, grace: float) -> list[psutil.Process]:
    """The processes of a command whose parent alone was killed with SIGKILL."""
    command = [sys.executable, "-c", PARENT, code, str(done), str(grace)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    started = psutil.Process(int(parent.stdout.readline()))
    assert until(done.with_suffix(".started").exists)
    family = [started, *started.children(recursive=True)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    return family


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_an_orphan_is_interrupted_and_saves(tmp_path: Path) -> None:
    family = killed_parent(WAITING, tmp_path / "done", grace=20)  # a busy machine is slow
    assert len(family) == 3
    assert until(lambda: all(map(ended, family)))
    assert (tmp_path / "done").read_text() == "saved"


def test_an_orphan_that_does_not_end_is_killed(tmp_path: Path) -> None:
    family = killed_parent(STUBBORN, tmp_path / "done", grace=1)
    assert until(lambda: all(map(ended, family)))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("import sys; raise SystemExit(len(sys.stdin.read()))", 0),
    ],
)
def test_it_ends_as_its_command_does(code: str, expected: int) -> None:
    assert spawn([sys.executable, "-c", code]).wait() == expected


def test_a_missing_program_is_one_line(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert spawn(["/no/such/program"], log).wait() == 127
    line = "error: /no/such/program: No such file or directory\n"
    assert (tmp_path / "log").read_text() == line


def test_a_living_parent_interrupts_and_waits(tmp_path: Path) -> None:
    child = spawn([sys.executable, "-c", WAITING, str(tmp_path / "done")])
    assert until((tmp_path / "done.started").exists)
    interrupt_all([child])
    assert child.wait() == 0 and (tmp_path / "done").read_text() == "saved"
