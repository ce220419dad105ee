"""Reads a recipe's `stages`: which task groups, in which stages, with which budgets.

stages of a recipe ──parse_stages──> CurriculumSpec (budgets in any unit)
                   ──resolve──> Curriculum (steps)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, get_args

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.messages import counted
from palm_ds.data.stream.budgets import (
    Budget,
    DatasetSizes,
    MixRatio,
    Sampler,
    SizeSampler,
    of_task_groups,
    read_budget,
    read_sampler,
    sampled,
    share_out,
)
from palm_ds.data.stream.stages import (
    CURRICULUM_KINDS,
    STAGE_SETTINGS,
    Curriculum,
    Mix,
    Stage,
    StepSize,
    tasks_of,
)

_MAX_STEPS = 10**9  # a byte of memory for each where a step belongs to one task group
_KEYS = (*CURRICULUM_KINDS, "explicit", "steps", "sampler", "mix", "always", "settings")


@dataclass(frozen=True)
class CurriculumSpec:
    """A recipe's `stages`, checked as far as possible without a corpus."""

    kind: str
    """A key of SHAPES, or `explicit`."""
    task_groups: tuple[str, ...]
    """In order of first appearance; each has a budget."""
    budgets: tuple[Mapping[str, Budget], ...]
    """Explicit: one per stage; else one with the budget of each task group (empty with a
    sampler)."""
    mixes: tuple[Mix, ...]
    """Explicit: one per stage; else one for all."""
    sampler: Sampler | None = None
    total: Budget | None = None
    """The total that the sampler distributes."""
    settings: tuple[Mapping[str, Any], ...] = ()
    """{one of STAGE_SETTINGS: value} of each stage; empty if none has any."""

    @property
    def resolved(self) -> bool:
        """Whether every amount is in steps."""
        return self.sampler is None and {a.unit for row in self.budgets for a in row.values()} <= {
            "steps"
        }

    @cached_property
    def leaders(self) -> dict[str, str]:
        """{task: the first task of its group}, whose row of the task embedding the texts of the
        group have: itself if it leads any group, else of the last group that has it."""
        groups = [tasks_of(task_group) for task_group in self.task_groups]
        leaders = {task: group[0] for group in groups for task in group}
        return leaders | {group[0]: group[0] for group in groups}

    @property
    def needs_corpus(self) -> bool:
        """Whether the steps depend on the number or the length of examples."""
        budgets = [budget for row in self.budgets for budget in row.values()]
        units = {a.unit for a in [*budgets, *filter(None, [self.total])]}
        by_example = not units <= {"steps", "tokens"}
        return by_example or isinstance(self.sampler, (SizeSampler, MixRatio))

    @property
    def counts_tokens(self) -> bool:
        """Whether some amount is in tokens."""
        budgets = [budget for row in self.budgets for budget in row.values()]
        return any(a.unit == "tokens" for a in [*budgets, *filter(None, [self.total])])

    @property
    def mix_of(self) -> dict[str, str]:
        """{group: how its steps are mixed}; `batch` if any of its stages uses it."""
        if self.kind != "explicit":
            return dict.fromkeys(self.task_groups, self.mixes[0])
        mixes = [(b, mix) for row, mix in zip(self.budgets, self.mixes, strict=True) for b in row]
        return {b: min(mix for other, mix in mixes if other == b) for b, _ in mixes}

    @property
    def listed(self) -> tuple[str, ...]:
        """The task groups of a shape as written, also those without steps."""
        return tuple(self.budgets[0]) if self.budgets else self.task_groups

    def groups_of(self, stage: int) -> tuple[str, ...]:
        """The task groups of a stage (0-based) as written."""
        if self.kind == "explicit":
            return tuple(self.budgets[stage])
        if self.kind == "sequential":
            return self.listed[stage : stage + 1]
        return self.listed[: stage + 1] if self.kind == "continual" else self.task_groups

    def resolve(
        self,
        step_tokens: int = 0,
        sizes: DatasetSizes | None = None,
        step_sizes: Mapping[int, StepSize] = MappingProxyType({}),
        sizes_in: Mapping[int, DatasetSizes] = MappingProxyType({}),
    ) -> Curriculum:
        """The plan in steps of `step_tokens`; `step_sizes`: of the stages with steps of their own.
        Raises UserError if it needs `sizes` of the task groups (`needs_corpus`) and there are
        none; `sizes_in`: those in the stages where they are others."""
        if step_sizes and self.kind != "explicit" and not self.resolved:
            raise UserError(
                f"stages.settings: with a length or batch of a stage's own, {self.kind} counts in "
                "steps; give `steps` in steps, or list the stages"
            )
        if self.sampler is not None:
            rows = [sampled(self.sampler, self.total, step_tokens, sizes)]
        else:
            rows = [
                _grown_steps(
                    row, step_sizes[number], sizes_in.get(number, sizes), f"stages.{number}"
                )
                if number in step_sizes and self.kind == "explicit"
                else self._steps(row, step_tokens, sizes_in.get(number, sizes))
                for number, row in enumerate(self.budgets)
            ]
        if self.kind != "explicit":
            rows = CURRICULUM_KINDS[self.kind](rows[0])
        mixes = self.mixes if self.kind == "explicit" else self.mixes * len(rows)
        stages, first = [], 0
        settings = self.settings or ({},) * len(rows)
        for row, mix, own in zip(rows, mixes, settings, strict=True):
            kept = tuple((task_group, steps) for task_group, steps in row.items() if steps)
            stages.append(Stage(steps_of=kept, mix=mix, first=first, settings=dict(own)))
            first += stages[-1].steps
        if first > _MAX_STEPS:
            raise UserError(f"stages: {first:,} steps in all; at most {_MAX_STEPS:,}")
        return Curriculum(tuple(stage for stage in stages if stage.steps))

    def _steps(
        self, row: Mapping[str, Budget], step_tokens: int, sizes: DatasetSizes | None
    ) -> dict[str, int]:
        return {
            task_group: budget.steps(
                step_tokens, sizes.get(task_group) if sizes else None, f"stages: {task_group}"
            )
            for task_group, budget in row.items()
        }


