"""The curriculum: the steps of each task group in each stage, exact counts in a seeded order.

A task group is a group of tasks that share examples: `sentence_reordering + knowledge_masking`. The
first builds the text, all of them label it. With N task groups and a budget of B steps each,
continual multi-task learning (ERNIE 2.0, section 3.1) gives stage s (s+1)u steps to the s-th task
group and u to each earlier one, u = B/(N+1). For N = 4 and B = 50k: 20 | 10+30 | 10+10+40 |
10+10+10+50 thousand.

    stages of a recipe ──parse_stages──> CurriculumSpec (budgets in any unit)
                       ──resolve──> Curriculum (steps)       (data/stream/curriculum_spec.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_generator

Mix = Literal["batch", "step", "turns"]
STAGE_SETTINGS = (
    "length",
    "batch",
    "mixture",
    "sampling_exponent",
    "rope_base",
    "local_rope_base",
    "lr",
    "schedule",
    "weight_decay",
    "rate",
    "freeze",
    "trains",
    "evaluate_every",
)
"""Settings of the recipe that a stage may have of its own (train/recipe/stage_settings.py)."""


@dataclass(frozen=True)
class Stage:
    """Steps of each task group. `batch` mixes the task groups within every step, in proportion;
    with `step` and `turns` each step belongs to one task group."""

    steps_of: tuple[tuple[str, int], ...]
    mix: Mix
    first: int
    """The first step of the stage, counted over the run."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """{one of STAGE_SETTINGS: what this stage has instead of the recipe's}."""

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.steps_of)

    @property
    def one_by_one(self) -> bool:
        """Whether each step belongs to one task group."""
        return self.mix != "batch"


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """The place of a step in the curriculum."""

    step: int
    """0-based, over the run."""
    stage: int
    """0-based number of its stage."""
    first: int
    """The first step of the stage."""
    stage_steps: int
    """Steps of the stage."""
    task_groups: tuple[str, ...]
    """The groups that the step trains on: all of the stage with `mix: batch`, else one of them."""

    @property
    def starts_stage(self) -> bool:
        return self.step == self.first


@dataclass(frozen=True)
class Curriculum:
    """All stages of a run, in order."""

    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @cached_property
    def task_groups(self) -> tuple[str, ...]:
        """All task groups, in order of first appearance."""
        return tuple(dict.fromkeys(b for stage in self.stages for b, _ in stage.steps_of))

    def started(self, done: int) -> frozenset[str]:
        """The tasks of the stages that have started after `done` steps."""
        groups = [b for stage in self.stages if stage.first < done for b, _ in stage.steps_of]
        return frozenset(task for task_group in groups for task in tasks_of(task_group))

    def stage_at(self, step: int) -> int:
        """The stage number (0-based) of a step (0-based)."""
        firsts = [stage.first for stage in self.stages]
        return int(np.searchsorted(firsts, step, side="right")) - 1

    def at(self, step: int, seed: int) -> StepInfo:
        """The stage of a step (0-based) and what the step trains on."""
        number = self.stage_at(step)
        stage = self.stages[number]
        task_groups = [task_group for task_group, _ in stage.steps_of]
        if stage.one_by_one:
            task_groups = [task_groups[self._order(number, seed)[step - stage.first]]]
        return StepInfo(
            step=step,
            stage=number,
            first=stage.first,
            stage_steps=stage.steps,
            task_groups=tuple(task_groups),
        )

    def _order(self, number: int, seed: int) -> np.ndarray:
        if (number, seed) not in self._orders:
            self._orders[number, seed] = order_of(self.stages[number], number, seed)
        return self._orders[number, seed]

    @cached_property
    def _orders(self) -> dict[tuple[int, int], np.ndarray]:
        return {}

    def total_of(self, task_group: str) -> int:
        """Steps of a task group over all stages."""
        return sum(dict(stage.steps_of).get(task_group, 0) for stage in self.stages)

    def explicit(self) -> list[dict[str, Any]]:
        """The plan as a recipe's list of stages."""
        return [
            {**dict(stage.steps_of), **({"mix": stage.mix} if stage.mix != "batch" else {})}
            | dict(stage.settings)
            for stage in self.stages
        ]

    def table(self, *, tokens: Sequence[int] = (), warmups: Sequence[int] = ()) -> str:
        """A text table: one row per task group, one column per stage. `tokens` of each stage add
        those of each task group; `warmups` (steps per stage) adds a row."""
        rows = [
            [task_group, *(dict(stage.steps_of).get(task_group, 0) for stage in self.stages)]
            + [self.total_of(task_group)]
            for task_group in self.task_groups
        ]
        rows.append(["steps", *(stage.steps for stage in self.stages), self.steps])
        if tokens:
            stages = list(zip(self.stages, tokens, strict=True))
            rows = [
                [*row, sum(round(n * all_of / stage.steps) for n, (stage, all_of) in pairs)]
                for row in rows
                if (pairs := list(zip(row[1:-1], stages, strict=True)))
            ]
        if any(warmups):
            rows.append(["warm-up", *warmups])
        if any(stage.one_by_one for stage in self.stages):
            rows.append(["mix", *(stage.mix for stage in self.stages)])
        for name in STAGE_SETTINGS:
            if any(name in stage.settings for stage in self.stages):
                rows.append([name, *(_short(stage.settings.get(name)) for stage in self.stages)])
        heads = ["", *(f"stage {i + 1}" for i in range(len(self.stages))), "all"]
        return _columns([[*heads, *(["tokens"] if tokens else [])], *rows])


