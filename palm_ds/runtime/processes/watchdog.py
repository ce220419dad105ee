"""Ends a process whose steps no longer finish, so that a launcher can restart the run.

By default the limit follows from the step times measured: a step may take 20 times as long as the
slowest of the last 100, and 10 minutes in any case. The first steps, which compile, and whatever
is no step (evaluating, saving, exporting) have an hour. Time in which the whole process was stopped
(SIGSTOP, as `scontrol suspend` sends it) does not count.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from palm_ds.common import errors
from palm_ds.common.messages import print_error
from palm_ds.runtime.processes import rank_status

_MIN_LIMIT, _DEFAULT_LIMIT = 600.0, 3600.0
"""Seconds: the least limit of a step, and the limit of everything else."""
_FACTOR = 20
_WARM_UP_STEPS, _MIN_STEPS, _HISTORY_STEPS = 2, 5, 100
"""First steps that say nothing, fewest steps that say something, steps remembered."""
_SUSPENDED = 5
"""A pause of the watching thread that takes this many times as long: the process was stopped."""


class Watchdog:
    """`stepped` after each training step, `beat` before and during anything else. `seconds`: a
    fixed limit; 0: never; None: from the step times, at least `floor`."""

    def __init__(self, seconds: float | None = None, *, floor: float = _MIN_LIMIT):
        self._fixed, self._floor = seconds, floor
        self._times: deque[float] = deque(maxlen=_HISTORY_STEPS)
        self._steps, self._stepping = 0, False
        self._last = time.monotonic()
        self._closed = threading.Event()
        if seconds != 0:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @property
    def limit(self) -> float:
        """Seconds until the next sign of progress."""
        if self._fixed is not None:
            return self._fixed
        if not self._stepping or len(self._times) < _MIN_STEPS:
            return _DEFAULT_LIMIT
        return max(self._floor, _FACTOR * max(self._times))

    def stepped(self) -> None:
        now = time.monotonic()
        self._steps += 1
        if self._stepping and self._steps > _WARM_UP_STEPS:
            self._times.append(now - self._last)
        self._last, self._stepping = now, True

    def beat(self) -> None:
        self._last, self._stepping = time.monotonic(), False

    @contextmanager
    def beating(self) -> Iterator[None]:
        """A context for what takes its time, but is no step."""
        self.beat()
        yield
        self.beat()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(pause := min(self.limit / 10, 5.0)):
            now = time.monotonic()
            if now - before > _SUSPENDED * pause:
                self._last = min(self._last + now - before, now)
            before = now
            if now - self._last > self.limit:
                code = errors.WATCHDOG
                why = f"no step for {self.limit / 60:g} minutes"
                # not logged: a hanging thread may hold the logger's lock
                print_error(f"error: {why}; giving up (exit code {code})")
                rank_status.report(code=code, why=why)
                os._exit(code)
