"""Learning-rate schedules of the user's own.

    schedule: {kind: my_module.Stairs, options: {drops: [0.5, 0.8]}, warmup: 0.1}

A run may be stopped and resumed at any step, and any step's rate may be asked for, so a schedule is
a function of the step alone. A trial shows whether a class is one; a schedule that counts its calls
would otherwise be another one after every restart.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from palm_ds.common.errors import UserError, named_line
from palm_ds.common.plugins import check_options, import_class

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
