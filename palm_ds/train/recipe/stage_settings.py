"""The stages of a recipe with what each has of its own: phases, as in ModernBERT, Ettin and mmBERT.

    stages:
      - {knowledge_masking: 9000, rate: 0.3, length: 128, rope_base: 1.0e+4}
      - {knowledge_masking: 1000, rate: [0.3, 0.15], lr: 1.0e-4, schedule: {kind: cosine}}

Weights and moments continue from stage to stage. What a stage does not say is the recipe's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted
from palm_ds.common.settings import Settings
from palm_ds.data.stream.budgets import DatasetSizes
from palm_ds.data.stream.curriculum_spec import CurriculumSpec
from palm_ds.data.stream.stages import Curriculum, MaskRates, StepInfo, StepSize, tasks_of
from palm_ds.data.tasks.task import Task
from palm_ds.runtime.optimizer.param_groups import AllBut, Selection
from palm_ds.runtime.optimizer.step_settings import TaskOptimizerSettings
from palm_ds.train.recipe.lr_schedule import LRSchedule
from palm_ds.train.recipe.sections import BatchSize

_OF_ROWS = ("length", "batch", "mixture", "sampling_exponent")
"""Settings of stages whose steps are rows."""


@dataclass(frozen=True, kw_only=True)
class BatchGrowth:
    """A batch that grows by `start` rows at a time, as in ModernBERT; each size has the same number
    of steps."""

    start: str
    """The first size: `16 rows`, or `2048 tokens`."""
    end: str
    """The last size, a multiple of `start`."""
    over: str
    """The tokens after which the batch has reached its last size: `1_000_000 tokens`."""

    def step_size(self, length: int) -> StepSize:
        """With rows of this length. Raises UserError."""
        start, end = (_rows(text, length) for text in (self.start, self.end))
        if end <= start or end % start:
            raise UserError(
                f"batch.end: expected a larger multiple of `start`, {counted(start, 'row')}, got "
                f"{counted(end, 'row')}"
            )
        if not re.fullmatch(r"[1-9][\d_]* tokens", self.over):
            raise UserError(
                f"batch.over: expected tokens, such as `1_000_000 tokens`, got {self.over!r}"
            )
        sizes = range(start, end, start)
        tokens = int(self.over.split()[0].replace("_", ""))
        rows_each = max(round(tokens / (length * sum(sizes))), 1)
        return StepSize(length, end, tuple(sizes), rows_each)


def _rows(text: str, length: int) -> int:
    size = BatchSize.parse(text, length)
    if size.unit == "examples":
        raise UserError(f"batch: {text!r}: a stage's own batch is in tokens or rows")
    return size.number


@dataclass(frozen=True, kw_only=True)
class StageSettings(Settings):
    """Settings of one stage that replace the recipe's."""

    length: Annotated[int, Field(ge=8)] | None = None
    """Tokens per row. Held-out rows have the recipe's length."""
    batch: str | BatchGrowth | None = None
    """Size of a step: `64 rows`, `16384 tokens`; or a batch that grows from `start` to `end` over
    the first tokens of the stage: `{start: 16 rows, end: 64 rows, over: 1_000_000 tokens}`."""
    mixture: dict[str, dict[str, NonNegativeFloat]] | None = None
    """{source: {corpus: weight}}, instead of the weights of the source's `mix`; a corpus that is
    left out is not read."""
    sampling_exponent: NonNegativeFloat | None = None
    """Instead of the `sampling_exponent` of sources with a `mix`."""
    rope_base: Annotated[float, Field(gt=1)] | None = None
    """RoPE base of layers with global attention. That of the last stage must be the backbone's."""
    local_rope_base: Annotated[float, Field(gt=1)] | None = None
    """RoPE base of layers with sliding-window attention (mmBERT changes both)."""
    lr: PositiveFloat | None = None
    """Instead of `optimizer.lr`; other rates that follow it (`head_lr`, `layer_decay`) keep their
    ratio to it."""
    schedule: LRSchedule | None = None
    """A learning-rate schedule of this stage alone, from its first to its last step."""
    weight_decay: NonNegativeFloat | None = None
    """Instead of `optimizer.weight_decay`."""
    rate: float | list[float] | None = None
    """Share of the tokens that masking tasks predict: a number, or [from, to] for a linear change
    over the stage."""
    freeze: tuple[str, ...] = ()
    """Parameters that this stage does not update, as patterns: `["backbone.word.*"]`."""
    trains: tuple[str, ...] = ()
    """The only parameters that this stage updates, as patterns. Empty: all."""
    evaluate_every: NonNegativeInt | None = None
    """Instead of `evaluate.every`: evaluate after each step of the run that is a multiple of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule and self.schedule.restart == "stage":
            raise UserError("schedule.restart: a stage's own schedule starts with it; remove this")
        rates = self.rates or (0.5,)
        if len(rates) > 2 or not all(0 < rate < 1 for rate in rates):
            raise UserError(
                f"rate: expected a share between 0 and 1, or [from, to], got {self.rate}"
            )

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str, *, length: int, batch: str) -> Self:
        """From a recipe's `stages`, with amounts in steps; `where` is the key, `length` and `batch`
        are the recipe's. Raises UserError."""
        try:
            own = parse(cls, values, "")
            size = own.step_size(length, batch)
            return replace(own, schedule=own.schedule and own.schedule.in_steps(size))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    def step_size(self, length: int, batch: str) -> StepSize | None:
        """The size of the stage's steps, given the recipe's; None: `batch` is in examples."""
        if BatchSize.parse(batch, length).unit == "examples":
            for name in _OF_ROWS:
                if getattr(self, name) is not None:
                    raise UserError(
                        f"{name}: needs the recipe's `batch` in rows or tokens, not in examples"
                    )
            return None
        length = self.length or length
        if isinstance(self.batch, BatchGrowth):
            return self.batch.step_size(length)
        return StepSize(length, _rows(self.batch or batch, length))

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates at the beginning and the end; empty if the stage has none."""
        if self.rate is None:
            return ()
        return tuple(self.rate) if isinstance(self.rate, list) else (self.rate,)

    @cached_property
    def _restarted(self) -> LRSchedule | None:
        """The stage's own schedule, over its steps."""
        return self.schedule and replace(self.schedule, restart="stage")

    def schedule_scale(self, at: StepInfo, *, schedule: LRSchedule, steps: int) -> float:
        """The multiplier of the peak learning rate at a step of a run of `steps`; `schedule`: the
        recipe's."""
        return (self._restarted or schedule).scale(at, steps)


