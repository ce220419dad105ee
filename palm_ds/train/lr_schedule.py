"""How the learning rate moves: warm-up and fall, over the run or over each stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from palm_ds.common.errors import UserError
from palm_ds.data.stages import Plan, StepInfo


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """The learning rate of a step, as a factor of the optimizer's `lr`."""

    kind: Literal["noam", "linear", "wsd", "constant"] = "linear"
    """noam: falls with the square root of the steps; linear: to `end`; wsd: stays, then falls
    to `end` over the last `decay` steps; constant."""
    warmup: float = 0.0
    """Steps in which it rises from 0; below 1: that share of all steps (`restart: stage`: of the
    stage's)."""
    decay: int = 0
    """wsd: the length of the fall at the end, in steps."""
    end: float = 0.0
    """linear and wsd: the factor that is reached at the end."""
    restart: Literal["never", "stage"] = "never"
    """`stage`: every stage has a warm-up and a fall of its own (ERNIE 2.0, section 5.1)."""

    def __post_init__(self) -> None:
        for name in ("warmup", "decay"):
            if getattr(self, name) < 0:
                raise UserError(f"schedule.{name}: {getattr(self, name)} is negative")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise UserError(
                f"schedule.warmup: {self.warmup} is neither a number of steps nor a share below 1"
            )
        if not 0 <= self.end <= 1:
            raise UserError(f"schedule.end: {self.end} is not between 0 and 1")
        if self.kind == "noam" and not self.warmup:
            raise UserError("schedule.warmup: noam needs a warm-up; its peak is at the end of it")
        if self.kind == "wsd" and not self.decay:
            raise UserError("schedule.decay: wsd needs the number of steps of its fall")

    def warmups(self, plan: Plan) -> list[int]:
        """Warm-up steps of each stage."""
        if self.restart == "stage":
            return [self._rising(stage.steps) for stage in plan.stages]
        return [self._rising(plan.steps), *[0] * (len(plan.stages) - 1)]

    def _rising(self, steps: int) -> int:
        """Of so many steps."""
        return int(self.warmup if self.warmup >= 1 else self.warmup * steps)

    def scale(self, at: StepInfo, total_steps: int) -> float:
        """The multiplier of `optimizer.lr` at a step of a run of `total_steps`."""
        if self.restart == "stage":
            return self._within(at.step - at.first + 1, at.stage_steps)
        return self._within(at.step + 1, total_steps)

    def _within(self, t: int, steps: int) -> float:
        """The t-th step (1-based) of so many."""
        warmup = self._rising(steps)
        if t <= warmup:
            return t / warmup
        if self.kind == "noam":
            return (max(warmup, 1) / t) ** 0.5
        if self.kind == "constant":
            return 1.0
        fall = max(steps - warmup if self.kind == "linear" else self.decay, 1)
        left = min(max(steps - t + 1, 0) / fall, 1.0)
        return self.end + (1 - self.end) * left
