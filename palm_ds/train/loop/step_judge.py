"""Judges the steps of a run: the first one whose loss or gradient is not finite or whose loss
jumps, and whether the weights are good.

    judge.add(at, result, ...)    after every step
    judge.steps_since()           the trouble in the steps since the last call, or None
    judge.weights_after(step)     the trouble with the weights of now, or None

recovery.py acts on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from palm_ds.data.stream.stages import StepInfo
from palm_ds.engine import Engine
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.step.gradient_accumulation import StepResult
from palm_ds.train.loop.loss_spikes import LossSpike, SpikeDetector
from palm_ds.train.loop.saving import EventLog
from palm_ds.train.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class GoodStep:
    """A step with normal losses."""

    step: int
    """Counted from 0."""
    stage: int
    batches: Sequence[Batch]
    """This process's."""
    losses: Mapping[str, float]
    counts: Mapping[str, int]
    """What the losses are divided by."""


@dataclass
class WeightCheck:
    """Tells good weights from ruined ones by texts that were learned from when the weights were
    good. All processes make the same calls.

        check.good_step = ...     a step whose losses were normal, from time to time
        check.problem()           what shows that the weights of now are not good, or nothing

    Weights are good if they are finite, and if the losses of the last good step, computed again
    without dropout, are no spike (loss_spikes.py). A step's own losses do not tell: they are those
    of the weights before it, and its data may be to blame for them.
    """

    engine: Engine
    detector: SpikeDetector
    good_step: GoodStep | None = None

    def problem(self, *, over: bool = False) -> str:
        """Evidence that the weights are not good; empty if there is none. `over`: losses that are
        too high for an ongoing spike to be over are evidence too. Collective."""
        if names := self.engine.nonfinite_weights():
            more = f" (and {len(names) - 1} more)" if names[1:] else ""
            return f"{names[0]}{more} has values that are not finite"
        if self.good_step is None:
            return ""
        good, losses = self.good_step, self._losses_of(self.good_step)
        texts = f"for the texts of step {good.step + 1}"
        for task, loss in losses.items():
            if not math.isfinite(loss):
                return f"{texts} the loss of {task}, {good.losses[task]:.4g} before, is not finite"
        spike = self.detector.compare(good.step, good.stage, good.losses, losses, over=over)
        return f"{texts} {spike}" if spike else ""

    def _losses_of(self, good: GoodStep) -> dict[str, float]:
        """The losses of the texts of a step under the weights of now."""
        sums = self.engine.losses_again(good.batches, [*good.losses])
        totals = self.engine.reduce(sums) if sums else {}
        return {task: totals[task] / good.counts[task] for task in good.losses if task in totals}

    def state(self) -> str:
        """The state of weights without a problem, for a message."""
        if not self.detector.watches:
            return "The weights are finite; their losses were not watched (`loss_spike.zscore`)"
        if self.good_step is None:
            return "The weights are finite; there was no good step before to check them with"
        return "The weights are unaffected"


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
class Trouble:
    """The first bad step since the last check."""

    step: int
    what: str
    action: str
    began: int
    """The first step whose weights are suspect."""
    ruin: str = ""
    """What shows that the weights are not good; empty: they are."""

    @classmethod
    def at(cls, step: int, what: str, action: str, spike: LossSpike | None) -> Trouble:
        """`spike`: the one that it is, or that preceded it."""
        if spike is None:
            return cls(step=step, what=what, action=action, began=step)
        ruin = f"since step {spike.began + 1} {spike}"
        return cls(step=step, what=what, action=action, began=spike.began, ruin=ruin)