def _grown_steps(
    row: Mapping[str, Budget], own: StepSize, sizes: DatasetSizes | None, where: str
) -> dict[str, int]:
    """The steps of task groups in a stage with steps of its own size, which may grow: its tokens
    are those of all of them."""
    row = {task_group: budget for task_group, budget in row.items() if budget.number}
    if all(budget.unit == "steps" for budget in row.values()):
        return {task_group: int(budget.number) for task_group, budget in row.items()}
    if any(budget.unit == "steps" for budget in row.values()):
        raise UserError(
            f"{where}: has a batch of its own, so all its amounts must be in steps, or none"
        )
    tokens = {
        task_group: budget.tokens(sizes[task_group] if sizes else None, f"{where}: {task_group}")
        for task_group, budget in row.items()
    }
    steps = share_out(own.steps_of(sum(tokens.values())), tokens)
    for task_group, count in steps.items():
        if not count:
            raise UserError(
                f"{where}: {task_group}: {row[task_group]} are less than one of its steps, "
                f"{own.tokens:,} tokens; raise it, or leave the group out"
            )
    return steps


def read_stages(
    values: object, tasks: Sequence[str], *, step_tokens: int = 0, sizes: DatasetSizes | None = None
) -> Curriculum:
    """The plan of a recipe's `stages`; for `step_tokens` and `sizes` see CurriculumSpec.resolve."""
    return parse_stages(values, tasks).resolve(step_tokens, sizes)


