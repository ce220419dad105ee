"""Runs commands in their own process group, interrupts them as Ctrl-C would, and leaves none behind
if this process is killed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

import palm_ds
from palm_ds.common.errors import UserError
from palm_ds.runtime.processes.rank_status import FOLDER

_GRACE_SECONDS = 120
"""Time for an interrupted run to save and exit; then it is killed."""

_END_WITH_PARENT = f"""
import sys
sys.path.insert(0, {str(Path(palm_ds.__file__).parents[1])!r})
from palm_ds.train.sweeps.end_with_parent import main
main()
"""


def run_and_wait(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command in its own session; returns its exit code. On KeyboardInterrupt, interrupts all
    of its processes once, waits until they have saved and exited, and re-raises."""
    child = spawn(command, environment=environment)
    try:
        return child.wait()
    except KeyboardInterrupt:
        interrupt_all([child])
        raise


def spawn(
    command: Sequence[str],
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in its own session; it is interrupted if this process ends before it. Its
    output goes to `output` (default: this process's). `palm-ds run` watches this process, not those
    that it starts."""
    inherited = {name: value for name, value in os.environ.items() if name != FOLDER}
    reading, writing = os.pipe()  # nothing is written; the end of this process closes it
    child = subprocess.Popen(
        [sys.executable, "-c", _END_WITH_PARENT, str(_GRACE_SECONDS), *command],
        start_new_session=True,
        stdin=reading,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        env={**inherited, **(environment or {})},
    )
    os.close(reading)
    weakref.finalize(child, os.close, writing)
    return child


def interrupt_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt all commands together and wait for them. Waits for all of their processes, since a
    launcher may exit before the processes that it started."""
    left: list[psutil.Process] = []
    for child in children:
        try:
            launcher = psutil.Process(child.pid)
            family = [launcher, *launcher.children(recursive=True)]
            os.killpg(child.pid, signal.SIGINT)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
        left += family
    try:
        _, left = psutil.wait_procs(left, timeout=_GRACE_SECONDS)
    finally:  # a second interrupt does not wait
        for process in left:
            if process.is_running():
                process.kill()


def failure_in(output: Path) -> str:
    """The last error line of a command's output, else its last line."""
    text = output.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1]


def launcher_of(text: str) -> list[str]:
    """The words of --launcher; this Python if it is empty."""
    try:
        words = shlex.split(text) or [sys.executable]
    except ValueError as error:
        raise UserError(f"--launcher {text!r}: {error}") from None
    if shutil.which(words[0]) is None:
        raise UserError(f"--launcher: there is no program {words[0]!r}")
    return words


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal handler that does what Ctrl-C does."""
    raise KeyboardInterrupt
