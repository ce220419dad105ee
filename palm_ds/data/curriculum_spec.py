"""Reads a recipe's `stages`: which blends, in which stages, with which budgets.

stages of a recipe ──parse_stages──> Outline (budgets, in any unit) ──plan──> Plan (steps)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from palm_ds.data.stages import SHAPES, Mix, Plan, Stage, tasks_of

_KEYS = (*SHAPES, "explicit", "steps", "sampler", "mix", "always")


@dataclass(frozen=True)
class Outline:
    """A recipe's `stages`, checked as far as possible without a corpus."""

    shape: str
    """A key of SHAPES, or `explicit`."""
    blends: tuple[str, ...]
    """In order of first appearance; each has a budget."""
    amounts: tuple[Mapping[str, Amount], ...]
    """Explicit: one per stage; else one with the budget of each blend (empty with a sampler)."""
    mixes: tuple[Mix, ...]
    """Explicit: one per stage; else one for all."""
    sampler: Sampler | None = None
    total: Amount | None = None
    """The total that the sampler distributes."""

    @property
    def settled(self) -> bool:
        """Whether every amount is in steps."""
        return self.sampler is None and {a.unit for row in self.amounts for a in row.values()} <= {
            "steps"
        }

    @property
    def needs_corpus(self) -> bool:
        """Whether the steps depend on the number or the length of examples."""
        amounts = [amount for row in self.amounts for amount in row.values()]
        units = {a.unit for a in [*amounts, *filter(None, [self.total])]}
        by_example = not units <= {"steps", "tokens"}
        return by_example or isinstance(self.sampler, (BySize, MixRatio))

    @property
    def counts_tokens(self) -> bool:
        """Whether some amount is in tokens."""
        amounts = [amount for row in self.amounts for amount in row.values()]
        return any(a.unit == "tokens" for a in [*amounts, *filter(None, [self.total])])

    @property
    def mix_of(self) -> dict[str, str]:
        """{blend: how its steps are mixed}; `batch` if any of its stages uses it."""
        if self.shape != "explicit":
            return dict.fromkeys(self.blends, self.mixes[0])
        found = [(b, mix) for row, mix in zip(self.amounts, self.mixes, strict=True) for b in row]
        return {b: min(mix for other, mix in found if other == b) for b, _ in found}

    def plan(self, step_tokens: int = 0, measures: Measures | None = None) -> Plan:
        """The plan in steps of `step_tokens`. Raises UserError if it needs `measures` of the blends
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
    """The plan of a recipe's `stages`; for `step_tokens` and `measures` see Outline.plan."""
    return parse_stages(values, tasks).plan(step_tokens, measures)


def parse_stages(values: Any, tasks: Sequence[str]) -> Outline:
    """A recipe's `stages`:

    {continual: [blend, ...], steps: B}   B steps of each blend, added one after another
    {joint: [blend, ...], steps: B}       B steps of each blend, all from the start
    {alternate: [blend, ...], steps: B}   the same, one blend per step, in a seeded order
    {sequential: [blend, ...], steps: B}  one blend after another
    [{blend: steps, ...}, ...]            explicit stages; in a mapping: {explicit: [...]}

    `steps` is a number, `20_000_000 tokens`, `300_000 sequences` (examples) or `3 epochs`, rounded
    up to whole steps; for all blends, or {blend: steps, ...}.
    sampler: how to split `steps`, which is then the total of all blends
        uniform | proportional            evenly, or by the tokens of each blend's epoch
        {temperature: T}                  by these tokens to the power 1/T
        {weights: {blend: w, ...}}        by these weights
        {mix_ratio: {blend: r, ...}, reference: blend, epochs: E}
                                          as in PaddlePALM, replaces `steps`: E * r * the steps of
                                          an epoch of the reference (by default the first blend)
    mix: batch | step                     a step has all blends, or one; also in an explicit stage
    always: task [+ task ...]             tasks added to every blend that lacks them
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
        raise UserError("stages: no blend has any steps; give at least one blend some")
    return outline


def _speller(tasks: Sequence[str], always: Any) -> Callable[[str], str]:
    """A function from a blend as written to its name: checked, normalised, with the tasks of
    `always`."""
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
            raise UserError(f"stages.{key}: explicit stages have their own steps; remove this")
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
        raise UserError(f"stages.{shape}: duplicate blend; list each once")
    one = shape == "alternate"
    mix = _mix(values.get("mix", "step" if one else "batch"), "stages.mix")
    if one and mix != "step":
        raise UserError("stages.mix: `alternate` is `joint` with `mix: step`; use joint")
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
            raise UserError("stages.steps: mix_ratio defines the steps; remove `steps`")
        return sampler, None
    if isinstance(values.get("steps"), Mapping):
        raise UserError("stages.steps: with a sampler, give one number: the total of all blends")
    return sampler, read_amount(values.get("steps"), "stages.steps")


def _budgets(value: Any, blends: Sequence[str], spell: Callable[[str], str]) -> dict[str, Amount]:
    """`steps` of every blend, in order."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(blends, read_amount(value, "stages.steps"))
    named = of_blends(value, blends, spell, "stages.steps")
    if missing := [blend for blend in blends if blend not in named]:
        raise UserError(f"stages.steps: missing for {missing[0]!r}; give every blend some")
    return {blend: read_amount(named[blend], f"stages.steps.{blend}") for blend in blends}