def parse_stages(values: object, tasks: Sequence[str]) -> CurriculumSpec:
    """A recipe's `stages`:

    {continual: [group, ...], steps: B}   B steps of each task group, added one after another
    {joint: [group, ...], steps: B}       B steps of each task group, all from the start
    {alternate: [group, ...], steps: B}   the same, one task group per step, in a seeded order
    {sequential: [group, ...], steps: B}  one task group after another
    [{group: steps, ...}, ...]            explicit stages; in a mapping: {explicit: [...]}

    `steps` is a number, `20_000_000 tokens`, `300_000 sequences` (examples) or `3 epochs`, rounded
    up to whole steps; for all task groups, or {group: steps, ...}.
    sampler: how to split `steps`, which is then the total of all task groups
        uniform | proportional            evenly, or by the steps of each task group's epoch
        {temperature: T}                  by these steps to the power 1/T
        {weights: {group: w, ...}}        by these weights
        {mix_ratio: {group: r, ...}, reference: group, epochs: E}
                                          as in PaddlePALM, replaces `steps`: E * r * the steps of
                                          an epoch of the reference (default: the first)
    mix: batch | step | turns             a step has all task groups, or one: in a seeded order, or
                                          in turns, as written; also per stage
    always: task [+ task ...]             tasks added to every task group that lacks them
    settings: [{lr: 1.0e-4, ...}, ...]    settings of each stage that replace the recipe's: the
                                          keys of `stages.N`; an explicit stage has them beside
                                          its task groups
    """
    if isinstance(values, list):
        values = {"explicit": values}
    if not isinstance(values, Mapping):
        raise UserError(
            f"stages: expected a list of stages or one of {', '.join(CURRICULUM_KINDS)}, "
            f"got {values!r}"
        )
    for name, budget in values.items():
        if name not in _KEYS:
            listed = f"; a stage is an element of a list: stages: [{{{name}: {budget}}}]"
            known = listed if name in tasks else suggest(str(name), _KEYS)
            raise UserError(f"stages.{name}: unknown key{known}")
    kinds = [kind for kind in (*CURRICULUM_KINDS, "explicit") if kind in values]
    if len(kinds) != 1:
        raise UserError(
            f"stages: name exactly one of {', '.join(CURRICULUM_KINDS)}, or list the stages"
        )
    normalize = _normalizer(tasks, values.get("always"))
    if kinds == ["explicit"]:
        settings = [key for key in STAGE_SETTINGS if key not in tasks]  # a task may be called so
        spec = _explicit(values, kinds[0], normalize, settings)
    else:
        spec = _shaped(values, kinds[0], normalize)
    if "settings" in values:
        spec = replace(spec, settings=_settings(values["settings"], spec))
    if not spec.task_groups or (spec.total and not spec.total.number):
        raise UserError("stages: no task group has any steps; give at least one task group some")
    return spec


def _normalizer(tasks: Sequence[str], always: object) -> Callable[[str], str]:
    """A function from a task group as written to its name: checked, normalized, with the tasks of
    `always`."""
    added = tasks_of(str(always)) if always is not None else ()
    for name in added:
        if name not in tasks:
            raise UserError(f"stages.always: no task {name!r} in `tasks`{suggest(name, tasks)}")

    def normalize(task_group: str) -> str:
        names = tasks_of(str(task_group))
        for name in names:
            if name not in tasks:
                raise UserError(f"stages: no task {name!r} in `tasks`{suggest(name, tasks)}")
        if len(set(names)) < len(names):
            raise UserError(f"stages: {task_group!r} names a task twice")
        return " + ".join([*names, *(name for name in added if name not in names)])

    return normalize


def _mix(value: object, where: str) -> Mix:
    for mix in get_args(Mix):
        if value == mix:
            return mix
    raise UserError(f"{where}: expected one of {', '.join(get_args(Mix))}, got {value!r}")


