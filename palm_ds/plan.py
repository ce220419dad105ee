"""The plan: so many steps of each blend in each stage, exact counts in a seeded order.

A blend is tasks that share examples: `sentence_reordering + knowledge_masking`. The first arranges
the text, all label it. With N blends and a budget of B steps each, continual multi-task learning
(ERNIE 2.0, section 3.1) gives stage s (s+1)u steps to the s-th blend and u to each before it,
u = B/(N+1). For N = 4 and B = 50k: 20 | 10+30 | 10+10+40 | 10+10+10+50 thousand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from palm_ds import keyed
from palm_ds.errors import UserError, suggest

Mix = Literal["batch", "step"]
_SHAPES = ("continual", "joint", "sequential", "explicit")


@dataclass(frozen=True)
class Stage:
    """Steps of each blend; `batch` spreads them over every step in proportion, `step` gives each
    step to one blend."""

    steps_of: tuple[tuple[str, int], ...]
    mix: Mix
    first: int
    """The number of the stage's first step in the run."""

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.steps_of)


@dataclass(frozen=True)
class Plan:
    """All stages of a run, in order."""

    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @cached_property
    def blends(self) -> tuple[str, ...]:
        """Every blend, in order of first appearance."""
        return tuple(dict.fromkeys(b for stage in self.stages for b, _ in stage.steps_of))

    def stage_at(self, step: int) -> int:
        """The number of the stage that a step (0-based) belongs to."""
        firsts = [stage.first for stage in self.stages]
        return int(np.searchsorted(firsts, step, side="right")) - 1

    def table(self) -> str:
        """The plan as people read it: one line a blend, one column a stage."""
        width = max(len(blend) for blend in self.blends)
        heads = [f"stage {i + 1}" for i in range(len(self.stages))]
        lines = [" " * width + "".join(f"{h:>12}" for h in heads) + f"{'all':>12}"]
        for blend in self.blends:
            steps = [dict(stage.steps_of).get(blend, 0) for stage in self.stages]
            cells = "".join(f"{n if n else '-':>12}" for n in steps)
            lines.append(f"{blend:<{width}}{cells}{sum(steps):>12}")
        totals = "".join(f"{stage.steps:>12}" for stage in self.stages)
        return "\n".join([*lines, f"{'steps':<{width}}{totals}{self.steps:>12}"])


def tasks_of(blend: str) -> tuple[str, ...]:
    """The tasks of a blend, the one that arranges the text first."""
    return tuple(part.strip() for part in blend.split("+"))


def read_stages(values: Any, tasks: Sequence[str]) -> Plan:
    """The plan of a recipe's `stages`:

    {continual: [blend, ...], steps: B}   each blend B steps, added one after another
    {joint: [blend, ...], steps: B}       each blend B steps, all from the start
    {sequential: [blend, ...], steps: B}  one blend after another
    [{blend: steps, ...}, ...]            as written; `mix: step` or `batch` in any of them
    """
    if isinstance(values, list):
        rows, mixes = _explicit(values)
    elif isinstance(values, Mapping):
        rows, mixes = _shaped(values)
    else:
        raise UserError(f"stages: expected a list of stages or one of {_SHAPES}, got {values!r}")
    stages, first = [], 0
    for row, mix in zip(rows, mixes, strict=True):
        kept = tuple((_checked(blend, tasks), steps) for blend, steps in row.items() if steps)
        stages.append(Stage(steps_of=kept, mix=mix, first=first))
        first += stages[-1].steps
    if not first:
        raise UserError("stages: no steps at all; give at least one blend some steps")
    return Plan(tuple(stage for stage in stages if stage.steps))


def _checked(blend: str, tasks: Sequence[str]) -> str:
    names = tasks_of(blend)
    for name in names:
        if name not in tasks:
            raise UserError(f"stages: no task {name!r} in `tasks`{suggest(name, tasks)}")
    if len(set(names)) < len(names):
        raise UserError(f"stages: {blend!r} names a task twice")
    return " + ".join(names)


