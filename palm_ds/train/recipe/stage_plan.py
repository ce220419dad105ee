"""The stages of a recipe with what each has of its own: settings, sizes of steps, mask rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from palm_ds.data.stream.budgets import DatasetSizes
from palm_ds.data.stream.curriculum_spec import CurriculumSpec
from palm_ds.data.stream.stages import Curriculum, MaskRates, StepSize
from palm_ds.train.recipe.lr_schedule import LRSchedule
from palm_ds.train.recipe.sections import BatchSize
from palm_ds.train.recipe.stage_settings import StageSettings


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
