"""Recovery of a run when a loss or gradient is not finite, or a loss jumps.

    recovery.add(at, result, ...) after every step
    recovery.check(step)          whenever losses are read: in logging steps and before saving
    recovery.retention(done, ...) the checkpoints to keep when one is saved

A step that is not finite changes nothing (the engine sees to that), but it may be the end of a
divergence that began with finite losses, which loss_spikes.py detects. The loss of a step is that
of the weights after the step before, and a checkpoint may be saved in between: whether weights are
good, the current ones or those of a checkpoint, is known from the loss that they give for the texts
of an earlier, good step (`WeightCheck`). step_judge.py judges, this module acts on it.

After a rollback the step numbers, and with them the data and the learning rate, continue where the
run was: the steps since the checkpoint are left out of training. The result is saved immediately,
so that a run that is killed afterwards resumes to the same curve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from palm_ds.data.stream.stages import StepInfo
from palm_ds.engine import Engine
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.step.gradient_accumulation import StepResult
from palm_ds.train.loop.saving import EventLog
from palm_ds.train.loop.step_judge import StepJudge, Trouble
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.recipe.sections import SPIKE_MARGIN


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
    _rollbacks: _Rollbacks = field(default_factory=_Rollbacks)
    _averages: str = ""
    """`averages_problem` of the checkpoint that was restored."""

    def __post_init__(self) -> None:
        self._judge = StepJudge(self.recipe, self.engine, self.event)
        self._weights = self._judge.weights

    def record(self) -> dict[str, Any]:
        """State for a checkpoint, which may be the last one: a run that is started again there has
        no good step to check the averages with. Collective."""
        averages = self.averages_problem()
        return {**self._judge.record(), **self._rollbacks.record(), "averages": averages}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's record; a new run has none."""
        self._judge.restore(record)
        if record:
            self._rollbacks = _Rollbacks.of(record)
            self._averages = record.get("averages", "")  # the first ones of 0.1.0 lack it

    def retention(self, done: int, values: Mapping[int, float]) -> checkpoint.Retention:
        """The checkpoints to keep when that of `done` steps is saved: one that is older than a
        spike that may come, while weights may be bad all that are older than that, and the best of
        those that were evaluated, {step: value}."""
        began, skipped = self._judge.detector.began, self._judge.skipped_in_a_row
        safe = [-1] if began is None else [began - 1]
        safe += [done - skipped] if skipped else []
        safe += [self._rollbacks.good] if self._in_a_row(done) else []
        save = self.recipe.save
        return checkpoint.Retention(
            newest=save.keep,
            every=save.keep_every,
            margin=SPIKE_MARGIN,
            protected=max(safe),
            best=save.best,
            values=dict(values),
        )

    def add(self, at: StepInfo, result: StepResult, batches: Sequence[Batch] = ()) -> None:
        """Remember a step until the next check; `batches`: this process's."""
        self._judge.add(at, result, batches)

    def check(self, step: int, *, last: bool = False, saves: bool = False) -> bool:
        """Judge the steps since the last check, of which `step` is the last one; and the weights
        after it, if the run ends there (`last`) or they replace the only checkpoint (`saves`: they
        are saved). Returns False if the run must not go on. Collective."""
        judge = self._judge
        trouble = judge.steps_since()
        replaces = saves and self.recipe.save.keep == 1 and not judge.detector.ongoing
        if trouble is None and (last or replaces or judge.lasting):
            trouble = judge.weights_after(step, last=last)
        elif trouble and not trouble.ruin:
            trouble = replace(trouble, ruin=self._weights.problem())
        if trouble is None:
            return True
        self.finish_save(step + 1)  # what is done depends on the checkpoints that there are
        if trouble.action == "rollback":
            return self._roll_back(trouble, step, last=last)
        self._stop(trouble, step)
        return False

    def averages_problem(self) -> str:
        """What shows that the averaged weights (`optimizer.ema`) are worse than those of the last
        step; empty if they are not. Before the first good step since a checkpoint was restored,
        that is what it says. Collective."""
        if not self.recipe.optimizer.ema:
            return ""
        with self.engine.ema_weights():
            problem = self._weights.problem()
        return problem or ("" if self._weights.good_step else self._averages)

    # -- rollback --

    def _roll_back(self, trouble: Trouble, step: int, *, last: bool) -> bool:
        """Return to a checkpoint from before the trouble, with which the run ends if this was its
        `last` step; False if the run must stop instead."""
        in_a_row, before = self._in_a_row(step), self._rollbacks
        attempt = before.count + 1 if in_a_row else 1
        limit = self.recipe.failure_limit
        if attempt > limit:
            self._stop(trouble, step, f"gives up after {limit} rollbacks in a row")
            return False
        good_state = self._restore_good(trouble, step)
        if good_state is None:
            # the weights are now those of the last checkpoint that was tried
            trouble = replace(trouble, ruin=trouble.ruin or self._weights.problem())
            self._stop(trouble, step, "there is no good checkpoint from before it to return to")
            return False
        restored = good_state["step"]
        before.add(step, restored, in_a_row=in_a_row)
        self._rollbacks = before  # not those of the checkpoint
        first, done = restored + 1, step + 1
        left_out = f"step {done} is" if first == done else f"steps {first} to {done} are"
        then = "the run ends with these weights" if last else f"continues with step {done + 1}"
        self.event(
            "rollback",
            f"{trouble.what}; restored step {restored}, {left_out} left out of training; "
            f"{then} (rollback {attempt} of at most {limit} in a row)",
            step=done,
            restored=restored,
        )
        self.save(done)
        return True

    def _in_a_row(self, step: int) -> bool:
        """Whether trouble in this step is in a row with the last rollback."""
        far_apart = max(self.recipe.save.every, self.recipe.loss_spike.window)
        last = self._rollbacks.last
        return last >= 0 and step - last <= far_apart

    def _restore_good(self, trouble: Trouble, step: int) -> dict[str, Any] | None:
        """Restore the newest checkpoint from before the trouble whose weights are good; its state,
        None if there is none."""
        in_a_row, kept = self._in_a_row(step), self._rollbacks.good
        restored = self._rollbacks.restored if in_a_row else None
        checkable = self._weights.good_step is not None
        for target in _candidates(self._saved_steps(), trouble, restored, checkable=checkable):
            valid = max(target, kept) if in_a_row else target
            state = self.engine.load(self.checkpoints, at_most=target, valid=valid)
            if state is None:
                return None
            self.restore(state.get("recovery", {}))
            problem = self._weights.problem()
            if not problem:
                return state
            text = f"checkpoint {state['step']} is not good either: {problem}"
            self.event("bad checkpoint", text, step=step + 1, checkpoint=state["step"])
        return None

    def _saved_steps(self) -> list[int]:
        """Newest first, as rank 0 sees them."""
        return self.engine.processes.gather(checkpoint.steps_in(self.checkpoints))[0]

    # -- stop --

    def _stop(self, trouble: Trouble, step: int, why: str = "") -> None:
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
            "optimizer.clip, or with `nonfinite: skip` or `rollback` (and `loss_spike.action`); a "
            "run may resume with other values of these. `palm-ds inspect` shows the data of a step",
            step=step + 1,
        )

    def _keep_good(self, trouble: Trouble, step: int) -> str:
        """Delete the checkpoints since the weights are suspect, if there is a good older one;
        returns what is left."""
        ruined = f"The weights are not good: {trouble.ruin}."
        if self._in_a_row(step):
            good = self._rollbacks.good
        else:
            restored = self._restore_good(trouble, step)
            good = restored["step"] if restored else -1
        steps = self._saved_steps()
        if good not in steps:
            return f"{ruined} There is no good checkpoint from before that; choose another folder."
        if self.engine.rank == 0:
            checkpoint.discard(self.checkpoints, [one for one in steps if one > good])
        kept = f"the last checkpoint from before is step {good}"
        return f"{ruined} Nothing since then is kept; {kept}."


def _candidates(
    saved: Sequence[int], trouble: Trouble, restored: int | None, *, checkable: bool
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
