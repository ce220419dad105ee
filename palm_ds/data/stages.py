"""The curriculum: the steps of each blend in each stage, exact counts in a seeded order.

A blend is a group of tasks that share examples: `sentence_reordering + knowledge_masking`. The
first builds the text, all of them label it. With N blends and a budget of B steps each, continual
multi-task learning (ERNIE 2.0, section 3.1) gives stage s (s+1)u steps to the s-th blend and u to
each earlier one, u = B/(N+1). For N = 4 and B = 50k: 20 | 10+30 | 10+10+40 | 10+10+10+50 thousand.

    stages of a recipe ──parse_stages──> Outline (budgets, in any unit) ──plan──> Plan (steps)
                          (palm_ds/data/curriculum_spec.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from palm_ds.common import rng as keyed

Mix = Literal["batch", "step"]


@dataclass(frozen=True)
class Stage:
    """Steps of each blend. `batch` mixes the blends within every step, in proportion; with `step`
    each step belongs to one blend."""

    steps_of: tuple[tuple[str, int], ...]
    mix: Mix
    first: int
    """The first step of the stage, counted over the run."""

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.steps_of)


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
    blends: tuple[str, ...]
    """What the step trains on: one with `mix: step`, all of the stage with `mix: batch`."""

    @property
    def starts_stage(self) -> bool:
        return self.step == self.first

    @property
    def ends_stage(self) -> bool:
        return self.step == self.first + self.stage_steps - 1


@dataclass(frozen=True)
class Plan:
    """All stages of a run, in order."""

    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @cached_property
    def blends(self) -> tuple[str, ...]:
        """All blends, in order of first appearance."""
        return tuple(dict.fromkeys(b for stage in self.stages for b, _ in stage.steps_of))

    def stage_at(self, step: int) -> int:
        """The stage number (0-based) of a step (0-based)."""
        firsts = [stage.first for stage in self.stages]
        return int(np.searchsorted(firsts, step, side="right")) - 1

    def at(self, step: int, seed: int) -> StepInfo:
        """The stage of a step (0-based) and what the step trains on."""
        number = self.stage_at(step)
        stage = self.stages[number]
        blends = [blend for blend, _ in stage.steps_of]
        if stage.mix == "step":
            blends = [blends[self._order(number, seed)[step - stage.first]]]
        return StepInfo(
            step=step,
            stage=number,
            first=stage.first,
            stage_steps=stage.steps,
            blends=tuple(blends),
        )

    def _order(self, number: int, seed: int) -> np.ndarray:
        if (number, seed) not in self._orders:
            self._orders[number, seed] = order_of(self.stages[number], number, seed)
        return self._orders[number, seed]

    @cached_property
    def _orders(self) -> dict[tuple[int, int], np.ndarray]:
        return {}

    def total_of(self, blend: str) -> int:
        """Steps of a blend over all stages."""
        return sum(dict(stage.steps_of).get(blend, 0) for stage in self.stages)

    def explicit(self) -> list[dict[str, Any]]:
        """The plan as a recipe's list of stages."""
        return [
            dict(stage.steps_of) | ({"mix": stage.mix} if stage.mix != "batch" else {})
            for stage in self.stages
        ]

    def table(self, *, step_tokens: int = 0, warmups: Sequence[int] = ()) -> str:
        """A text table: one row per blend, one column per stage. `step_tokens` adds the tokens of
        each blend; `warmups` (steps per stage) adds a row."""
        rows = [
            [blend, *(dict(stage.steps_of).get(blend, 0) for stage in self.stages)]
            + [self.total_of(blend)]
            for blend in self.blends
        ]
        rows.append(["steps", *(stage.steps for stage in self.stages), self.steps])
        if step_tokens:
            rows = [[*row, row[-1] * step_tokens] for row in rows]
        if any(warmups):
            rows.append(["warm-up", *warmups])
        if any(stage.mix == "step" for stage in self.stages):
            rows.append(["mix", *(stage.mix for stage in self.stages)])
        heads = ["", *(f"stage {i + 1}" for i in range(len(self.stages))), "all"]
        return _columns([[*heads, *(["tokens"] if step_tokens else [])], *rows])


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


def tasks_of(blend: str) -> tuple[str, ...]:
    """The tasks of a blend; the first one builds the text."""
    return tuple(part.strip() for part in blend.split("+"))


# Shapes: budgets (total steps per blend) to stages ----------------------------------------


def continual(budgets: Mapping[str, int]) -> list[dict[str, int]]:
    """One stage per blend. Each blend gives one unit, budget / (blends + 1), to every later stage
    and the rest to its own, so that its steps add up to its budget exactly."""
    blends, number = list(budgets), len(budgets)
    unit = {blend: budget // (number + 1) for blend, budget in budgets.items()}
    rows: list[dict[str, int]] = []
    for s, blend in enumerate(blends):
        later = number - 1 - s  # stages after this one
        earlier = {before: unit[before] for before in blends[:s]}
        rows.append(earlier | {blend: budgets[blend] - later * unit[blend]})
    return rows


def joint(budgets: Mapping[str, int]) -> list[dict[str, int]]:
    """One stage with all blends."""
    return [dict(budgets)]


def sequential(budgets: Mapping[str, int]) -> list[dict[str, int]]:
    """One stage per blend, each alone."""
    return [{blend: budget} for blend, budget in budgets.items()]


SHAPES: dict[str, Callable[[Mapping[str, int]], list[dict[str, int]]]] = {
    "continual": continual,
    "joint": joint,
    "alternate": joint,
    "sequential": sequential,
}


def order_of(stage: Stage, number: int, seed: int) -> np.ndarray:
    """(steps,) the blend of each step of a `mix: step` stage: exact counts, shuffled."""
    counts = [steps for _, steps in stage.steps_of]
    blends = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    return keyed.generator(keyed.key(seed, "order"), number).permutation(blends)
