"""What becomes of a run when a loss or gradient is not finite, or a loss jumps.

    recovery.add(at, result)      after every step
    recovery.check(step)          whenever losses are read: in logging steps and before saving

A step that is not finite changes nothing (the engine sees to that), but it may be the end of a
divergence that began with finite losses, which loss_spikes.py detects. After a rollback the step
numbers, and with them the data and the learning rate, continue where the run was: the steps since
the checkpoint are left out of training. The result is saved immediately, so that a run that is
killed afterwards resumes to the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from palm_ds.data.stages import StepInfo
from palm_ds.engine import Engine
from palm_ds.runtime import checkpoint
from palm_ds.runtime.step_result import StepResult
from palm_ds.train.loss_spikes import LossSpike, SpikeDetector
from palm_ds.train.recipe import Recipe
from palm_ds.train.saving import EventLog

_MARGIN = 10
"""Steps between a checkpoint and the spike it is to be free of: weights are bad before the loss."""
_MOST_SEARCHED = 50
"""Steps in a row in which fp16 may look for its loss scale."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    step: int
    stage: int
    losses: Mapping[str, Any]
    """Sums over this process, on the device."""
    counts: Mapping[str, int]
    skipped_so_far: int | torch.Tensor


@dataclass(frozen=True, kw_only=True)
class _Trouble:
    """The first bad step since the last check."""

    step: int
    what: str
    action: str
    spike: LossSpike | None = None
    """The spike that it is, or that preceded it."""

    @property
    def began(self) -> int:
        """The first step whose weights are suspect."""
        return self.spike.began if self.spike else self.step


