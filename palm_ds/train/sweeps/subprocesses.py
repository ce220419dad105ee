"""Commands in sessions of their own, stopped as a terminal would stop them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

import psutil

from palm_ds.common.errors import UserError

_PATIENCE_SECONDS = 120
"""For a run that was asked to stop, to save and leave."""


def run_and_wait(command: Sequence[str]) -> int:
    """A command in a session of its own; its exit code. Interrupted, it asks the processes once, as
    a terminal does, to stop, waits until they have saved and left, and is interrupted itself."""
    child = spawn(command)
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
    """A command begun in a session of its own; what it says goes to `output` (default: here)."""
    return subprocess.Popen(
        command,
        start_new_session=True,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        env={**os.environ, **(environment or {})},
    )


def interrupt_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask commands to stop, all at once, and wait for them. A launcher may leave before the
    processes it started: all are waited for."""
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
        _, left = psutil.wait_procs(left, timeout=_PATIENCE_SECONDS)
    finally:  # a second interrupt does not wait
        for process in left:
            if process.is_running():
                process.kill()


def launcher_of(text: str) -> list[str]:
    """The words of --launcher; this python where it is empty."""
    try:
        words = shlex.split(text) or [sys.executable]
    except ValueError as error:
        raise UserError(f"--launcher {text!r}: {error}") from None
    if shutil.which(words[0]) is None:
        raise UserError(f"--launcher: there is no program {words[0]!r}")
    return words


def interrupt(number: int, frame: Any) -> None:
    """As Ctrl-C does."""
    raise KeyboardInterrupt