@dataclass(frozen=True)
class StepSettings:
    """Settings of the optimizer in single steps: those of the stage, and those of the tasks where a
    step trains one task group."""

    stages: Sequence[StageSettings]
    tasks: Mapping[str, Task]

    def optimizer(self, at: StepInfo) -> TaskOptimizerSettings:
        """Those of the first task of a step that trains one task group; else none."""
        alone = self._alone(at)
        return alone[0].optimizer if alone else TaskOptimizerSettings()

    def frozen(self, at: StepInfo) -> tuple[Selection, ...]:
        """Parameters that the stage of a step freezes, and its tasks, if it trains one task
        group."""
        parts = (self.stages[at.stage], *self._alone(at))
        return tuple(dict.fromkeys(each for part in parts for each in _frozen_by(part)))

    @property
    def freezable(self) -> list[Selection]:
        """Parameters that some steps freeze."""
        parts = (*self.stages, *self.tasks.values())
        return [each for part in parts for each in _frozen_by(part)]

    def _alone(self, at: StepInfo) -> list[Task]:
        """The tasks of a step that trains one task group; else none."""
        names = tasks_of(at.task_groups[0]) if len(at.task_groups) == 1 else ()
        return [self.tasks[name] for name in names]


def _frozen_by(part: StageSettings | Task) -> tuple[Selection, ...]:
    """Parameters that a stage or a task does not update."""
    others = (AllBut(tuple(part.trains)),) if part.trains else ()
    return (*part.freeze, *others)


