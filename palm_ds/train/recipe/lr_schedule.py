"""The learning rate schedule: warm-up and decay, over the run or restarted in each stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from palm_ds.common.errors import UserError
from palm_ds.data.stream.stages import Curriculum, StepInfo


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """The learning rate of each step, as a multiplier of the optimizer's `lr`."""

    kind: Literal["noam", "linear", "wsd", "constant"] = "linear"
    """Decay after the warm-up. noam: with the inverse square root of the step; linear: to `end`;
    wsd: constant, then linearly to `end` over the last `decay` steps; constant: none."""
    warmup: float = 0.0
    """Steps of linear increase from 0. Below 1: a fraction of all steps (with `restart: stage`, of
    the stage's steps)."""
    decay: int = 0
    """wsd: steps of the decay at the end."""
    end: float = 0.0
    """linear and wsd: the multiplier at the end."""
    restart: Literal["never", "stage"] = "never"
    """`stage`: every stage has its own warm-up and decay (ERNIE 2.0, section 5.1)."""

    def __post_init__(self) -> None:
        for name in ("warmup", "decay"):
            if getattr(self, name) < 0:
                raise UserError(f"schedule.{name}: {getattr(self, name)} is negative")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise UserError(
                f"schedule.warmup: {self.warmup} is neither a number of steps nor a fraction "
                "below 1"
            )
        if not 0 <= self.end <= 1:
            raise UserError(f"schedule.end: {self.end} is not between 0 and 1")
        if self.kind == "noam" and not self.warmup:
            raise UserError("schedule.warmup: noam needs a warm-up, which ends at the peak")
        if self.decay and self.kind != "wsd":
            raise UserError(
                f"schedule.decay: {self.kind} takes no decay steps; remove it, or use `kind: wsd`"
            )
        if self.end and self.kind not in ("linear", "wsd"):
            raise UserError(f"schedule.end: {self.kind} has no end; remove it, or use another kind")
        if self.kind == "wsd" and not self.decay:
            raise UserError("schedule.decay: wsd needs the number of decay steps")

    def warmups(self, curriculum: Curriculum) -> list[int]:
        """Warm-up steps of each stage."""
        if self.restart == "stage":
            return [self._warmup_steps(stage.steps) for stage in curriculum.stages]
        return [self._warmup_steps(curriculum.steps), *[0] * (len(curriculum.stages) - 1)]

    def _warmup_steps(self, steps: int) -> int:
        """Warm-up of a run or stage of `steps` steps."""
        return int(self.warmup if self.warmup >= 1 else self.warmup * steps)

    def warnings(self, curriculum: Curriculum) -> list[str]:
        """One line for the run, or each stage, that is too short for its warm-up and decay."""
        spans = {"the run": curriculum.steps}
        if self.restart == "stage":
            spans = {f"stage {n}": stage.steps for n, stage in enumerate(curriculum.stages, 1)}
        problems = {what: self._too_short(steps) for what, steps in spans.items()}
        return [f"note: schedule: {what} {why}" for what, why in problems.items() if why]

    def _too_short(self, steps: int) -> str:
        warmup, decay = self._warmup_steps(steps), self.decay if self.kind == "wsd" else 0
        if warmup > steps:
            share = 100 * steps / warmup
            return f"ends after {steps:,} of {warmup:,} warm-up steps, at {share:.0f} % of `lr`"
        if warmup + decay > steps:
            return f"has {steps:,} steps, too few for {warmup:,} of warm-up and {decay:,} of decay"
        return ""

    def scale(self, at: StepInfo, total_steps: int) -> float:
        """The multiplier of `optimizer.lr` at a step of a run of `total_steps`."""
        if self.restart == "stage":
            return self._scale_within(at.step - at.first + 1, at.stage_steps)
        return self._scale_within(at.step + 1, total_steps)

    def _scale_within(self, t: int, steps: int) -> float:
        """The multiplier at the t-th of `steps` steps (1-based)."""
        warmup = self._warmup_steps(steps)
        if t <= warmup:
            return t / warmup
        if self.kind == "noam":
            return (max(warmup, 1) / t) ** 0.5
        if self.kind == "constant":
            return 1.0
        decay = max(steps - warmup if self.kind == "linear" else self.decay, 1)
        remaining = min(max(steps - t + 1, 0) / decay, 1.0)
        return self.end + (1 - self.end) * remaining
