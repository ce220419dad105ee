"""Steps with a fixed number of examples, for fine-tuning: a pure function of (recipe, data, seed,
step), like the rows of palm_ds/data/stream/packed_stream.py.

    step ──> examples of each task group of the step ──pack──> as few rows as possible
         ──> split evenly, in order, over processes and micro-batches

A task group's n-th step takes its examples n * batch to (n + 1) * batch. With `mix: step` or
`turns` a step belongs to one task group. With `mix: batch` the examples of the whole stage, as many
per task group as its steps would have, are interleaved evenly and then cut into steps: every step
has the same number of examples, none is empty, and each task group stays within one example of its
share. Only `batches` depends on the processes.

The number of rows varies from step to step. `most_rows` finds the maximum, so that every step has
the same number of micro-batches; some have fewer rows than others, or a single empty row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from palm_ds.data.stream.packing import pack
from palm_ds.data.stream.stages import (
    Curriculum,
    MaskRates,
    PrefixCounts,
    order_of,
    spread_counts,
)
from palm_ds.data.stream.task_group_dataset import (
    PackedRow,
    TaskGroupDataset,
    build_rows,
    extend_into_padding,
    refs,
)
from palm_ds.model.inputs.batch import Batch

_SAMPLED_STEPS = 2000  # steps of a stage that are packed to find the largest
_ROUND = 8  # rows are cut to a multiple of this length


@dataclass
class ExampleStream:
    """step -> this process's micro-batches. The same interface as PackedStream.

    `examples[task_group]` is the number of examples per step of the task group; `rows` is the
    capacity of a step: a whole number of micro-batches for every process
    (`DSConfig.round_up_rows`)."""

    curriculum: Curriculum
    datasets: Sequence[TaskGroupDataset]
    mixtures: Mapping[str, Sequence[tuple[int, float]]]
    examples: Mapping[str, int]
    length: int
    seed: int
    pad: int
    rows: int = 0
    already_read: dict[str, int] = field(default_factory=dict)
    """{dataset: examples} consumed before the first step, by the run that this one extends."""
    mask_rates: MaskRates = MaskRates()

    def rows_at(self, step: int) -> int:
        """The capacity of a step in rows: of each the same."""
        return self.rows

    @property
    def longest(self) -> int:
        """The most tokens of a row."""
        return self.length

    def length_at(self, step: int) -> int:
        """The most tokens of a row of a step: of each the same."""
        return self.length

    def largest_step(self) -> tuple[list[Batch], int]:
        """A step in one batch, and the rows it may have; all have as many examples."""
        return self.known.batches(0, 0, 1, self.rows), self.rows

    @cached_property
    def known(self) -> ExampleStream:
        """The same steps over what is known of readers without an end before they are read, again
        and again; itself without such readers."""
        samples = [dataset.sample for dataset in self.datasets]
        same = all(a is b for a, b in zip(samples, self.datasets, strict=True))
        return self if same else replace(self, datasets=samples)

    def sampled_steps(self, number: int) -> Iterator[tuple[Batch, int]]:
        """A step of a stage in one batch, and how many of its steps are like it: all, or those of
        each task group where a step belongs to one."""
        stage = self.curriculum.stages[number]
        places, counts = [0], [stage.steps]
        if stage.one_by_one:
            order = order_of(stage, number, self.seed)
            places = [int((order == i).argmax()) for i in range(len(stage.steps_of))]
            counts = [steps for _, steps in stage.steps_of]
        for place, steps in zip(places, counts, strict=True):
            step = stage.first + place
            yield self.known.build(step, self.known.step_rows(step)), steps

    # -- which examples --

    def taken(self, step: int) -> dict[str, tuple[int, int]]:
        """{group: its examples [first, last)} of a step, counted over the run."""
        number = self.curriculum.stage_at(step)
        stage, before = self.curriculum.stages[number], self._before[number]
        first = self._within(number, step - stage.first)
        last = self._within(number, step - stage.first + 1)
        return {
            task_group: (
                before.get(task_group, 0) + first[task_group],
                before.get(task_group, 0) + last[task_group],
            )
            for task_group, _ in stage.steps_of
            if last[task_group] > first[task_group]
        }

    @cached_property
    def _before(self) -> list[dict[str, int]]:
        """Per stage, the examples of each task group in all earlier ones."""
        before: list[dict[str, int]] = [{}]
        for stage in self.curriculum.stages[:-1]:
            own = {name: steps * self.examples[name] for name, steps in stage.steps_of}
            before.append(before[-1] | {name: before[-1].get(name, 0) + own[name] for name in own})
        return before

    def _within(self, number: int, steps: int) -> dict[str, int]:
        """Examples of each task group in the first `steps` steps of a stage."""
        stage = self.curriculum.stages[number]
        each = [self.examples[task_group] for task_group, _ in stage.steps_of]
        if stage.one_by_one:
            counts = self._step_counts[number](steps) * each
        else:
            examples = [n * own for (_, n), own in zip(stage.steps_of, each, strict=True)]
            counts = spread_counts(examples, sum(examples) * steps // stage.steps)
        names = [task_group for task_group, _ in stage.steps_of]
        return dict(zip(names, counts.tolist(), strict=True))

    @cached_property
    def _step_counts(self) -> dict[int, PrefixCounts]:
        """Of each stage whose steps belong to one task group: how many belong to which."""
        return {
            number: PrefixCounts(order_of(stage, number, self.seed), len(stage.steps_of))
            for number, stage in enumerate(self.curriculum.stages)
            if stage.one_by_one
        }

    def _of_feeds(self, task_group: str, examples: int) -> dict[int, int]:
        """The first `examples` of a task group as {dataset: examples}, in proportion to its
        sources."""
        shares = [Fraction(share) for _, share in self.mixtures[task_group]]
        upto = list(accumulate(shares, initial=Fraction(0)))
        cut = [int(examples * part / upto[-1]) for part in upto]
        return {
            dataset: cut[i + 1] - cut[i] for i, (dataset, _) in enumerate(self.mixtures[task_group])
        }

    # -- rows --

    def step_rows(self, step: int) -> list[PackedRow]:
        """The rows of a step, in global order: its examples, packed into as few as possible."""
        entries = []
        for task_group, (first, last) in self.taken(step).items():
            start, stop = self._of_feeds(task_group, first), self._of_feeds(task_group, last)
            for number in start:
                dataset = self.datasets[number]
                n = self.already_read.get(dataset.name, 0) + np.arange(start[number], stop[number])
                entries += refs(number, n, dataset.layouts(n))
        packed = pack(np.array([ref.length for ref in entries], np.int64), self.length)
        return [extend_into_padding([entries[i] for i in row], self.length) for row in packed]

    def most_rows(self) -> int:
        """The rows of the largest step; of a long stage, only the first steps are packed."""
        return max(
            len(self.known.step_rows(step))
            for stage in self.curriculum.stages
            for step in range(stage.first, stage.first + min(stage.steps, _SAMPLED_STEPS))
        )

    def batches(self, step: int, rank: int, world: int, micro_rows: int) -> list[Batch]:
        """The micro-batches of one process. All processes get the same number of them, and their
        sizes differ by at most one row. A step larger than any that was sampled gets slightly
        larger micro-batches."""
        slots = self.rows // micro_rows
        rows = self.step_rows(step)
        cuts = [len(rows) * i // slots for i in range(slots + 1)]
        own = range(rank * slots // world, (rank + 1) * slots // world)
        return [self.build(step, rows[cuts[i] : cuts[i + 1]] or [[]], cuts[i]) for i in own]

    def build(self, step: int, rows: Sequence[PackedRow], first_row: int = 0) -> Batch:
        """One micro-batch of some of a step's rows, as long as its fullest row."""
        used = max((sum(ref.length for ref in row) for row in rows), default=0)
        length = min(-(-max(used, 1) // _ROUND) * _ROUND, self.length)
        built = build_rows(self.datasets, rows, length, self.pad, self.mask_rates.at(step))
        return replace(built, first_row=first_row)

    # -- position --

    def state_dict(self, step: int) -> dict[str, Any]:
        """Empty: the step number is enough."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing: any step can be read directly."""

    def consumed(self, step: int | None = None) -> dict[str, int]:
        """{dataset: examples} consumed by the first `step` steps (by default all)."""
        step = self.curriculum.steps if step is None else step
        total = {dataset.name: self.already_read.get(dataset.name, 0) for dataset in self.datasets}
        for task_group in self.curriculum.task_groups:
            for dataset, count in self._of_feeds(task_group, self._upto(task_group, step)).items():
                total[self.datasets[dataset].name] += count
        return total

    def _upto(self, task_group: str, step: int) -> int:
        """Examples of a task group in the first `step` steps of the run."""
        done = 0
        for number, stage in enumerate(self.curriculum.stages):
            if task_group in dict(stage.steps_of) and step > stage.first:
                done += self._within(number, min(step - stage.first, stage.steps))[task_group]
        return done
