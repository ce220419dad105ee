"""The learning rate schedule: warm-up and decay, over the run or restarted in each stage; and
schedules of the user's own.

    schedule: {kind: my_module.Stairs, options: {drops: [0.5, 0.8]}, warmup: 0.1}

A run may be stopped and resumed at any step, and any step's rate may be asked for, so a schedule is
a function of the step alone. A trial shows whether a class is one; a schedule that counts its calls
would otherwise be another one after every restart.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator

from palm_ds.common.errors import UserError, named_line, suggest
from palm_ds.common.plugins import check_options, import_class
from palm_ds.common.settings import Settings, Share
from palm_ds.data.stream.stages import Curriculum, StepInfo, StepSize

KINDS = ("noam", "linear", "cosine", "wsd", "constant")


def _as_number(value: object) -> object:
    """YAML reads 1e-1 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@dataclass(frozen=True, kw_only=True)
class LRSchedule(Settings):
    """The learning rate of each step, as a multiplier of the optimizer's `lr`."""

    kind: str = "linear"
    """Decay after the warm-up. linear, cosine: to `end` at the last step; wsd: constant, then to
    `end` over the last `decay` steps, in the form of `shape`; noam: with the inverse square root
    of the step; constant: none; or `module.Class`, a schedule of your own (docs/api.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """`module.Class`: keyword arguments of its constructor."""
    warmup: Annotated[float | str, BeforeValidator(_as_number)] = 0.0
    """Length of the linear increase from `start`: steps, `N tokens`, or below 1 a fraction of all
    steps (with `restart: stage`, of the stage's steps)."""
    start: Share = 0.0
    """The multiplier at which the warm-up starts."""
    decay: Annotated[int | float | str, BeforeValidator(_as_number)] = 0
    """wsd: length of the decay at the end: steps, `N tokens`, or a fraction, as in `warmup`."""
    shape: Literal["linear", "1-sqrt", "cosine"] = "linear"
    """wsd: the form of the decay. 1-sqrt: 1 minus the square root of the share of its steps that is
    done (ModernBERT)."""
    end: Share = 0.0
    """linear, cosine and wsd: the multiplier at the end."""
    restart: Literal["never", "stage"] = "never"
    """never: one warm-up and decay over the run; stage: one in every stage (ERNIE 2.0, section
    5.1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "." not in self.kind and self.kind not in KINDS:
            near = suggest(self.kind, KINDS)
            raise UserError(f'schedule.kind: no "{self.kind}"{near} (or module.Class)')
        if self.options and self.kind in KINDS:
            raise UserError(
                f"schedule.options: only for a schedule of your own (module.Class), not {self.kind}"
            )
        for name in ("warmup", "decay"):
            _check_span(name, getattr(self, name))
        if self.kind == "noam" and not self.warmup:
            raise UserError("schedule.warmup: noam needs a warm-up, which ends at the peak")
        if self.decay and self.kind != "wsd":
            raise UserError(
                f"schedule.decay: {self.kind} takes no decay steps; remove it, or use `kind: wsd`"
            )
        if self.shape != "linear" and self.kind != "wsd":
            raise UserError(f"schedule.shape: {self.kind} has a fixed one; remove this")
        if self.end and self.kind not in ("linear", "cosine", "wsd"):
            raise UserError(f"schedule.end: {self.kind} has no end; remove it, or use another kind")
        if self.start and not self.warmup:
            raise UserError("schedule.start: needs `warmup`, which starts there")
        if self.kind == "wsd" and not self.decay:
            raise UserError("schedule.decay: wsd needs the number of decay steps")
        _ = self._custom  # checks itself

    @cached_property
    def _custom(self) -> Schedule | None:
        """The schedule of the user's own; None for the built-in kinds."""
        return None if self.kind in KINDS else build_schedule(self.kind, self.options)

    @property
    def counts_tokens(self) -> bool:
        """Whether an amount is in tokens."""
        return isinstance(self.warmup, str) or isinstance(self.decay, str)

    def in_steps(self, size: StepSize | None) -> LRSchedule:
        """With amounts in tokens as steps of this size, rounded up: a warm-up as its first ones, a
        decay as its last. None: `batch` is in examples. Raises UserError if that is not known."""
        warmup = _tokens("warmup", self.warmup, size)
        decay = _tokens("decay", self.decay, size)
        if not size:
            return self
        return replace(
            self,
            warmup=self.warmup if warmup is None else size.steps_of(warmup),
            decay=self.decay if decay is None else math.ceil(decay / size.tokens),
        )

    def warmups(self, curriculum: Curriculum, own: Schedules = ()) -> list[int]:
        """Warm-up steps of each stage; `own`: the schedules that stages have of their own."""
        if self.restart == "stage":
            usual = [self._warmup_steps(stage.steps) for stage in curriculum.stages]
        else:
            usual = [self._warmup_steps(curriculum.steps), *[0] * (len(curriculum.stages) - 1)]
        return [
            schedule._warmup_steps(stage.steps) if schedule else steps
            for stage, schedule, steps in zip(
                curriculum.stages, own or [None] * len(usual), usual, strict=True
            )
        ]

    def _warmup_steps(self, steps: int) -> int:
        """Warm-up of a run or stage of `steps` steps."""
        return _part(self.warmup, steps)

    def _decay_steps(self, steps: int) -> int:
        """Decay at the end of a run or stage of `steps` steps."""
        return _part(self.decay, steps) if self.kind == "wsd" else 0

    def warnings(self, curriculum: Curriculum, own: Schedules = ()) -> list[str]:
        """One line for the run, or each stage, that is too short for its warm-up and decay; `own`:
        as in `warmups`."""
        own = own or [None] * len(curriculum.stages)
        spans: list[tuple[str, LRSchedule, int]] = []
        if self.restart == "never" and not own[-1]:
            spans.append(("the run", self, curriculum.steps))
        for number, (stage, schedule) in enumerate(zip(curriculum.stages, own, strict=True), 1):
            if schedule or self.restart == "stage":
                spans.append((f"stage {number}", schedule or self, stage.steps))
        problems = [(what, schedule._too_short(steps)) for what, schedule, steps in spans]
        return [f"note: schedule: {what} {why}" for what, why in problems if why]

    def _too_short(self, steps: int) -> str:
        warmup, decay = self._warmup_steps(steps), self._decay_steps(steps)
        if warmup > steps:
            share = 100 * self._scale_within(steps, steps)
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
            return self.start + (1 - self.start) * t / warmup
        if self._custom:
            return scale_of(self._custom, self.kind, t, steps)
        if self.kind == "noam":
            return (max(warmup, 1) / t) ** 0.5
        if self.kind == "constant":
            return 1.0
        decay = max(self._decay_steps(steps) if self.kind == "wsd" else steps - warmup, 1)
        remaining = min(max(steps - t + 1, 0) / decay, 1.0)
        shape = self.shape if self.kind == "wsd" else self.kind
        return self.end + (1 - self.end) * _SHAPES[shape](remaining)


Schedules: TypeAlias = Sequence[LRSchedule | None]
"""Of each stage; None: the recipe's continues."""

_SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda remaining: remaining,
    "1-sqrt": lambda remaining: 1 - math.sqrt(1 - remaining),
    "cosine": lambda remaining: (1 + math.cos(math.pi * (1 - remaining))) / 2,
}
"""The multiplier by what remains of the decay, from 1 to 0."""