@dataclass
class StepJudge:
    """Watches the losses of a run. All processes make the same calls."""

    recipe: Recipe
    engine: Engine
    event: EventLog
    skipped_in_a_row: int = 0
    lasting: LossSpike | None = None
    """A spike that has lasted for another window since the last check."""
    _steps: list[_Step] = field(default_factory=list)
    _skipped_before: int = 0

    def __post_init__(self) -> None:
        self.detector = SpikeDetector(self.recipe.loss_spike)
        self.weights = WeightCheck(self.engine, self.detector)
        self._skipped_before = self.engine.skipped_steps

    def record(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "losses": self.detector.state_dict(),
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's record; a new run has none."""
        if record:
            self.detector.load_state_dict(record["losses"])
            self.skipped_in_a_row = record["skipped_in_a_row"]
        self._skipped_before = self.engine.skipped_steps

    def add(self, at: StepInfo, result: StepResult, batches: Sequence[Batch] = ()) -> None:
        """Remember a step until the next check; `batches`: this process's."""
        self._steps.append(
            _Step(
                step=at.step,
                stage=at.stage,
                losses={
                    task: value for task, value in result.loss_sums.items() if result.counts[task]
                },
                counts=result.counts,
                skipped_so_far=self.engine.skipped_so_far,
                batches=batches if not self._steps or at.starts_stage else (),
            )
        )

    def steps_since(self) -> Trouble | None:
        """The first step that needs action; logs those that only need a line."""
        steps, self._steps, self.lasting = self._steps, [], None
        sums = self.engine.reduce(
            {
                f"{i} {task}": loss
                for i, one in enumerate(steps)
                for task, loss in one.losses.items()
            }
            or {"": 0.0}
        )
        for i, one in enumerate(steps):
            losses = {task: sums[f"{i} {task}"] / one.counts[task] for task in one.losses}
            if trouble := self._judge_step(one, losses):
                return trouble
            good = not self.skipped_in_a_row and not self.detector.ongoing
            if one.batches and good:
                self.weights.good_step = GoodStep(
                    step=one.step,
                    stage=one.stage,
                    batches=one.batches,
                    losses=losses,
                    counts=one.counts,
                )
        return None

    def _judge_step(self, one: _Step, losses: Mapping[str, float]) -> Trouble | None:
        before = self.detector.ongoing
        spike = self.detector.judge(one.step, one.stage, losses)
        before_it, self._skipped_before = self._skipped_before, int(one.skipped_so_far)
        skipped = self._skipped_before > before_it
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped and (action := self._nonfinite_action()):
            bad = [f" of {task}" for task, loss in losses.items() if not math.isfinite(loss)]
            what = f"the loss{bad[0]}" if bad else "a gradient"
            text = f"step {one.step + 1}: {what} was not finite; the step was not applied"
            return Trouble.at(one.step, text, action, spike or before)
        if spike is None:
            return None
        text = f"step {spike.step + 1}: {spike} (z-score {spike.zscore:.3g})"
        if (action := self.recipe.loss_spike.action) != "warn":
            return Trouble.at(one.step, text, action, spike)
        if spike.began == spike.step:
            self.event("spike", f"{text}; training continues (loss_spike)", step=spike.step + 1)
        if spike.length % self.recipe.loss_spike.window == 0:
            self.lasting = spike
        return None

    def weights_after(self, step: int, *, last: bool) -> Trouble | None:
        """The trouble with the weights after `step`: at the end of the run (`last`), where they
        must have recovered from a spike, before they replace others, or in a long spike."""
        spike, ruin = self.detector.ongoing, self.weights.problem(over=last)
        if spike and not ruin and not self.weights.good_step:
            ruin = f"since step {spike.began + 1} {spike}"
        if not ruin:
            if self.lasting:
                self._say_it_lasts(self.lasting, step)
            return None
        began = self.detector.began
        actions = self.recipe.loss_spike.action, self.recipe.nonfinite
        before = "before the end" if last else "before they are saved"
        what = "diverged" if spike else f"the weights were checked {before}"
        return Trouble(
            step=step,
            what=f"step {step + 1}: {what}",
            action="rollback" if "rollback" in actions else "stop",
            began=step + 1 if began is None else began,
            ruin=ruin,
        )

    def _say_it_lasts(self, spike: LossSpike, step: int) -> None:
        """Log a spike that has lasted for another window, with weights that are not ruined."""
        worse = self.weights.problem(over=True)
        state = worse or "the weights are as good as before for earlier texts"
        text = f"step {step + 1}: {spike}, for {spike.length} steps by now; {state}"
        self.event("spike", f"{text}; training continues", step=step + 1)

    def _nonfinite_action(self) -> str:
        """Action for the current step, which was skipped; nothing if that is normal: fp16 skips
        steps while it looks for its loss scale."""
        searches = self.engine.ds_config.lowers_scale(self.engine.loss_scale)
        if searches and self.skipped_in_a_row < _MAX_SCALE_SEARCH:
            return ""
        if self.recipe.nonfinite == "skip":
            return "stop" if self.skipped_in_a_row > self.recipe.failure_limit else ""
        return self.recipe.nonfinite