def _short(value: object) -> str:
    """A setting of a stage in a cell: of a batch that grows its sizes, of a schedule its kind and
    shape, of a mixture its sources."""
    if isinstance(value, Mapping):
        if "kind" in value:
            return " ".join(str(value[key]) for key in ("kind", "shape") if key in value)
        return " to ".join(str(value[key]) for key in ("start", "end") if key in value) or " ".join(
            value
        )
    if isinstance(value, (list, tuple)):
        return " to ".join(str(item) for item in value)
    return "" if value is None else str(value)


def _columns(rows: Sequence[Sequence[str | int]]) -> str:
    """Aligned cells: the first column to the left, the others to the right."""
    cells = [[f"{c:,}" if isinstance(c, int) and c else str(c or "-") for c in r] for r in rows]
    cells[0][0] = ""
    widths = [
        max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells)))
    ]
    lines = [
        row[0].ljust(widths[0])
        + "".join(c.rjust(max(w + 2, 10)) for c, w in zip(row[1:], widths[1:], strict=False))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def tasks_of(task_group: str) -> tuple[str, ...]:
    """The tasks of a task group; the first one builds the text."""
    return tuple(part.strip() for part in task_group.split("+"))


# Kinds: budgets (total steps per task group) to stages ----------------------------------------


def continual(budgets: Mapping[str, int]) -> list[dict[str, int]]:
    """One stage per task group. Each task group gives one unit, budget / (task groups + 1), to
    every later stage and the rest to its own, so that its steps add up to its budget exactly."""
    task_groups, number = list(budgets), len(budgets)
    for task_group, budget in list(budgets.items())[:-1]:
        if 0 < budget <= number:
            raise UserError(
                f"stages.steps: {budget} of {task_group!r} are too few for continual: of {number} "
                f"task groups each needs at least {number + 1}, as it is trained in every later "
                "stage too; give more, or use sequential"
            )
    unit = {task_group: budget // (number + 1) for task_group, budget in budgets.items()}
    rows: list[dict[str, int]] = []
    for s, task_group in enumerate(task_groups):
        later = number - 1 - s  # stages after this one
        earlier = {before: unit[before] for before in task_groups[:s]}
        rows.append(earlier | {task_group: budgets[task_group] - later * unit[task_group]})
    return rows


def joint(budgets: Mapping[str, int]) -> list[dict[str, int]]:
    """One stage with all task groups."""
    return [dict(budgets)]


def sequential(budgets: Mapping[str, int]) -> list[dict[str, int]]:
    """One stage per task group, each alone."""
    return [{task_group: budget} for task_group, budget in budgets.items()]


CURRICULUM_KINDS: dict[str, Callable[[Mapping[str, int]], list[dict[str, int]]]] = {
    "continual": continual,
    "joint": joint,
    "alternate": joint,
    "sequential": sequential,
}


def order_of(stage: Stage, number: int, seed: int) -> np.ndarray:
    """(steps,) the task group of each step of a stage that trains one in each: exact counts, spread
    evenly (`mix: turns`) or shuffled (`mix: step`)."""
    counts = [steps for _, steps in stage.steps_of]
    if stage.mix == "turns":
        return spread(counts)
    task_groups = _numbers(counts)
    return keyed_generator(derive_key(seed, "order"), number).permutation(task_groups)


def spread(counts: Sequence[int]) -> np.ndarray:
    """(sum of counts,) counts[i] times the number i, each number spread evenly: its k-th of n
    occurrences is placed at (k + 1/2) / n (Webster's method). Ties go to the smaller number.

    >>> spread([4, 2])
    array([0, 1, 0, 0, 1, 0], dtype=uint8)
    """
    places = np.concatenate([(2 * np.arange(n) + 1) / (2 * n) for n in counts if n])
    return _numbers(counts)[np.argsort(places, kind="stable")]


def spread_counts(counts: Sequence[int], first: int) -> np.ndarray:
    """(len(counts),) how often each number is among the first ones of `spread(counts)`, which is
    not made for it: a run may have billions of examples.

    >>> spread_counts([4, 2], 3)
    array([2, 1])
    """
    number, whole = np.array(counts, np.int64), sum(counts)
    # Up to a share t of the whole, n of them have floor(n t + 1/2) places, which adds up to the
    # whole's share within half their number. So only the few places around it have to be sorted.
    around = len(counts) / 2 + 1
    low, high = (
        np.clip(np.floor(number * ((first + way * around) / whole) + 0.5) + way, 0, number)
        for way in (-1, 1)
    )
    low, few = low.astype(np.int64), (high - low).astype(np.int64)
    which = np.repeat(np.arange(len(counts)), few)
    place = np.arange(len(which)) - np.repeat(np.cumsum(few) - few, few) + low[which]
    order = np.argsort((2 * place + 1) / (2 * number[which]), kind="stable")
    nearest = which[order[: max(first - int(low.sum()), 0)]]
    return low + np.bincount(nearest, minlength=len(counts))


class PrefixCounts:
    """How often each number is among the first n of an array, for any n, in constant time."""

    _EVERY = 1 << 12

    def __init__(self, values: np.ndarray, numbers: int) -> None:
        self._values, self._numbers = values, numbers
        starts = np.arange(0, len(values), self._EVERY)
        blocks = [
            np.add.reduceat(values == number, starts, dtype=np.int64) for number in range(numbers)
        ]
        self._before = np.cumsum(np.insert(blocks, 0, 0, axis=1), axis=1)  # (numbers, blocks + 1)

    def __call__(self, first: int) -> np.ndarray:
        """(numbers,) the counts among the first `first`."""
        block = first // self._EVERY
        rest = self._values[block * self._EVERY : first]
        return self._before[:, block] + np.bincount(rest, minlength=self._numbers)


def _numbers(counts: Sequence[int]) -> np.ndarray:
    """(sum of counts,) counts[i] times the number i, in as few bytes as that takes."""
    return np.repeat(np.arange(len(counts), dtype=np.min_scalar_type(len(counts) - 1)), counts)


@dataclass(frozen=True)
class MaskRates:
    """The mask rate of every step; None where tasks have their own."""

    spans: tuple[tuple[int, int, tuple[float, ...]], ...] = ()
    """(first step, number of steps, rates) of the stages that have one: one rate, or the first
    step's and the last one's, with a linear change between them."""

    @classmethod
    def of(cls, curriculum: Curriculum, rates: Sequence[tuple[float, ...]]) -> MaskRates:
        """`rates`: those of each stage, empty for none."""
        pairs = zip(curriculum.stages, rates, strict=True)
        return cls(tuple((stage.first, stage.steps, own) for stage, own in pairs if own))

    def at(self, step: int) -> float | None:
        """The rate of a step (0-based)."""
        for first, steps, rates in self.spans:
            if first <= step < first + steps:
                done = (step - first) / max(steps - 1, 1)
                return rates[0] + (rates[-1] - rates[0]) * done
        return None


@dataclass(frozen=True)
class StepSize:
    """Packed rows of a step, over all processes. Batch warm-up as in ModernBERT: the sizes of
    `growth` come first, in equal numbers of steps."""

    length: int
    """Tokens of a row."""
    rows: int
    """Rows of a step, once it has grown."""
    growth: tuple[int, ...] = ()
    """Rows of the first steps, in increasing order."""
    steps_each: int = 0
    """Steps of each size of `growth`."""

    @property
    def tokens(self) -> int:
        """Tokens of a step, once it has grown."""
        return self.rows * self.length

    def rows_at(self, step: int) -> int:
        """Rows of a step of the stage (0-based)."""
        return self.growth[step // self.steps_each] if step < self._growing else self.rows

    def rows_before(self, steps: int) -> int:
        """Rows of the first `steps` steps of the stage together."""
        if steps >= self._growing:
            return self._grown + (steps - self._growing) * self.rows
        sizes, rest = divmod(steps, self.steps_each)
        return sum(self.growth[:sizes]) * self.steps_each + rest * self.growth[sizes]

    def steps_by_rows(self, steps: int) -> dict[int, int]:
        """{rows of a step: number of such steps among the first `steps` of the stage}"""
        grown = [min(max(steps - n * self.steps_each, 0), self.steps_each) for n in self._sizes]
        steps_of = dict(zip(self.growth, grown, strict=True)) | {self.rows: steps - sum(grown)}
        return {rows: count for rows, count in steps_of.items() if count}

    def steps_of(self, tokens: Fraction | float) -> int:
        """The number of the stage's first steps that have this many tokens, rounded up."""
        left = math.ceil(tokens / self.length)
        steps = 0
        for rows in self.growth:
            if left <= rows * self.steps_each:
                return steps + math.ceil(left / rows)
            left -= rows * self.steps_each
            steps += self.steps_each
        return steps + math.ceil(left / self.rows)

    @property
    def _sizes(self) -> range:
        return range(len(self.growth))

    @cached_property
    def _growing(self) -> int:
        """Steps before the full size."""
        return len(self.growth) * self.steps_each

    @cached_property
    def _grown(self) -> int:
        """Rows of these steps."""
        return sum(self.growth) * self.steps_each
