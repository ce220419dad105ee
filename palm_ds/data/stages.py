"""The plan: so many steps of each blend in each stage, exact counts in a seeded order.

A blend is tasks that share examples: `sentence_reordering + knowledge_masking`. The first arranges
the text, all label it. With N blends and a budget of B steps each, continual multi-task learning
(ERNIE 2.0, section 3.1) gives stage s (s+1)u steps to the s-th blend and u to each before it,
u = B/(N+1). For N = 4 and B = 50k: 20 | 10+30 | 10+10+40 | 10+10+10+50 thousand.

    stages of a recipe ──parse_stages──> Outline (budgets, in any unit) ──plan──> Plan (steps)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from palm_ds.common import rng as keyed
from palm_ds.common.errors import UserError, suggest
from palm_ds.data.budgets import (
    Amount,
    BySize,
    Measures,
    MixRatio,
    Sampler,
    of_blends,
    read_amount,
    read_sampler,
    sampled,
)

Mix = Literal["batch", "step"]


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


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """Where a step stands in the curriculum."""

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
        """Every blend, in order of first appearance."""
        return tuple(dict.fromkeys(b for stage in self.stages for b, _ in stage.steps_of))

    def stage_at(self, step: int) -> int:
        """The number of the stage that a step (0-based) belongs to."""
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
        """Steps of a blend in all."""
        return sum(dict(stage.steps_of).get(blend, 0) for stage in self.stages)

    def explicit(self) -> list[dict[str, Any]]:
        """The same as a recipe's list of stages."""
        return [
            dict(stage.steps_of) | ({"mix": stage.mix} if stage.mix != "batch" else {})
            for stage in self.stages
        ]

    def table(self, *, step_tokens: int = 0, warmups: Sequence[int] = ()) -> str:
        """Text: one row per blend, one column per stage. With `step_tokens`, the tokens of each
        blend; with `warmups` (steps of each stage), a row of them."""
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
    """Cells under one another: the first of a row to the left, the others to the right."""
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
    """The tasks of a blend, the one that arranges the text first."""
    return tuple(part.strip() for part in blend.split("+"))


# Shapes: budgets (steps of each blend in all) to stages ----------------------------------------