def _steps(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{where}: expected a whole number of steps, got {value!r}")
    return value


def _mix(value: Any, where: str) -> Mix:
    if value not in ("batch", "step"):
        raise UserError(f"{where}: {value!r} is neither batch nor step")
    return value


def _explicit(values: list[Any]) -> tuple[list[dict[str, int]], list[Mix]]:
    rows, mixes = [], []
    for number, stage in enumerate(values):
        where = f"stages.{number}"
        if not isinstance(stage, Mapping):
            raise UserError(f"{where}: expected `blend: steps`, got {stage!r}")
        mixes.append(_mix(stage.get("mix", "batch"), f"{where}.mix"))
        rows.append({b: _steps(n, f"{where}.{b}") for b, n in stage.items() if b != "mix"})
    return rows, mixes


def _shaped(values: Mapping[str, Any]) -> tuple[list[dict[str, int]], list[Mix]]:
    shapes = [shape for shape in _SHAPES[:3] if shape in values]
    known = (*_SHAPES[:3], "steps", "mix")
    for name in values:
        if name not in known:
            raise UserError(f"stages.{name}: unknown key{suggest(name, known)}")
    if len(shapes) != 1:
        raise UserError(f"stages: name exactly one of {', '.join(_SHAPES[:3])}, or list the stages")
    shape, blends = shapes[0], values[shapes[0]]
    if not isinstance(blends, list) or not blends or not all(isinstance(b, str) for b in blends):
        raise UserError(f"stages.{shape}: expected a list of blends, got {blends!r}")
    if len(set(blends)) < len(blends):
        raise UserError(f"stages.{shape}: a blend stands there twice")
    budget = _steps(values.get("steps"), "stages.steps")
    rows = {"continual": continual, "joint": joint, "sequential": sequential}[shape](blends, budget)
    return rows, [_mix(values.get("mix", "batch"), "stages.mix")] * len(rows)


def continual(blends: Sequence[str], budget: int) -> list[dict[str, int]]:
    """One stage a blend; every blend's steps sum to `budget` exactly, whatever the remainder."""
    number = len(blends)
    unit = budget // (number + 1)
    rows: list[dict[str, int]] = []
    for s, blend in enumerate(blends):
        later = number - 1 - s  # stages after this one, `unit` steps in each
        rows.append(dict.fromkeys(blends[:s], unit) | {blend: budget - later * unit})
    return rows


def joint(blends: Sequence[str], budget: int) -> list[dict[str, int]]:
    """One stage: every blend from the start."""
    return [dict.fromkeys(blends, budget)]


def sequential(blends: Sequence[str], budget: int) -> list[dict[str, int]]:
    """One stage a blend, alone."""
    return [{blend: budget} for blend in blends]


def order_of(stage: Stage, number: int, seed: int) -> np.ndarray:
    """(steps,) which blend of a `mix: step` stage each step belongs to: exact counts, shuffled."""
    counts = [steps for _, steps in stage.steps_of]
    blends = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    return keyed.generator(keyed.key(seed, "order"), number).permutation(blends)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of a step, as a factor of the optimizer's `lr`."""

    kind: Literal["noam", "linear", "wsd", "constant"] = "linear"
    """noam: falls with the square root of the steps; linear: to `end`; wsd: stays, then falls
    to `end` over the last `decay` steps; constant."""
    warmup: int = 0
    """Steps in which it rises from 0."""
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
        if not 0 <= self.end <= 1:
            raise UserError(f"schedule.end: {self.end} is not between 0 and 1")
        if self.kind == "noam" and not self.warmup:
            raise UserError("schedule.warmup: noam needs a warm-up; its peak is at the end of it")
        if self.kind == "wsd" and not self.decay:
            raise UserError("schedule.decay: wsd needs the number of steps of its fall")

    def factor(self, step: int, plan: Plan) -> float:
        """What `lr` is multiplied with at a step (0-based)."""
        first, steps = 0, plan.steps
        if self.restart == "stage":
            stage = plan.stages[plan.stage_at(step)]
            first, steps = stage.first, stage.steps
        return self._within(step - first + 1, steps)

    def _within(self, t: int, steps: int) -> float:
        """The t-th step (1-based) of so many."""
        if t <= self.warmup:
            return t / self.warmup
        if self.kind == "noam":
            return (self.warmup / t) ** 0.5
        if self.kind == "constant":
            return 1.0
        fall = max(steps - self.warmup if self.kind == "linear" else self.decay, 1)
        left = min(max(steps - t + 1, 0) / fall, 1.0)
        return self.end + (1 - self.end) * left
