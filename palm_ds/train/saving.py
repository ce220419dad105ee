"""Writes what a run must keep, and writes it again while the disk is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from palm_ds.engine import Engine
from palm_ds.runtime import checkpoint
from palm_ds.runtime.full_disk import PATIENCE_SECONDS, STOPPING_SECONDS, at_rank0, retried
from palm_ds.runtime.signals import StopFlag
from palm_ds.train.run_folder import RunSpec


class EventLog(Protocol):
    """Logs an event of a run: its name, a message for the screen, and further facts."""

    def __call__(self, name: str, message: str = "", **facts: object) -> None: ...


@dataclass
class Saver:
    """Saves checkpoints and other results of a run. All processes make the same calls."""

    run: RunSpec
    engine: Engine
    event: EventLog
    flag: StopFlag = field(default_factory=StopFlag)
    """Whether the run is asked to stop: nothing is waited for then."""
    saved: int = -1
    """Steps of the last checkpoint of this process's life."""
    _again: int = -1
    """Steps after which a checkpoint that could not be written is tried again."""

    def due(self, done: int) -> bool:
        """Whether to save a checkpoint after `done` steps."""
        every = self.run.recipe.save.every
        return self._ends(done) or done == self._again or (bool(every) and done % every == 0)

    def _ends(self, done: int) -> bool:
        return done == self.run.recipe.curriculum.steps

    def save(self, state: Mapping[str, Any], done: int, *, stopping: bool, ends: bool) -> None:
        """Save the checkpoint after `done` steps. If it cannot be written, training continues and
        tries again later; on a full disk, a run that ends waits for space, one that was asked to
        stop (`stopping`) only shortly."""
        patience = STOPPING_SECONDS if stopping else PATIENCE_SECONDS
        problem = retried(
            partial(self._attempt, state, done),
            group=self.engine.processes,
            say=partial(self.event, "disk full"),
            stop=lambda: self.flag.stop_requested and not stopping,
            patience=patience if stopping or ends or self._ends(done) else 0.0,
        )
        if problem:
            recipe = self.run.recipe
            self._again = done + max(recipe.save.every // 10, recipe.log.every)
            self.event("save failed", f"not saved: {problem}", step=done)
            return
        self.saved = done
        self.event("save", step=done)

    def _attempt(self, state: Mapping[str, Any], done: int) -> str:
        keep = self.run.recipe.save.keep
        try:
            self.engine.save(self.run.checkpoints, state, step=done, keep=keep)
        except checkpoint.SaveError as error:
            return str(error)
        return ""

    def write_at_rank0(self, write: Callable[[], None]) -> str:
        """Call `write` on rank 0, and again while the disk is full. Returns why it failed, or
        nothing. Collective."""

        def attempt() -> str:
            self.engine.beat()
            return at_rank0(self.engine.processes, write)

        return retried(
            attempt,
            group=self.engine.processes,
            say=partial(self.event, "disk full"),
            stop=lambda: self.flag.stop_requested,
        )