@dataclass
class Recovery:
    """Watches the losses of a run and acts on bad ones. All processes make the same calls."""

    recipe: Recipe
    engine: Engine
    checkpoints: Path
    save: Callable[[int], None]
    """Called with the number of completed steps; the checkpoint exists when it returns."""
    finish_save: Callable[[int], None]
    """Called with the number of completed steps: a checkpoint that is being written exists then."""
    event: EventLog
    reason: str = ""
    """Why the run was stopped."""
    _steps: list[_Step] = field(default_factory=list)
    _skipped_before: int = 0
    _skipped_in_a_row: int = 0
    _rollbacks: int = 0
    """In a row."""
    _last_rollback: int = -1

    def __post_init__(self) -> None:
        self._detector = SpikeDetector(self.recipe.loss_spike)
        self._skipped_before = self.engine.skipped_steps

    def record(self) -> dict[str, Any]:
        """What a checkpoint stores."""
        return {
            "losses": self._detector.state_dict(),
            "skipped_in_a_row": self._skipped_in_a_row,
            "rollbacks": self._rollbacks,
            "last_rollback": self._last_rollback,
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; those of older versions have no record."""
        if record:
            self._detector.load_state_dict(record["losses"])
            self._skipped_in_a_row = record["skipped_in_a_row"]
            self._rollbacks = record["rollbacks"]
            self._last_rollback = record["last_rollback"]
        self._skipped_before = self.engine.skipped_steps

    def add(self, at: StepInfo, result: StepResult) -> None:
        """Remember a step until the next check."""
        self._steps.append(
            _Step(
                step=at.step,
                stage=at.stage,
                losses={task: x for task, x in result.loss_sums.items() if result.counts[task]},
                counts=result.counts,
                skipped_so_far=self.engine.skipped_so_far,
            )
        )

    def check(self, step: int) -> bool:
        """Judge the steps since the last check, of which `step` is the last one. Returns False if
        the run ends. Collective."""
        trouble = self._judge()
        if trouble is None:
            return True
        self.finish_save(step + 1)  # what is done depends on the checkpoints that there are
        if trouble.action == "rollback":
            return self._roll_back(trouble, step)
        self._stop(trouble, step)
        return False

    def _judge(self) -> _Trouble | None:
        """The first step that needs action; logs those that only need a line."""
        steps, self._steps = self._steps, []
        sums = self.engine.reduce(
            {f"{i} {task}": x for i, one in enumerate(steps) for task, x in one.losses.items()}
            or {"": 0.0}
        )
        for i, one in enumerate(steps):
            losses = {task: sums[f"{i} {task}"] / one.counts[task] for task in one.losses}
            if trouble := self._judge_step(one, losses):
                return trouble
        return None

    def _judge_step(self, one: _Step, losses: Mapping[str, float]) -> _Trouble | None:
        before = self._detector.ongoing
        spike = self._detector.judge(one.step, one.stage, losses)
        before_it, self._skipped_before = self._skipped_before, int(one.skipped_so_far)
        skipped = self._skipped_before > before_it
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if skipped and (action := self._nonfinite_action()):
            bad = [f" of {task}" for task, loss in losses.items() if not math.isfinite(loss)]
            what = f"the loss{bad[0]}" if bad else "a gradient"
            text = f"step {one.step + 1}: {what} was not finite; the step was not applied"
            return _Trouble(step=one.step, what=text, action=action, spike=spike or before)
        if spike is None:
            return None
        text = f"step {spike.step + 1}: {spike} (z-score {spike.zscore:.3g})"
        if self.recipe.loss_spike.action != "warn":
            return _Trouble(
                step=one.step, what=text, action=self.recipe.loss_spike.action, spike=spike
            )
        if spike.began == spike.step:
            self.event("spike", f"{text}; training continues (loss_spike)", step=spike.step + 1)
        return None

    def _nonfinite_action(self) -> str:
        """What to do about the current step, which was skipped; nothing if that is normal: fp16
        skips steps while it looks for its loss scale."""
        fp16 = self.engine.ds_config.precision == "fp16"
        if fp16 and self.engine.loss_scale > 1 and self._skipped_in_a_row < _MOST_SEARCHED:
            return ""
        if self.recipe.nonfinite == "skip":
            return "stop" if self._skipped_in_a_row > self.recipe.failure_limit else ""
        return self.recipe.nonfinite

    # -- rollback --

    def _roll_back(self, trouble: _Trouble, step: int) -> bool:
        """Return to a checkpoint from before the trouble; False if the run must stop instead."""
        in_a_row = self._last_rollback >= 0 and step - self._last_rollback <= self._far_apart
        attempt = self._rollbacks + 1 if in_a_row else 1
        limit = self.recipe.failure_limit
        if attempt > limit:
            self._stop(trouble, step, f"gives up after {limit} rollbacks in a row")
            return False
        found = self.engine.load(self.checkpoints, at_most=self._target(trouble))
        if found is None:
            self._stop(trouble, step, "there is no checkpoint from before it to return to")
            return False
        self.restore(found.get("recovery", {}))
        self._rollbacks, self._last_rollback = attempt, step
        first, last = found["step"] + 1, step + 1
        left_out = f"step {last} is" if first == last else f"steps {first} to {last} are"
        self.event(
            "rollback",
            f"{trouble.what}; restored step {found['step']}, {left_out} left out of training; "
            f"continues with step {last + 1} (rollback {attempt} of at most {limit} in a row)",
            step=last,
            restored=found["step"],
        )
        self.save(last)
        return True

    @property
    def _far_apart(self) -> int:
        """Steps after which a rollback is not in a row with the last one."""
        return max(self.recipe.save.every, self.recipe.loss_spike.window)

    def _target(self, trouble: _Trouble) -> int:
        """The newest step to return to: some steps before the trouble if there is a checkpoint."""
        early = trouble.began - _MARGIN if trouble.spike else trouble.began
        return early if any(step <= early for step in self._saved_steps()) else trouble.began

    def _saved_steps(self) -> list[int]:
        """Newest first, as rank 0 sees them."""
        return self.engine.processes.gather(checkpoint.steps_in(self.checkpoints))[0]

    # -- stop --

    def _stop(self, trouble: _Trouble, step: int, why: str = "") -> None:
        """Stop the run with good weights in its newest checkpoint, as far as there are any."""
        if trouble.spike is None:
            self.save(step + 1)
            watched = self.recipe.loss_spike.zscore > 0
            state = "The weights are unaffected" if watched else "Losses were not watched before it"
            state += f"; step {step + 1} is saved."
        else:
            state = self._keep_good(trouble, trouble.spike)
        self.reason = f"{trouble.what}{f'; {why}' if why else ''}. {state}"
        self.event(
            "nonfinite",
            f"Stopped: {self.reason} Run the command again with a lower optimizer.lr or "
            "optimizer.clip, or with `nonfinite: skip` or `rollback` (and `loss_spike.action`): in "
            "this folder these may change. `palm-ds inspect` shows the data of a step",
            step=step + 1,
        )

    def _keep_good(self, trouble: _Trouble, spike: LossSpike) -> str:
        """Delete the checkpoints since a spike began, if there is an older one; returns what is
        left."""
        diverged = f"The weights are not good: since step {spike.began + 1} {spike}."
        steps, latest = self._saved_steps(), self._target(trouble)
        good = [one for one in steps if one <= latest]
        if not good:
            return f"{diverged} There is no checkpoint from before that; choose another folder."
        if self.engine.rank == 0:
            checkpoint.discard(self.checkpoints, [one for one in steps if one > latest])
        kept = f"the last checkpoint from before is step {good[0]}"
        return f"{diverged} Nothing since then is kept; {kept}."