def _explicit(
    values: Mapping[str, Any],
    kind: str,
    normalize: Callable[[str], str],
    setting_names: Sequence[str],
) -> CurriculumSpec:
    listed = values[kind]
    for key in ("steps", "sampler"):
        if key in values:
            raise UserError(f"stages.{key}: explicit stages have their own steps; remove this")
    if not isinstance(listed, list):
        raise UserError(f"stages.{kind}: expected a list of stages, got {listed!r}")
    rows, mixes, settings = [], [], []
    for number, stage in enumerate(listed):
        where = f"stages.{number}"
        if not isinstance(stage, Mapping):
            raise UserError(f"{where}: expected `task group: steps`, got {stage!r}")
        mixes.append(_mix(stage.get("mix", values.get("mix", "batch")), f"{where}.mix"))
        own = {key: value for key, value in stage.items() if key in setting_names}
        settings.append(own)
        written = {
            task_group: budget
            for task_group, budget in stage.items()
            if task_group != "mix" and task_group not in own
        }
        named = of_task_groups(
            written, [normalize(task_group) for task_group in written], normalize, where
        )
        rows.append({b: read_budget(budget, f"{where}.{b}") for b, budget in named.items()})
    spec = CurriculumSpec(kind, _with_steps(rows), tuple(rows), tuple(mixes))
    return replace(spec, settings=tuple(settings)) if any(settings) else spec


def _settings(values: object, spec: CurriculumSpec) -> tuple[Mapping[str, Any], ...]:
    """The settings of the stages of a shape."""
    where, stages = "stages.settings", len(spec.listed)
    if spec.kind == "explicit":
        raise UserError(f"{where}: explicit stages have them beside their task groups")
    if spec.kind not in ("continual", "sequential"):
        stages = 1
    if not isinstance(values, list) or len(values) != stages:
        shown = len(values) if isinstance(values, list) else repr(values)
        wanted = counted(stages, "mapping")
        raise UserError(f"{where}: expected a list of {wanted}, one for each stage, got {shown}")
    for number, own in enumerate(values):
        for key in own if isinstance(own, Mapping) else [own]:
            if key not in STAGE_SETTINGS:
                near = suggest(str(key), STAGE_SETTINGS)
                raise UserError(f"{where}.{number}: no setting {key!r} of a stage{near}")
    return tuple(values)


def _with_steps(rows: Sequence[Mapping[str, Budget]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(b for row in rows for b, budget in row.items() if budget.number))


def _shaped(
    values: Mapping[str, Any], kind: str, normalize: Callable[[str], str]
) -> CurriculumSpec:
    written = values[kind]
    if not isinstance(written, list) or not all(isinstance(b, str) for b in written) or not written:
        raise UserError(f"stages.{kind}: expected a list of task groups, got {written!r}")
    task_groups = [normalize(task_group) for task_group in written]
    if len(set(task_groups)) < len(task_groups):
        raise UserError(f"stages.{kind}: duplicate task group; list each once")
    one = kind == "alternate"
    mix = _mix(values.get("mix", "step" if one else "batch"), "stages.mix")
    if one and mix != "step":
        raise UserError("stages.mix: `alternate` is `joint` with `mix: step`; use joint")
    if "sampler" in values:
        sampler, total = _sampler(values, task_groups, normalize)
        return CurriculumSpec(kind, tuple(task_groups), (), (mix,), sampler, total)
    budgets = _budgets(values.get("steps"), task_groups, normalize)
    return CurriculumSpec(kind, _with_steps([budgets]), (budgets,), (mix,))


def _sampler(
    values: Mapping[str, Any], task_groups: Sequence[str], normalize: Callable[[str], str]
) -> tuple[Sampler, Budget | None]:
    sampler = read_sampler(values["sampler"], task_groups, normalize)
    if isinstance(sampler, MixRatio):
        if "steps" in values:
            raise UserError("stages.steps: mix_ratio defines the steps; remove `steps`")
        return sampler, None
    if isinstance(values.get("steps"), Mapping):
        raise UserError(
            "stages.steps: with a sampler, give one number: the total of all task groups"
        )
    return sampler, read_budget(values.get("steps"), "stages.steps")


def _budgets(
    value: object, task_groups: Sequence[str], normalize: Callable[[str], str]
) -> dict[str, Budget]:
    """`steps` of every task group, in order."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(task_groups, read_budget(value, "stages.steps"))
    named = of_task_groups(value, task_groups, normalize, "stages.steps")
    if missing := [task_group for task_group in task_groups if task_group not in named]:
        raise UserError(f"stages.steps: missing for {missing[0]!r}; give every task group some")
    return {
        task_group: read_budget(named[task_group], f"stages.steps.{task_group}")
        for task_group in task_groups
    }