@dataclass(frozen=True)
class StagePlan:
    """The stages of a recipe, given its `length` and `batch`."""

    spec: CurriculumSpec
    length: int
    batch: str

    @cached_property
    def usual_size(self) -> StepSize:
        """Steps of stages without a size of their own; without rows if `batch` is in examples."""
        size = BatchSize.parse(self.batch, self.length)
        return StepSize(self.length, size.number if size.unit == "rows" else 0)

    @cached_property
    def written(self) -> tuple[StageSettings, ...]:
        """The settings of the stages as written; empty if none has any. Raises UserError."""
        return self._read(self.spec.settings)

    @cached_property
    def own_sizes(self) -> dict[int, StepSize]:
        """{number of a stage as written: the size of its steps}, if it is its own."""
        sizes = {n: own.step_size(self.length, self.batch) for n, own in enumerate(self.written)}
        return {n: size for n, size in sizes.items() if size and size != self.usual_size}

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row, held-out ones included."""
        return max(self.length, *(size.length for size in self.own_sizes.values()), 0)

    def resolve(
        self,
        sizes: DatasetSizes | None = None,
        sizes_in: Mapping[int, DatasetSizes] = MappingProxyType({}),
    ) -> Curriculum:
        """The stages in steps, given the sizes of task groups if that needs them; `sizes_in`: those
        in the stages where they are others."""
        return self.spec.resolve(self.usual_size.tokens or 1, sizes, self.own_sizes, sizes_in)

    @cached_property
    def curriculum(self) -> Curriculum:
        """The stages in steps. Raises UserError if that needs the data (train/setup/resolve.py)."""
        return self.resolve()

    @cached_property
    def settings(self) -> tuple[StageSettings, ...]:
        """What each stage of the curriculum has instead of the recipe's settings."""
        return self._read([stage.settings for stage in self.curriculum.stages])

    @property
    def schedules(self) -> list[LRSchedule | None]:
        """The schedules that stages have of their own; None: the recipe's."""
        return [own.schedule for own in self.settings]

    @cached_property
    def sizes(self) -> tuple[StepSize, ...]:
        """The size of the steps of each stage; without rows if `batch` is in examples."""
        sizes = [own.step_size(self.length, self.batch) for own in self.settings]
        return tuple(size or self.usual_size for size in sizes)

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of each stage, over all processes; 0 if `batch` is in examples."""
        pairs = zip(self.curriculum.stages, self.sizes, strict=True)
        return [size.rows_before(stage.steps) * size.length for stage, size in pairs]

    @cached_property
    def mask_rates(self) -> MaskRates:
        """The mask rate of every step."""
        return MaskRates.of(self.curriculum, [own.rates for own in self.settings])

    def evaluates_after(self, done: int, every: int) -> bool:
        """Whether the run evaluates after `done` steps (1 or more): at the end of a stage, or as
        often as its last step's stage says or else `evaluate.every`."""
        number = self.curriculum.stage_at(done - 1)
        stage, own = self.curriculum.stages[number], self.settings[number].evaluate_every
        every = every if own is None else own
        return done == stage.first + stage.steps or bool(every) and done % every == 0

    def rope_bases(self, done: int) -> tuple[float | None, float | None]:
        """The bases of rotary positions that the stage of the last of `done` steps has of its own,
        in layers that attend to whole texts and in local ones."""
        own = self.settings[self.curriculum.stage_at(max(done - 1, 0))]
        return own.rope_base, own.local_rope_base

    def _read(self, given: Sequence[Mapping[str, Any]]) -> tuple[StageSettings, ...]:
        of_recipe = {"length": self.length, "batch": self.batch}
        return tuple(
            StageSettings.read(values, f"stages.{number}", **of_recipe)
            for number, values in enumerate(given)
        )
