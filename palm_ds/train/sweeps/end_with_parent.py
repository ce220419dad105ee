"""Runs a command that must not outlive the process that started it.

    python -c "... main()" SECONDS COMMAND...

Standard input is a pipe from that process; it closes when the process ends, however it does. Then
the command is interrupted as by Ctrl-C, so that a run saves and exits, and killed after SECONDS.
Exit code and signal are the command's. Standard library and psutil only, so that it starts quickly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

import psutil


def main() -> NoReturn:
    """Run the command of the arguments, and end as it does."""
    seconds, *command = sys.argv[1:]
    _end_alike(run(command, float(seconds)))


def run(command: Sequence[str], seconds: float) -> int:
    """Run a command in this process's group; returns its exit code, -N after signal N."""
    # A handler, since a command would inherit that a signal is ignored.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: child.terminate())
    threading.Thread(target=_watch, args=(seconds,), daemon=True).start()
    return child.wait()


def _watch(seconds: float) -> None:
    """Wait until the other end of standard input is closed, then end the command."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    left = psutil.Process().children(recursive=True)
    os.killpg(0, signal.SIGINT)
    _, left = psutil.wait_procs(left, timeout=seconds)
    for process in left:
        process.kill()


def _end_alike(code: int) -> NoReturn:
    """Exit with this code, or by this signal."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
