"""SIGTERM and Ctrl-C as a request to save and stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class StopAsked:
    """Set by SIGTERM and Ctrl-C; read between steps."""

    now: bool = False


@contextmanager
def stop_signals() -> Iterator[StopAsked]:
    """SIGTERM and SIGINT ask the run to save and leave; a second Ctrl-C leaves at once."""
    asked = StopAsked()

    def ask(number: int, frame: Any) -> None:
        if asked.now and number == signal.SIGINT and time.monotonic() - first[0] > 2:
            raise KeyboardInterrupt
        first[0] = first[0] or time.monotonic()
        asked.now = True

    first = [0.0]
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
