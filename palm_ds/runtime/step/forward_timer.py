"""Duration of the forward passes of this process.

The step as a whole takes equally long everywhere, since each process waits for the slowest one in
the backward pass; a forward pass waits for nobody (but under ZeRO 3, which gathers weights in it).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ForwardTimer:
    """Adds up the time of what runs inside `measure()`, on the device if it has a clock."""

    def __init__(self, device: torch.device):
        self._events: list[tuple[Any, Any]] | None = [] if device.type == "cuda" else None
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        if self._events is None:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((first, last))

    def take(self) -> float:
        """The seconds since the last call. Synchronises with the device."""
        seconds, self._seconds = self._seconds, 0.0
        for first, last in self._events or ():
            last.synchronize()
            seconds += first.elapsed_time(last) / 1000
        if self._events:
            self._events.clear()
        return seconds