def _part(amount: float | str, steps: int) -> int:
    """An amount in steps, of which one below 1 is a fraction of `steps`."""
    assert not isinstance(amount, str), "in_steps was not called"
    return int(amount if amount >= 1 else amount * steps)


def _tokens(name: str, amount: float | str, size: StepSize | None) -> int | None:
    """An amount in tokens; None if it is in steps."""
    if not isinstance(amount, str):
        return None
    if not size:
        raise UserError(
            f"schedule.{name}: {amount}, but `batch` is in examples; give a number of steps"
        )
    return int(amount.split()[0].replace("_", ""))


def _check_span(name: str, amount: float | str) -> None:
    """Raises UserError for an amount that is neither steps, nor a fraction, nor tokens."""
    if isinstance(amount, str):
        if not re.fullmatch(r"[1-9][\d_]*\s+tokens", amount.strip()):
            raise UserError(f"schedule.{name}: {amount!r} is neither a number nor `N tokens`")
    elif amount < 0:
        raise UserError(f"schedule.{name}: {amount} is negative")
    elif amount >= 1 and amount != int(amount):
        raise UserError(
            f"schedule.{name}: {amount} is neither a number of steps nor a fraction below 1"
        )


_WHERE = "schedule.kind"
_RUNS = (1, 9, 1000)
"""Numbers of steps that a trial asks for."""


class Schedule(ABC):
    """Multiplier of the peak learning rate at each step; the constructor takes the recipe's
    `schedule.options`."""

    @abstractmethod
    def scale(self, step: int, steps: int) -> float:
        """The multiplier, 0 or more, at the `step`-th of `steps` steps, which count from 1. It must
        follow from these two numbers. With `restart: stage`, they are those of the stage. It is not
        asked for the steps of the recipe's `warmup`."""


def build_schedule(kind: str, options: Mapping[str, Any]) -> Schedule:
    """The schedule that a recipe names `module.Class`. Raises UserError, with the reason, if the
    class is not a subclass of Schedule, does not take the options, or fails a trial."""
    cls: type[Any] = import_class(kind, Schedule, _WHERE)
    check_options(cls, options, "schedule.options", base=Schedule, reserved=(), passes_first=False)
    try:
        schedule, other = cls(**options), cls(**options)
        asked = [(step, steps) for steps in _RUNS for step in _steps(steps)]
        first = [scale_of(schedule, kind, *each) for each in asked]
        again = [scale_of(other, kind, *each) for each in reversed(asked)]
    except UserError:
        raise
    except Exception as error:  # user code may raise anything
        raise UserError(f"{_WHERE}: {kind}: fails in a trial: {named_line(error)}") from error
    _check_same(kind, asked, first, again[::-1])
    return schedule


def scale_of(schedule: Schedule, kind: str, step: int, steps: int) -> float:
    """The multiplier at a step. Raises UserError if it is negative or not finite."""
    value = float(schedule.scale(step, steps))
    if not 0 <= value < math.inf:  # also true for NaN
        raise UserError(
            f"{_WHERE}: {kind}: the multiplier at step {step:,} of {steps:,} is {value}; expected "
            "0 or more"
        )
    return value


def _steps(steps: int) -> list[int]:
    return sorted({1, 2, steps // 3, steps // 2, steps - 1, steps} & set(range(1, steps + 1)))


def _check_same(
    kind: str, asked: Sequence[tuple[int, int]], first: Sequence[float], again: Sequence[float]
) -> None:
    for (step, steps), one, other in zip(asked, first, again, strict=True):
        if one != other:
            raise UserError(
                f"{_WHERE}: {kind}: the multiplier at step {step:,} of {steps:,} is {one:g} and, "
                f"asked in another order, {other:g}; compute it from the step alone"
            )
