"""The packed rows a run trains on: a pure function of (recipe, corpus, seed, row number).

    dataset  one task group over one corpus: its n-th example, for any n
    mixture  the rows of a stage, window by window; each window packs a fixed number of examples
             of the mixture's datasets, in proportion, and shuffles the rows
    stream   step -> rows -> micro-batches of a process

A stage with `mix: batch` has one mixture, any other one mixture per task group. The
last window of a mixture takes exactly as many examples as its last rows hold, so that a stage
consumes a contiguous range of every dataset and the next stage continues where it stopped.

Rows do not depend on the processes; only `batches` slices them. The state in a checkpoint makes
seeking to step 1,000,000 as cheap as to step 0; without it the lengths of everything before are
packed again (some hundred thousand examples per second).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_generator
from palm_ds.data.stream.packing import pack
from palm_ds.data.stream.row_stream import RowStream
from palm_ds.data.stream.stages import Curriculum, MaskRates, StepSize, order_of
from palm_ds.data.stream.task_group_dataset import (
    ExampleRef,
    PackedRow,
    TaskGroupDataset,
    build_rows,
    extend_into_padding,
    refs,
)
from palm_ds.model.inputs.batch import Batch

WINDOW_ROWS = 512
"""Approximate rows of a window: enough that its last, partly filled row wastes little."""


@dataclass
class PackingWindow:
    """Packed rows, the number of the first one within its mixture, and the examples it consumed."""

    first: int
    rows: list[PackedRow]
    consumed: np.ndarray  # (datasets,)


@dataclass
class PackedMixture:
    """`total` rows of some datasets in proportion."""

    datasets: Sequence[TaskGroupDataset]
    dataset_indices: tuple[int, ...]  # the datasets used, as indices
    examples_per_window: np.ndarray  # (which,) examples per window
    consumed_first: np.ndarray  # (datasets,) examples consumed before the mixture
    total: int
    max_length: int
    key: int
    window_rows: int = WINDOW_ROWS
    first_rows: list[int] = field(default_factory=lambda: [0])
    """First row of each window packed so far, and of the next one."""
    first_window: int = 0
    """Number of the window of `first_rows[0]`; a restored state starts in the middle."""
    cached: dict[int, PackingWindow] = field(default_factory=dict)

    def row(self, number: int) -> PackedRow:
        """A row of the mixture, 0 <= number < total."""
        window = self.window(self._window_of(number))
        return window.rows[number - window.first]

    def _window_of(self, number: int) -> int:
        if number < self.first_rows[0]:
            self.first_rows, self.first_window = [0], 0
        while number >= self.first_rows[-1]:
            self.window(self.first_window + len(self.first_rows) - 1)
        return self.first_window + bisect.bisect_right(self.first_rows, number) - 1

    def window(self, number: int) -> PackingWindow:
        """A window, packed on first use; the previous one is kept too."""
        first = self.first_rows[number - self.first_window]
        if number not in self.cached:
            newest = list(self.cached.items())[-1:]
            self.cached = dict(newest) | {number: self._pack(number, first)}
        if number - self.first_window == len(self.first_rows) - 1:
            self.first_rows.append(first + len(self.cached[number].rows))
        return self.cached[number]

    def _pack(self, number: int, first: int) -> PackingWindow:
        entries, lengths, order = self._entries(number)
        left = self.total - first
        rows = pack(lengths, self.max_length)
        taken = len(entries)
        if len(rows) > left:
            # The mixture ends here: take as many examples as fit its last rows.
            taken = _most(lambda most: len(pack(lengths[:most], self.max_length)) <= left, taken)
            rows = pack(lengths[:taken], self.max_length)
            rows += [[] for _ in range(left - len(rows))]
        shuffled = keyed_generator(self.key, number).permutation(len(rows))
        return PackingWindow(
            first=first,
            rows=[
                extend_into_padding([entries[i] for i in rows[r]], self.max_length)
                for r in shuffled
            ],
            consumed=np.bincount(order[:taken], minlength=len(self.datasets)),
        )

    def _entries(self, number: int) -> tuple[list[ExampleRef], np.ndarray, np.ndarray]:
        """The examples of a window, the datasets evenly interleaved; their lengths and datasets."""
        start = np.floor(number * self.examples_per_window + 1e-9).astype(np.int64)
        count = np.floor((number + 1) * self.examples_per_window + 1e-9).astype(np.int64) - start
        entries: list[ExampleRef] = []
        lengths = []
        for dataset, skip, many in zip(self.dataset_indices, start, count, strict=True):
            n = self.consumed_first[dataset] + skip + np.arange(many)
            layouts = self.datasets[dataset].layouts(n)
            entries += refs(dataset, n, layouts)
            lengths.append(layouts["length"])
        place = np.concatenate([(np.arange(many) + 0.5) / max(many, 1) for many in count])
        order = np.argsort(place, kind="stable")
        return (
            [entries[i] for i in order],
            np.concatenate(lengths)[order],
            np.repeat(self.dataset_indices, count)[order],
        )

    def consumed_before(self, number: int) -> np.ndarray:
        """(datasets,) examples that the windows before this one consumed."""
        out = np.zeros(len(self.datasets), np.int64)
        out[list(self.dataset_indices)] = np.floor(number * self.examples_per_window + 1e-9).astype(
            np.int64
        )
        return out

    def consumed_to(self, row: int) -> np.ndarray:
        """(datasets,) examples of all windows that contain a row before this one."""
        if row >= self.total:
            return self.consumed()
        window = self._window_of(row)
        is_first = row == self.first_rows[window - self.first_window]
        return self.consumed_before(window if is_first else window + 1)

    def consumed(self) -> np.ndarray:
        """(datasets,) examples of the whole mixture."""
        if not self.total:
            return np.zeros(len(self.datasets), np.int64)
        last = self._window_of(self.total - 1)
        return self.consumed_before(last) + self.window(last).consumed


def _most(fits: Callable[[int], bool], upper: int) -> int:
    """The largest number from 0 to `upper` that fits."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass
