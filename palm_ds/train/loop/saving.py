"""Writes what a run must keep, and writes it again while the disk is full.

A checkpoint in the middle of a run is copied at its step and written while training continues; it
exists ("saved step 1,000" in the log) at the end of the first step in which every process has
written its part. One is written at a time: if the next one comes before, training waits. Training
also waits for the last one of a process's life, and before a rollback.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from palm_ds.engine import Engine
from palm_ds.runtime.checkpoint import checkpoint, full_disk
from palm_ds.runtime.checkpoint.checkpoint import TWO_NEWEST, Retention
from palm_ds.runtime.checkpoint.writer import SavedCheckpoint
from palm_ds.runtime.processes.signals import StopFlag
from palm_ds.train.setup.run_folder import RunSpec

_LONG_WAIT = 5.0
"""Seconds of waiting for an earlier checkpoint that are worth a line."""


class EventLog(Protocol):
    """Logs an event of a run: its name, a message for the screen, and further facts."""

    def __call__(self, name: str, message: str = "", **facts: object) -> None: ...


@dataclass
class Saver:
    """Saves checkpoints and other results of a run. All processes make the same calls."""

    run: RunSpec
    engine: Engine
    event: EventLog
    ends_pass: Callable[[int], bool] = lambda done: False
    """Whether a pass ends after some steps."""
    flag: StopFlag = field(default_factory=StopFlag)
    """Whether the run is asked to stop: nothing is waited for then."""
    saved: int = -1
    """Steps of the last checkpoint of this process's life."""
    pending: int = -1
    """Steps of the one that is being written."""
    _again: int = -1
    """Steps after which a checkpoint that could not be written is tried again."""
    _stalled: float = 0.0
    """Seconds in which training has waited for the current checkpoint."""

    def due(self, done: int) -> bool:
        """Whether to save a checkpoint after `done` steps."""
        every = self.run.recipe.save.every
        if self.run.recipe.save.passes and self.ends_pass(done):
            return True
        return self._ends(done) or done == self._again or (bool(every) and done % every == 0)

    def _ends(self, done: int) -> bool:
        return done == self.run.recipe.curriculum.steps

    def save(
        self,
        state: Mapping[str, Any],
        done: int,
        *,
        stopping: bool = False,
        ends: bool = False,
        now: bool = False,
        keep: Retention = TWO_NEWEST,
    ) -> None:
        """Save the checkpoint after `done` steps; in the background unless the run stops or ends
        there, or with `now`. One of that step is replaced if the run ends early (`ends`) or with
        `now`: after a rollback it has other weights. If it cannot be written, training continues
        and tries again later; on a full disk, a run that ends waits for space, one that was asked
        to stop (`stopping`) only shortly. `keep`: the older ones that stay."""
        last = stopping or ends or self._ends(done)
        if self.pending == done and not (last or now):
            return
        self.finish(done)
        if ends or now:
            self.saved = -1
        if self.saved == done:
            return
        patience = full_disk.STOPPING_SECONDS if stopping else full_disk.PATIENCE_SECONDS
        background = self.run.recipe.save.background and not (last or now)
        problem = full_disk.retried(
            partial(self._attempt, state, done, background, keep),
            group=self.engine.processes,
            say=partial(self.event, "disk full"),
            stop=lambda: self.flag.stop_requested and not stopping,
            patience=patience if last else 0.0,
        )
        if problem:
            self._failed(problem, done)

    def finish(self, done: int | None = None) -> None:
        """Publish the checkpoint that is being written, if there is one; waits until it is written.
        `done`: the steps completed now, if the run continues."""
        if self.pending < 0:
            return
        saved_step, started = self.pending, time.monotonic()
        done = saved_step if done is None else done
        problem = self._publish()
        waited = time.monotonic() - started
        if waited > _LONG_WAIT:
            text = f"step {done}: training waited {waited:.0f} s for checkpoint {saved_step}"
            self.event("save wait", f"{text}; the disk is slow for `save.every`", seconds=waited)
        if problem:
            self._failed(problem, done)

    def _failed(self, problem: str, done: int) -> None:
        recipe = self.run.recipe
        self._again = done + max(recipe.save.every // 10, recipe.log.every)
        self.event("save failed", f"not saved: {problem}", step=done)

    def _attempt(
        self, state: Mapping[str, Any], done: int, background: bool, keep: Retention
    ) -> str:
        """Save a checkpoint, or only begin to. Returns why that failed, or nothing."""
        self._stalled = 0.0
        try:
            with self._stall():
                in_background = self.engine.start_save(
                    self.run.checkpoints, state, step=done, keep=keep, background=background
                )
        except checkpoint.SaveError as error:
            return str(error)
        self.pending = done
        return "" if in_background else self._publish()

    def _publish(self) -> str:
        """Publish what is written. Returns why it could not be, or nothing."""
        self.pending = -1
        try:
            with self._stall():
                saved = self.engine.finish_save()
        except checkpoint.SaveError as error:
            return str(error)
        self.saved = saved.step
        self._log(saved)
        return ""

    def _log(self, saved: SavedCheckpoint) -> None:
        seconds = {
            "stall_seconds": round(self._stalled, 3),
            "write_seconds": round(saved.write_seconds, 3),
        }
        text = f"training stood still for {self._stalled:.2f} s, writing took "
        text += f"{saved.write_seconds:.2f} s"
        self.event("save", f"saved step {saved.step}: {text}", step=saved.step, **seconds)

    @contextmanager
    def _stall(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._stalled += time.monotonic() - started

    def write_at_rank0(
        self, write: Callable[[], None], *, patience: float = full_disk.PATIENCE_SECONDS
    ) -> str:
        """Call `write` on rank 0, and again while the disk is full, for up to `patience` seconds.
        Returns why it failed, or nothing. Collective."""

        def attempt() -> str:
            self.engine.beat()
            return full_disk.at_rank0(self.engine.processes, write)

        return full_disk.retried(
            attempt,
            group=self.engine.processes,
            say=partial(self.event, "disk full"),
            stop=lambda: self.flag.stop_requested,
            patience=patience,
        )