def continual(budgets: Mapping[str, int]) -> list[dict[str, int]]:
    """One stage a blend; each gives a unit, its budget / (blends + 1), to every later stage and the
    rest to its own, so that its steps sum to its budget exactly."""
    blends, number = list(budgets), len(budgets)
    unit = {blend: budget // (number + 1) for blend, budget in budgets.items()}
    rows: list[dict[str, int]] = []
    for s, blend in enumerate(blends):
        later = number - 1 - s  # stages after this one
        earlier = {before: unit[before] for before in blends[:s]}
        rows.append(earlier | {blend: budgets[blend] - later * unit[blend]})
    return rows


def joint(budgets: Mapping[str, int]) -> list[dict[str, int]]:
    """One stage: every blend from the start."""
    return [dict(budgets)]


def sequential(budgets: Mapping[str, int]) -> list[dict[str, int]]:
    """One stage a blend, alone."""
    return [{blend: budget} for blend, budget in budgets.items()]


SHAPES: dict[str, Callable[[Mapping[str, int]], list[dict[str, int]]]] = {
    "continual": continual,
    "joint": joint,
    "alternate": joint,
    "sequential": sequential,
}
_KEYS = (*SHAPES, "explicit", "steps", "sampler", "mix", "always")


# Reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outline:
    """A recipe's `stages`, checked as far as it can be without a corpus."""

    shape: str
    """A key of SHAPES, or `explicit`."""
    blends: tuple[str, ...]
    """In order of first appearance; all have a budget."""
    amounts: tuple[Mapping[str, Amount], ...]
    """Explicit: of each stage; else one, the budget of each blend (none with a sampler)."""
    mixes: tuple[Mix, ...]
    """Explicit: of each stage; else one, of all."""
    sampler: Sampler | None = None
    total: Amount | None = None
    """What a sampler shares out."""

    @property
    def settled(self) -> bool:
        """Every amount is written in steps."""
        return self.sampler is None and {a.unit for row in self.amounts for a in row.values()} <= {
            "steps"
        }

    @property
    def needs_corpus(self) -> bool:
        """Steps depend on how many examples there are, or how long they are."""
        amounts = [amount for row in self.amounts for amount in row.values()]
        units = {a.unit for a in [*amounts, *filter(None, [self.total])]}
        by_example = not units <= {"steps", "tokens"}
        return by_example or isinstance(self.sampler, (BySize, MixRatio))

    @property
    def counts_tokens(self) -> bool:
        """Some amount is written in tokens."""
        amounts = [amount for row in self.amounts for amount in row.values()]
        return any(a.unit == "tokens" for a in [*amounts, *filter(None, [self.total])])

    @property
    def mix_of(self) -> dict[str, str]:
        """{blend: how its steps are mixed}; `batch` where it is so in any of its stages."""
        if self.shape != "explicit":
            return dict.fromkeys(self.blends, self.mixes[0])
        found = [(b, mix) for row, mix in zip(self.amounts, self.mixes, strict=True) for b in row]
        return {b: min(mix for other, mix in found if other == b) for b, _ in found}

    def plan(self, step_tokens: int = 0, measures: Measures | None = None) -> Plan:
        """In steps of so many tokens. Raises UserError where it takes `measures` of the blends
        (`needs_corpus`) and there are none."""
        if self.sampler is not None:
            rows = [sampled(self.sampler, self.total, step_tokens, measures)]
        else:
            rows = [self._steps(row, step_tokens, measures) for row in self.amounts]
        if self.shape != "explicit":
            rows = SHAPES[self.shape](rows[0])
        mixes = self.mixes if self.shape == "explicit" else self.mixes * len(rows)
        stages, first = [], 0
        for row, mix in zip(rows, mixes, strict=True):
            kept = tuple((blend, steps) for blend, steps in row.items() if steps)
            stages.append(Stage(steps_of=kept, mix=mix, first=first))
            first += stages[-1].steps
        return Plan(tuple(stage for stage in stages if stage.steps))

    def _steps(
        self, row: Mapping[str, Amount], step_tokens: int, measures: Measures | None
    ) -> dict[str, int]:
        return {
            blend: amount.steps(
                step_tokens, measures[blend] if measures else None, f"stages: {blend}"
            )
            for blend, amount in row.items()
        }


def read_stages(
    values: Any, tasks: Sequence[str], *, step_tokens: int = 0, measures: Measures | None = None
) -> Plan:
    """The plan of a recipe's `stages`; what `step_tokens` and `measures` are: Outline.plan."""
    return parse_stages(values, tasks).plan(step_tokens, measures)


def parse_stages(values: Any, tasks: Sequence[str]) -> Outline:
    """A recipe's `stages`:

    {continual: [blend, ...], steps: B}   each blend B, added one after another
    {joint: [blend, ...], steps: B}       each blend B, all from the start
    {alternate: [blend, ...], steps: B}   the same, each step of one blend, in a seeded order
    {sequential: [blend, ...], steps: B}  one blend after another
    [{blend: steps, ...}, ...]            as written; in a mapping: {explicit: [...]}

    Steps are a number, `20_000_000 tokens`, `300_000 sequences` (examples) or `3 epochs` (every
    example so often), rounded up to whole steps; for all blends, or {blend: steps, ...}.
    sampler: how `steps`, then the total of all blends, is shared out
        uniform | proportional            evenly, or by the tokens of each blend's epoch
        {temperature: T}                  by those to the power 1/T
        {weights: {blend: w, ...}}        as given
        {mix_ratio: {blend: r, ...}, reference: blend, epochs: E}
                                          PaddlePALM's, in place of `steps`: E * r * the steps of
                                          an epoch of the reference (by default the first blend)
    mix: batch | step                     a step is of all blends, or of one; also in a listed stage
    always: task [+ task ...]             every blend gets those of these tasks that it has not
    """
    if isinstance(values, list):
        values = {"explicit": values}
    if not isinstance(values, Mapping):
        raise UserError(
            f"stages: expected a list of stages or one of {', '.join(SHAPES)}, got {values!r}"
        )
    for name in values:
        if name not in _KEYS:
            raise UserError(f"stages.{name}: unknown key{suggest(str(name), _KEYS)}")
    shapes = [shape for shape in (*SHAPES, "explicit") if shape in values]
    if len(shapes) != 1:
        raise UserError(f"stages: name exactly one of {', '.join(SHAPES)}, or list the stages")
    spell = _speller(tasks, values.get("always"))
    outline = (_explicit if shapes == ["explicit"] else _shaped)(values, shapes[0], spell)
    if not outline.blends or (outline.total and not outline.total.number):
        raise UserError("stages: no steps at all; give at least one blend some steps")
    return outline


def _speller(tasks: Sequence[str], always: Any) -> Callable[[str], str]:
    """What turns a blend as written into its name: checked, spelled one way, with the tasks that
    are always on."""
    added = tasks_of(str(always)) if always is not None else ()
    for name in added:
        if name not in tasks:
            raise UserError(f"stages.always: no task {name!r} in `tasks`{suggest(name, tasks)}")

    def spell(blend: str) -> str:
        names = tasks_of(str(blend))
        for name in names:
            if name not in tasks:
                raise UserError(f"stages: no task {name!r} in `tasks`{suggest(name, tasks)}")
        if len(set(names)) < len(names):
            raise UserError(f"stages: {blend!r} names a task twice")
        return " + ".join([*names, *(name for name in added if name not in names)])

    return spell


def _mix(value: Any, where: str) -> Mix:
    if value not in ("batch", "step"):
        raise UserError(f"{where}: {value!r} is neither batch nor step")
    return value


def _explicit(values: Mapping[str, Any], shape: str, spell: Callable[[str], str]) -> Outline:
    listed = values[shape]
    for key in ("steps", "sampler"):
        if key in values:
            raise UserError(f"stages.{key}: listed stages say their steps themselves")
    if not isinstance(listed, list):
        raise UserError(f"stages.{shape}: expected a list of stages, got {listed!r}")
    rows, mixes = [], []
    for number, stage in enumerate(listed):
        where = f"stages.{number}"
        if not isinstance(stage, Mapping):
            raise UserError(f"{where}: expected `blend: steps`, got {stage!r}")
        mixes.append(_mix(stage.get("mix", values.get("mix", "batch")), f"{where}.mix"))
        written = {blend: amount for blend, amount in stage.items() if blend != "mix"}
        named = of_blends(written, [spell(blend) for blend in written], spell, where)
        rows.append({b: read_amount(amount, f"{where}.{b}") for b, amount in named.items()})
    return Outline(shape, _with_steps(rows), tuple(rows), tuple(mixes))


def _with_steps(rows: Sequence[Mapping[str, Amount]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(b for row in rows for b, amount in row.items() if amount.number))


def _shaped(values: Mapping[str, Any], shape: str, spell: Callable[[str], str]) -> Outline:
    written = values[shape]
    if not isinstance(written, list) or not all(isinstance(b, str) for b in written) or not written:
        raise UserError(f"stages.{shape}: expected a list of blends, got {written!r}")
    blends = [spell(blend) for blend in written]
    if len(set(blends)) < len(blends):
        raise UserError(f"stages.{shape}: a blend stands there twice")
    one = shape == "alternate"
    mix = _mix(values.get("mix", "step" if one else "batch"), "stages.mix")
    if one and mix != "step":
        raise UserError("stages.mix: `alternate` is `joint` with `mix: step`; write joint")
    if "sampler" in values:
        sampler, total = _sampler(values, blends, spell)
        return Outline(shape, tuple(blends), (), (mix,), sampler, total)
    budgets = _budgets(values.get("steps"), blends, spell)
    return Outline(shape, _with_steps([budgets]), (budgets,), (mix,))


def _sampler(
    values: Mapping[str, Any], blends: Sequence[str], spell: Callable[[str], str]
) -> tuple[Sampler, Amount | None]:
    sampler = read_sampler(values["sampler"], blends, spell)
    if isinstance(sampler, MixRatio):
        if "steps" in values:
            raise UserError("stages.steps: mix_ratio says the steps itself; leave `steps` out")
        return sampler, None
    if isinstance(values.get("steps"), Mapping):
        raise UserError("stages.steps: with a sampler it is one number, the total of all blends")
    return sampler, read_amount(values.get("steps"), "stages.steps")


def _budgets(value: Any, blends: Sequence[str], spell: Callable[[str], str]) -> dict[str, Amount]:
    """`steps` of every blend, in the order of the blends."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(blends, read_amount(value, "stages.steps"))
    named = of_blends(value, blends, spell, "stages.steps")
    if missing := [blend for blend in blends if blend not in named]:
        raise UserError(f"stages.steps: none for {missing[0]!r}; name every blend")
    return {blend: read_amount(named[blend], f"stages.steps.{blend}") for blend in blends}


# Order ---------------------------------------------------------------------------------------


def order_of(stage: Stage, number: int, seed: int) -> np.ndarray:
    """(steps,) which blend of a `mix: step` stage each step belongs to: exact counts, shuffled."""
    counts = [steps for _, steps in stage.steps_of]
    blends = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    return keyed.generator(keyed.key(seed, "order"), number).permutation(blends)
