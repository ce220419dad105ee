"""Recovery of a run when a loss or gradient is not finite, or a loss jumps.

    recovery.add(at, result, ...) after every step
    recovery.check(step)          whenever losses are read: in logging steps and before saving
    recovery.retention(done)      the checkpoints to keep when one is saved

A step that is not finite changes nothing (the engine sees to that), but it may be the end of a
divergence that began with finite losses, which loss_spikes.py detects. The loss of a step is that
of the weights after the step before, and a checkpoint may be saved in between: whether weights are
good, the current ones or those of a checkpoint, is known from the loss that they give for the texts
of an earlier, good step (weight_check.py).

After a rollback the step numbers, and with them the data and the learning rate, continue where the
run was: the steps since the checkpoint are left out of training. The result is saved immediately,
so that a run that is killed afterwards resumes to the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from palm_ds.data.stream.stages import StepInfo
from palm_ds.engine import Engine
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.step.gradient_accumulation import StepResult
from palm_ds.train.loop.loss_spikes import LossSpike, SpikeDetector
from palm_ds.train.loop.saving import EventLog
from palm_ds.train.loop.weight_check import GoodStep, WeightCheck
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.recipe.sections import SPIKE_MARGIN

_MAX_SCALE_SEARCH = 50
"""Steps in a row in which fp16 may look for its loss scale."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    step: int
    stage: int
    losses: Mapping[str, Any]
    """Sums over this process, on the device."""
    counts: Mapping[str, int]
    skipped_so_far: int | torch.Tensor
    batches: Sequence[Batch]
    """This process's, of some steps: to compute the losses again."""


@dataclass(frozen=True, kw_only=True)
class _Trouble:
    """The first bad step since the last check."""

    step: int
    what: str
    action: str
    began: int
    """The first step whose weights are suspect."""
    ruin: str = ""
    """What shows that the weights are not good; empty: they are."""

    @classmethod
    def at(cls, step: int, what: str, action: str, spike: LossSpike | None) -> _Trouble:
        """`spike`: the one that it is, or that preceded it."""
        if spike is None:
            return cls(step=step, what=what, action=action, began=step)
        ruin = f"since step {spike.began + 1} {spike}"
        return cls(step=step, what=what, action=action, began=spike.began, ruin=ruin)


