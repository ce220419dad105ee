"""When a checkpoint is started, waited for and named in the log; the engine is played."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from palm_ds.engine import Engine
from palm_ds.runtime.checkpoint.checkpoint import Retention, SaveError
from palm_ds.runtime.checkpoint.writer import SavedCheckpoint
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.train.loop import saving
from palm_ds.train.loop.saving import Saver
from palm_ds.train.setup.run_folder import RunSpec


@dataclass
class PlayedEngine:
    """Notes its calls; the saves of the steps in `fails` fail when they are finished."""

    calls: list[str] = field(default_factory=list)
    fails: set[int] = field(default_factory=set)
    memory: bool = True
    step: int = -1
    processes = SINGLE_PROCESS

    def start_save(
        self, folder: Path, state: Any, *, step: int, keep: Retention, background: bool
    ) -> bool:
        assert self.step < 0
        background = background and self.memory
        self.calls.append(f"{'copy' if background else 'write'} {step}")
        self.step = step
        return background

    def finish_save(self) -> SavedCheckpoint:
        step, self.step = self.step, -1
        self.calls.append(f"finish {step}")
        if step in self.fails:
            raise SaveError("No space left on device")
        return SavedCheckpoint(path=Path(), step=step, write_seconds=0.5)


class Played:
    def __init__(self, *, background: bool = True, memory: bool = True):
        self.engine, self.events = PlayedEngine(memory=memory), []
        recipe = SimpleNamespace(
            save=SimpleNamespace(every=10, passes=False, background=background),
            curriculum=SimpleNamespace(steps=100),
            log=SimpleNamespace(every=1),
        )
        run = SimpleNamespace(recipe=recipe, checkpoints=Path("checkpoints"))
        self.saver = Saver(cast(RunSpec, run), cast(Engine, self.engine), self.event)

    def event(self, name: str, message: str = "", **facts: Any) -> None:
        self.events.append((name, facts.get("step"), message))

    @property
    def calls(self) -> list[str]:
        calls, self.engine.calls = self.engine.calls, []
        return calls


def test_in_the_middle_of_a_run_training_continues() -> None:
    run = Played()
    run.saver.save({}, 10)
    run.saver.save({}, 10)  # once
    assert run.calls == ["copy 10"] and run.events == [] and run.saver.saved == -1
    run.saver.finish(12)
    run.saver.finish(13)
    assert run.calls == ["finish 10"] and run.saver.saved == 10
    ((name, step, message),) = run.events
    assert (name, step) == ("save", 10)
    # a busy machine may take some hundredths of a second
    assert re.match(
        r"saved step 10: training stood still for 0\.\d\d s, writing took 0.50 s", message
    )


def test_the_next_one_waits_for_the_last_one() -> None:
    run = Played()
    run.saver.save({}, 10)
    run.saver.save({}, 20)
    assert run.calls == ["copy 10", "finish 10", "copy 20"]


@pytest.mark.parametrize("how", [{"stopping": True}, {"ends": True}, {"now": True}])
def test_what_must_exist_is_waited_for(how: dict[str, Any]) -> None:
    run = Played()
    run.saver.save({}, 10)
    run.saver.save({}, 13, **how)
    assert run.calls == ["copy 10", "finish 10", "write 13", "finish 13"]
    assert run.saver.saved == 13
    run = Played()
    run.saver.save({}, 10)
    run.saver.save({}, 10, **how)
    again = [] if "stopping" in how else ["write 10", "finish 10"]  # other weights, perhaps
    assert run.calls == ["copy 10", "finish 10", *again] and run.saver.saved == 10


def test_what_could_not_be_replaced_does_not_count_as_saved() -> None:
    run = Played(background=False)
    run.saver.save({}, 10)
    run.engine.fails = {10}
    run.saver.save({}, 10, now=True)
    assert run.saver.saved == -1


def test_the_last_step_is_waited_for() -> None:
    run = Played()
    run.saver.save({}, 100)
    assert run.calls == ["write 100", "finish 100"] and run.saver.saved == 100


@pytest.mark.parametrize("options", [{"background": False}, {"memory": False}])
def test_without_a_background_it_is_saved_when_it_returns(options: dict[str, bool]) -> None:
    run = Played(**options)
    run.saver.save({}, 10)
    assert run.calls == ["write 10", "finish 10"] and run.saver.saved == 10


def test_a_failed_write_is_tried_again_soon() -> None:
    run = Played()
    run.engine.fails = {10}
    run.saver.save({}, 10)
    run.saver.finish(12)
    assert run.events == [("save failed", 12, "not saved: No space left on device")]
    assert run.saver.saved == -1
    assert not run.saver.due(12) and run.saver.due(13)
    run.saver.save({}, 13)
    run.saver.finish(14)
    assert run.saver.saved == 13 and not run.saver.due(14)


def test_a_stop_after_a_failed_write_writes_again() -> None:
    """With the state of the step that it stops after."""
    run = Played()
    run.engine.fails = {10}
    run.saver.save({}, 10)
    run.saver.save({}, 11, stopping=True)
    assert run.calls == ["copy 10", "finish 10", "write 11", "finish 11"]
    assert run.saver.saved == 11


def test_a_long_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_LONG_WAIT", -1.0)
    run = Played()
    run.saver.save({}, 10)
    run.saver.save({}, 20)
    name, _, message = run.events[-1]
    assert name == "save wait"
    assert message.startswith("step 20: training waited 0 s for checkpoint 10; the disk is slow")
