"""How long training stands still for a checkpoint that is written in the background."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.gpu_parts.context import Context, Row, seconds_of
from benchmarks.gpu_parts.models import EngineLoop, Setup
from benchmarks.gpu_parts.speed import setup_of

STEPS = 5
"""Timed without a checkpoint."""


def checkpoints(context: Context) -> None:
    """Base and large under ZeRO 1. The goal: at most two steps' time."""
    for shape in ("base",) if context.toy else ("base", "large"):
        setup = setup_of(context, shape=shape, length=512)

        def measured(setup: Setup = setup) -> Row:
            loop = EngineLoop(setup, setup.batches(STEPS), context.device, workers=0)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    return _Saves(loop, context, Path(folder)).measure()
            finally:
                loop.close()

        context.measure(measured, needs=12, shape=shape)


@dataclass
class _Saves:
    loop: EngineLoop
    context: Context
    folder: Path
    numbers: Iterator[int] = field(default_factory=count)

    def measure(self) -> Row:
        """Seconds of the calls that save, with the copy on the device, and what the steps until the
        files were written took longer. The first checkpoint also allocates the copy's memory."""
        self._step()
        usual = statistics.median(self._step()[0] for _ in range(STEPS))
        found: Row = {"step_s": usual, "foreground_s": self._seconds(self._save)}
        for name in ("first", "background"):
            stall, slower = self._in_background(usual)
            found |= {f"{name}_s": stall, f"{name}_steps": stall / usual}
            found[f"{name}_slower_steps"] = slower / usual
        newest = max(self.folder.glob("step_????????"))
        found["gb"] = sum(file.stat().st_size for file in newest.iterdir()) / 1e9
        return found

    def _in_background(self, usual: float) -> tuple[float, float]:
        """Seconds that training stood still, and that it lost in steps meanwhile."""
        stall = self._seconds(self._start)
        slower, written = 0.0, False
        while not written:
            seconds, written = self._step()
            slower += seconds - usual
        return stall + self._seconds(self.loop.engine.finish_save), slower

    def _step(self) -> tuple[float, bool]:
        """The seconds of a step, and whether a checkpoint is written."""
        batches, written = next(self.loop.feed), []

        def train() -> None:
            result = self.loop.engine.step(batches, self.loop.lr, next(self.numbers))
            written.append(result.checkpoint_written)

        return self._seconds(train), written[0]

    def _save(self) -> None:
        self.loop.engine.save(self.folder, {}, step=next(self.numbers))

    def _start(self) -> None:
        self.loop.engine.start_save(self.folder, {}, step=next(self.numbers))

    def _seconds(self, call: Callable[[], object]) -> float:
        return seconds_of(call, self.context.device)