@dataclass
class _Rollbacks:
    """The rollbacks in a row, so far."""

    count: int = 0
    last: int = -1
    """The step of the last one."""
    restored: int = -1
    """The step that it returned to."""
    good: int = -1
    """The newest step that one of them returned to."""

    def add(self, step: int, restored: int, *, in_a_row: bool) -> None:
        self.good = max(restored, self.good) if in_a_row else restored
        self.count = self.count + 1 if in_a_row else 1
        self.last, self.restored = step, restored

    def record(self) -> dict[str, int]:
        return {
            "rollbacks": self.count,
            "last_rollback": self.last,
            "restored": self.restored,
            "last_good": self.good,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> _Rollbacks:
        """From what a checkpoint stores; the first ones of 0.1.0 stored two values."""
        names = "rollbacks", "last_rollback", "restored", "last_good"
        return cls(
            record[names[0]], record[names[1]], *(record.get(name, -1) for name in names[2:])
        )


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
    _rollbacks: _Rollbacks = field(default_factory=_Rollbacks)
    _lasting: LossSpike | None = None
    """A spike that has lasted for another window since the last check."""

    def __post_init__(self) -> None:
        self._detector = SpikeDetector(self.recipe.loss_spike)
        self._weights = WeightCheck(self.engine, self._detector)
        self._skipped_before = self.engine.skipped_steps

    def record(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "losses": self._detector.state_dict(),
            "skipped_in_a_row": self._skipped_in_a_row,
            **self._rollbacks.record(),
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's record; a new run has none."""
        if record:
            self._detector.load_state_dict(record["losses"])
            self._skipped_in_a_row = record["skipped_in_a_row"]
            self._rollbacks = _Rollbacks.of(record)
        self._skipped_before = self.engine.skipped_steps

    def retention(self, done: int) -> checkpoint.Retention:
        """The checkpoints to keep when that of `done` steps is saved: one that is older than a
        spike that may come, and while weights may be bad, all that are older than that."""
        began = self._detector.began
        safe = [-1] if began is None else [began - 1]
        safe += [done - self._skipped_in_a_row] if self._skipped_in_a_row else []
        safe += [self._rollbacks.good] if self._in_a_row(done) else []
        save = self.recipe.save
        return checkpoint.Retention(
            newest=save.keep, every=save.keep_every, margin=SPIKE_MARGIN, protected=max(safe)
        )

    def add(self, at: StepInfo, result: StepResult, batches: Sequence[Batch] = ()) -> None:
        """Remember a step until the next check; `batches`: this process's."""
        self._steps.append(
            _Step(
                step=at.step,
                stage=at.stage,
                losses={task: x for task, x in result.loss_sums.items() if result.counts[task]},
                counts=result.counts,
                skipped_so_far=self.engine.skipped_so_far,
                batches=batches if not self._steps or at.starts_stage else (),
            )
        )

    def check(self, step: int, *, last: bool = False, saves: bool = False) -> bool:
        """Judge the steps since the last check, of which `step` is the last one; and the weights
        after it, if the run ends there (`last`) or they replace the only checkpoint (`saves`: they
        are saved). Returns False if the run must not go on. Collective."""
        trouble = self._judge()
        replaces = saves and self.recipe.save.keep == 1 and not self._detector.ongoing
        if trouble is None and (last or replaces or self._lasting):
            trouble = self._judge_weights(step, last=last)
        elif trouble and not trouble.ruin:
            trouble = replace(trouble, ruin=self._weights.problem())
        if trouble is None:
            return True
        self.finish_save(step + 1)  # what is done depends on the checkpoints that there are
        if trouble.action == "rollback":
            return self._roll_back(trouble, step)
        self._stop(trouble, step)
        return False

    def _judge(self) -> _Trouble | None:
        """The first step that needs action; logs those that only need a line."""
        steps, self._steps, self._lasting = self._steps, [], None
        sums = self.engine.reduce(
            {f"{i} {task}": x for i, one in enumerate(steps) for task, x in one.losses.items()}
            or {"": 0.0}
        )
        for i, one in enumerate(steps):
            losses = {task: sums[f"{i} {task}"] / one.counts[task] for task in one.losses}
            if trouble := self._judge_step(one, losses):
                return trouble
            good = not self._skipped_in_a_row and not self._detector.ongoing
            if one.batches and good:
                self._weights.good_step = GoodStep(
                    step=one.step,
                    stage=one.stage,
                    batches=one.batches,
                    losses=losses,
                    counts=one.counts,
                )
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
            return _Trouble.at(one.step, text, action, spike or before)
        if spike is None:
            return None
        text = f"step {spike.step + 1}: {spike} (z-score {spike.zscore:.3g})"
        if (action := self.recipe.loss_spike.action) != "warn":
            return _Trouble.at(one.step, text, action, spike)
        if spike.began == spike.step:
            self.event("spike", f"{text}; training continues (loss_spike)", step=spike.step + 1)
        if spike.length % self.recipe.loss_spike.window == 0:
            self._lasting = spike
        return None

    def _judge_weights(self, step: int, *, last: bool) -> _Trouble | None:
        """The trouble with the weights after `step`: at the end of the run (`last`), where they
        must have recovered from a spike, before they replace others, or in a long spike."""
        spike, ruin = self._detector.ongoing, self._weights.problem(over=last)
        if spike and not ruin and not self._weights.good_step:
            ruin = f"since step {spike.began + 1} {spike}"
        if not ruin:
            if self._lasting:
                self._say_it_lasts(self._lasting, step)
            return None
        began = self._detector.began
        actions = self.recipe.loss_spike.action, self.recipe.nonfinite
        before = "before the end" if last else "before they are saved"
        what = "diverged" if spike else f"the weights were checked {before}"
        return _Trouble(
            step=step,
            what=f"step {step + 1}: {what}",
            action="rollback" if "rollback" in actions else "stop",
            began=step + 1 if began is None else began,
            ruin=ruin,
        )

    def averages_problem(self) -> str:
        """What shows that the averaged weights (`optimizer.ema`), which the model holds now, are
        worse than its own; empty if they are not. Collective."""
        return self._weights.problem() if self.recipe.optimizer.ema else ""

    def _say_it_lasts(self, spike: LossSpike, step: int) -> None:
        """Log a spike that has lasted for another window, with weights that are not ruined."""
        worse = self._weights.problem(over=True)
        state = worse or "the weights are as good as before for earlier texts"
        text = f"step {step + 1}: {spike}, for {spike.length} steps by now; {state}"
        self.event("spike", f"{text}; training continues", step=step + 1)

    def _nonfinite_action(self) -> str:
        """Action for the current step, which was skipped; nothing if that is normal: fp16 skips
        steps while it looks for its loss scale."""
        fp16 = self.engine.ds_config.precision == "fp16"
        if fp16 and self.engine.loss_scale > 1 and self._skipped_in_a_row < _MAX_SCALE_SEARCH:
            return ""
        if self.recipe.nonfinite == "skip":
            return "stop" if self._skipped_in_a_row > self.recipe.failure_limit else ""
        return self.recipe.nonfinite

    # -- rollback --

    def _roll_back(self, trouble: _Trouble, step: int) -> bool:
        """Return to a checkpoint from before the trouble; False if the run must stop instead."""
        in_a_row, before = self._in_a_row(step), self._rollbacks
        attempt = before.count + 1 if in_a_row else 1
        limit = self.recipe.failure_limit
        if attempt > limit:
            self._stop(trouble, step, f"gives up after {limit} rollbacks in a row")
            return False
        found = self._restore_good(trouble, step)
        if found is None:
            self._stop(trouble, step, "there is no good checkpoint from before it to return to")
            return False
        restored = found["step"]
        before.add(step, restored, in_a_row=in_a_row)
        self._rollbacks = before  # not those of the checkpoint
        first, last = restored + 1, step + 1
        left_out = f"step {last} is" if first == last else f"steps {first} to {last} are"
        self.event(
            "rollback",
            f"{trouble.what}; restored step {restored}, {left_out} left out of training; "
            f"continues with step {last + 1} (rollback {attempt} of at most {limit} in a row)",
            step=last,
            restored=restored,
        )
        self.save(last)
        return True

    def _in_a_row(self, step: int) -> bool:
        """Whether trouble in this step is in a row with the last rollback."""
        far_apart = max(self.recipe.save.every, self.recipe.loss_spike.window)
        last = self._rollbacks.last
        return last >= 0 and step - last <= far_apart

    def _restore_good(self, trouble: _Trouble, step: int) -> dict[str, Any] | None:
        """Restore the newest checkpoint from before the trouble whose weights are good; its state,
        None if there is none."""
        in_a_row, kept = self._in_a_row(step), self._rollbacks.good
        restored = self._rollbacks.restored if in_a_row else None
        checkable = self._weights.good_step is not None
        for target in _candidates(self._saved_steps(), trouble, restored, checkable=checkable):
            valid = max(target, kept) if in_a_row else target
            found = self.engine.load(self.checkpoints, at_most=target, valid=valid)
            if found is None:
                return None
            self.restore(found.get("recovery", {}))
            problem = self._weights.problem()
            if not problem:
                return found
            text = f"checkpoint {found['step']} is not good either: {problem}"
            self.event("bad checkpoint", text, step=step + 1, checkpoint=found["step"])
        return None

    def _saved_steps(self) -> list[int]:
        """Newest first, as rank 0 sees them."""
        return self.engine.processes.gather(checkpoint.steps_in(self.checkpoints))[0]

    # -- stop --

    def _stop(self, trouble: _Trouble, step: int, why: str = "") -> None:
        """Stop the run with good weights in its newest checkpoint, as far as there are any."""
        if trouble.ruin:
            state = self._keep_good(trouble, step)
        else:
            self.save(step + 1)
            state = f"{self._weights.state()}; step {step + 1} is saved."
        self.reason = f"{trouble.what}{f'; {why}' if why else ''}. {state}"
        self.event(
            "nonfinite",
            f"Stopped: {self.reason} Run the command again with a lower optimizer.lr or "
            "optimizer.clip, or with `nonfinite: skip` or `rollback` (and `loss_spike.action`): in "
            "this folder these may change. `palm-ds inspect` shows the data of a step",
            step=step + 1,
        )

    def _keep_good(self, trouble: _Trouble, step: int) -> str:
        """Delete the checkpoints since the weights are suspect, if there is a good older one;
        returns what is left."""
        ruined = f"The weights are not good: {trouble.ruin}."
        if self._in_a_row(step):
            good = self._rollbacks.good
        else:
            found = self._restore_good(trouble, step)
            good = found["step"] if found else -1
        steps = self._saved_steps()
        if good not in steps:
            return f"{ruined} There is no good checkpoint from before that; choose another folder."
        if self.engine.rank == 0:
            checkpoint.discard(self.checkpoints, [one for one in steps if one > good])
        kept = f"the last checkpoint from before is step {good}"
        return f"{ruined} Nothing since then is kept; {kept}."


def _candidates(
    saved: Sequence[int], trouble: _Trouble, restored: int | None, *, checkable: bool
) -> list[int]:
    """The steps to return to, best first, out of those `saved`, newest first: those some steps
    before the trouble, newest first, then closer ones. `restored`: the last rollback's; older ones
    come first then, as that was not far enough. `checkable`: weights can be checked when they are
    restored."""
    if not trouble.ruin:
        return [step for step in saved if step <= trouble.began]
    early = trouble.began - SPIKE_MARGIN
    close = [step for step in saved if early < step < trouble.began]
    steps = [step for step in saved if step <= early]
    steps += close if checkable else close[::-1]
    if restored is None:
        return steps
    return [s for s in steps if s < restored] + [s for s in steps if s >= restored]
