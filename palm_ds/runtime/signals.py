"""SIGTERM and Ctrl-C as a request to save and stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopFlag:
    """Set by SIGTERM and Ctrl-C; read between steps."""

    stop_requested: bool = False


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Within the context, SIGTERM and SIGINT request that the run saves and stops; a second Ctrl-C
    (more than two seconds later) interrupts it immediately."""
    flag = StopFlag()

    def handle(number: int, frame: FrameType | None) -> None:
        if flag.stop_requested and number == signal.SIGINT and time.monotonic() - first[0] > 2:
            raise KeyboardInterrupt
        first[0] = first[0] or time.monotonic()
        flag.stop_requested = True

    first = [0.0]
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
