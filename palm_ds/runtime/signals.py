"""Requests that a run saves and stops: SIGTERM, Ctrl-C, or the end of its launcher."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import psutil

from palm_ds.runtime.launcher import has_ended, launchers

log = logging.getLogger(__name__)


@dataclass
class StopFlag:
    """Set by SIGTERM, by Ctrl-C and when a launcher has ended; read between steps."""

    signalled: bool = False
    launchers: list[psutil.Process] = field(default_factory=list)

    @property
    def stop_requested(self) -> bool:
        """Without this, processes whose launcher was killed would continue unnoticed, alongside
        those of the next start."""
        if not self.signalled and any(map(has_ended, self.launchers)):
            log.info("the launcher has ended: saves and stops")
            self.signalled = True
        return self.signalled


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Within the context, SIGTERM and SIGINT request that the run saves and stops; a second Ctrl-C
    (more than two seconds later) interrupts it immediately."""
    flag = StopFlag(launchers=launchers())

    def handle(number: int, frame: FrameType | None) -> None:
        if flag.signalled and number == signal.SIGINT and time.monotonic() - first[0] > 2:
            raise KeyboardInterrupt
        first[0] = first[0] or time.monotonic()
        flag.signalled = True

    first = [0.0]
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