class PackedStream(RowStream[TaskGroupDataset]):
    """step -> this process's micro-batches. `datasets`: of every length of rows that a stage has;
    `already_read` counts examples."""

    window_rows: int = WINDOW_ROWS
    _stages: dict[int, OpenStage] = field(default_factory=dict, repr=False)

    def step_rows(self, step: int) -> list[PackedRow]:
        """The rows of a step, in global order."""
        number = self.curriculum.stage_at(step)
        stage = self._stage(number)
        mixture, first = stage.place(step - self.first_step(number))
        return [stage.mixtures[mixture].row(first + i) for i in range(self.rows_at(step))]

    def build(self, step: int, rows: Sequence[PackedRow], first_row: int = 0) -> Batch:
        """One micro-batch of some of a step's rows."""
        rate = self.mask_rates.at(step)
        batch = build_rows(self.datasets, rows, self.length_at(step), self.pad, rate)
        return replace(batch, first_row=first_row)

    def largest_step(self) -> tuple[list[Batch], int]:
        """A step of the stage with the longest rows, or the most of them, in one batch, and its
        rows, as if the run began with that stage: nothing before it is packed."""
        number = self.largest_stage
        stage, size = self.curriculum.stages[number], self.sizes[number]
        rate = self.mask_rates.at(stage.first)
        alone = self._alone(number, stage.steps_of, rate, size.rows)
        return alone.batches(0, 0, 1, size.rows), size.rows

    def sampled_steps(self, number: int, rows: int) -> Iterator[tuple[Batch, int]]:
        """A step of a stage, of at most `rows` rows, and how many of its steps are like it: all, or
        those of each task group where a step belongs to one. As if the run began with that stage;
        no other rows are packed."""
        stage = self.curriculum.stages[number]
        rate = self.mask_rates.at(stage.first + stage.steps // 2)
        parts = [(x,) for x in stage.steps_of] if stage.one_by_one else [stage.steps_of]
        for part in parts:
            alone = self._alone(number, part, rate, min(rows, self.sizes[number].rows))
            yield alone.build(0, alone.step_rows(0)), sum(steps for _, steps in part)

    def _alone(
        self, number: int, steps_of: Sequence[tuple[str, int]], rate: float | None, rows: int
    ) -> PackedStream:
        """A run of nothing but these steps of a stage, with as many rows each."""
        stage = self.curriculum.stages[number]
        stage = replace(stage, first=0, steps_of=tuple(steps_of))
        return replace(
            self,
            curriculum=Curriculum((stage,)),
            mixtures=[self.mixtures[number]],
            sizes=[StepSize(self.sizes[number].length, rows)],
            mask_rates=MaskRates() if rate is None else MaskRates(((0, stage.steps, (rate,)),)),
            already_read={},
            _stages={},
        )

    def state_dict(self, step: int) -> dict[str, Any]:
        """The position of a step, as JSON; `seek` restores it without packing earlier rows."""
        if step >= self.curriculum.steps:
            return {}
        number = self.curriculum.stage_at(step)
        stage = self._stage(number)
        mixtures = []
        places = stage.places(step - self.first_step(number))
        for mixture, first in zip(stage.mixtures, places, strict=True):
            window = mixture._window_of(first) if first < mixture.total else None
            at = (
                None
                if window is None
                else [window, mixture.first_rows[window - mixture.first_window]]
            )
            mixtures.append(at)
        return {
            "stage": number,
            "already_read": stage.consumed_first.tolist(),
            "tracks": mixtures,
            "windowed": self._windowed(),
        }

    def _windowed(self) -> list[str]:
        """The datasets over large corpora, whose items are shuffled in windows."""
        return [dataset.name for dataset in self.datasets if dataset.windowed]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor of the same recipe and corpus. Raises UserError if it numbers the
        items in another order."""
        if not state:
            return
        if changed := set(state.get("windowed", ())) ^ set(self._windowed()):
            raise UserError(
                f"task group {min(changed)!r}: the run began with a version of palm_ds that "
                "shuffles large corpora differently, so it would read texts twice; continue it "
                "with that version, or begin a new run (init_from: its weights)"
            )
        stage = self._open(state["stage"], np.array(state["already_read"], np.int64))
        for mixture, at in zip(stage.mixtures, state["tracks"], strict=True):
            if at is not None:
                mixture.first_window, mixture.first_rows = at[0], [at[1]]
        self._stages[state["stage"]] = stage

    def consumed(self, step: int | None = None) -> dict[str, int]:
        """{dataset: examples} consumed by the first `step` steps (by default all). A started window
        counts as a whole, so that a run that continues from there sees no example twice."""
        step = self.curriculum.steps if step is None else step
        number = self.curriculum.stage_at(max(step - 1, 0))
        stage = self._stage(number)
        total = stage.consumed_first.copy()
        places = stage.places(step - self.first_step(number))
        for mixture, place in zip(stage.mixtures, places, strict=True):
            total += mixture.consumed_to(place)
        return {dataset.name: int(n) for dataset, n in zip(self.datasets, total, strict=True)}

    def _stage(self, number: int) -> OpenStage:
        if number not in self._stages:
            if number == 0:
                first = np.array(
                    [self.already_read.get(dataset.name, 0) for dataset in self.datasets], np.int64
                )
            else:
                before = self._stage(number - 1)
                first = before.consumed_first + before.consumed()
            self._stages[number] = self._open(number, first)
        return self._stages[number]

    def _open(self, number: int, consumed_first: np.ndarray) -> OpenStage:
        stage = self.curriculum.stages[number]
        groups, order = [stage.steps_of], None
        if stage.one_by_one:
            groups = [(task_group,) for task_group in stage.steps_of]
            order = order_of(stage, number, self.seed)
        size = self.sizes[number]
        if order is None:
            totals = [size.rows_before(stage.steps)]
        else:
            totals = [_rows_of(order, i, size) for i in range(len(groups))]
        mixtures = [
            self._mixture(number, f"{number}.{i}", group, total, consumed_first)
            for i, (group, total) in enumerate(zip(groups, totals, strict=True))
        ]
        return OpenStage(mixtures=mixtures, consumed_first=consumed_first, order=order, size=size)

    def _mixture(
        self,
        stage: int,
        name: str,
        group: Sequence[tuple[str, int]],
        total: int,
        consumed_first: np.ndarray,
    ) -> PackedMixture:
        """`total`: its rows."""
        steps, length = sum(n for _, n in group), self.sizes[stage].length
        tokens: dict[int, float] = {}
        for task_group, blend_steps in group:
            for dataset, share in self.mixtures[stage][task_group]:
                tokens[dataset] = tokens.get(dataset, 0.0) + share * blend_steps / steps
        window_tokens = self.window_rows * length
        rates = [
            share * window_tokens / float(self.datasets[f].mean_tokens)
            for f, share in tokens.items()
        ]
        return PackedMixture(
            datasets=self.datasets,
            dataset_indices=tuple(tokens),
            examples_per_window=np.array(rates),
            consumed_first=consumed_first,
            total=total,
            max_length=length,
            key=derive_key(self.seed, "rows", name),
            window_rows=self.window_rows,
        )


def _rows_of(order: np.ndarray, mixture: int, size: StepSize) -> int:
    """Rows of one mixture in a stage whose steps have this order."""
    if not size.growth:
        return int((order == mixture).sum()) * size.rows
    return sum(size.rows_at(int(step)) for step in np.flatnonzero(order == mixture))


@dataclass
class OpenStage:
    """The mixtures of a stage, and the mixture of each step."""

    mixtures: list[PackedMixture]
    consumed_first: np.ndarray  # (datasets,) examples consumed before the stage
    order: np.ndarray | None  # (steps,) the mixture of each step; None: there is only one
    size: StepSize

    @cached_property
    def _first_rows(self) -> np.ndarray:
        """(steps,) rows of the earlier steps of the stage with the same mixture."""
        assert self.order is not None
        rows = np.full(len(self.order), self.size.rows, np.int64)
        growing = len(self.size.growth) * self.size.steps_each
        rows[:growing] = np.repeat(self.size.growth, self.size.steps_each)[: len(rows)]
        first = np.empty_like(rows)
        for mixture in range(len(self.mixtures)):
            here = self.order == mixture
            first[here] = np.cumsum(rows[here]) - rows[here]
        return first

    def place(self, step: int) -> tuple[int, int]:
        """(mixture, first row within it) of a step of the stage."""
        if self.order is None:
            return 0, self.size.rows_before(step)
        return int(self.order[step]), int(self._first_rows[step])

    def places(self, step: int) -> list[int]:
        """The first unused row of every mixture at the start of a step."""
        if self.order is None:
            return [self.size.rows_before(step)]
        return [self._first_unused(mixture, step) for mixture in range(len(self.mixtures))]

    def _first_unused(self, mixture: int, step: int) -> int:
        assert self.order is not None
        earlier = np.flatnonzero(self.order[:step] == mixture)
        if not len(earlier):
            return 0
        last = int(earlier[-1])
        return int(self._first_rows[last]) + self.size.rows_at(last)

    def consumed(self) -> np.ndarray:
        return np.sum([mixture.consumed() for mixture in self.mixtures], axis=0)
