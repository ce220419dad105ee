"""What the streams of rows have in common: which rows a step has follows from its stage alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from palm_ds.data.stream.stages import Curriculum, MaskRates, StepSize
from palm_ds.data.stream.task_group_dataset import PackedRow, TaskGroupDataset, micro_batches
from palm_ds.model.inputs.batch import Batch

Mixtures: TypeAlias = Mapping[str, Sequence[tuple[int, float]]]
"""{task group: its datasets, one per corpus, with their shares}."""
D = TypeVar("D", bound=TaskGroupDataset)


@dataclass
class RowStream(ABC, Generic[D]):
    """step -> this process's micro-batches."""

    curriculum: Curriculum
    datasets: Sequence[D]
    mixtures: Sequence[Mixtures]
    """Of each stage."""
    sizes: Sequence[StepSize]
    """Of the steps of each stage."""
    seed: int
    pad: int
    already_read: dict[str, int] = field(default_factory=dict)
    """{dataset: what was consumed before the first step, by the run that this one extends}"""
    mask_rates: MaskRates = MaskRates()

    @abstractmethod
    def step_rows(self, step: int) -> list[PackedRow]:
        """The rows of a step, in global order."""

    @abstractmethod
    def build(self, step: int, rows: Sequence[PackedRow], first_row: int = 0) -> Batch:
        """One micro-batch of some of a step's rows."""

    @property
    def rows(self) -> int:
        """Rows of the largest step, over all processes."""
        return max(size.rows for size in self.sizes)

    def rows_at(self, step: int) -> int:
        """Rows of a step, over all processes."""
        number = self.curriculum.stage_at(step)
        return self.sizes[number].rows_at(step - self.first_step(number))

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(size.length for size in self.sizes)

    def length_at(self, step: int) -> int:
        """Tokens of a row of a step."""
        return self.sizes[self.curriculum.stage_at(step)].length

    def batches(self, step: int, rank: int, world: int, micro_rows: int) -> list[Batch]:
        """The micro-batches of one process: its contiguous share of the step's rows."""
        rows, share = self.step_rows(step), self.rows_at(step) // world
        return micro_batches(rows, rank * share, share, micro_rows, partial(self.build, step))

    def steps_by_rows(self, number: int) -> dict[int, int]:
        """{rows of a step: number of such steps in a stage}"""
        return self.sizes[number].steps_by_rows(self.curriculum.stages[number].steps)

    @property
    def largest_stage(self) -> int:
        """The stage with the longest rows, or the most of them."""
        sizes = self.sizes
        return max(range(len(sizes)), key=lambda n: (sizes[n].length, sizes[n].rows))

    def first_step(self, stage: int) -> int:
        """The first step of a stage."""
        return self.curriculum.stages[stage].first
