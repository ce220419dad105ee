"""The windows of documents that a run trains on, which follow from (recipe, data, seed, step, row).

    slot 0    document 0, windows 0 1 2 3 | document 3, ...
    slot 1    document 1, windows 0 1     | document 2, windows 0 1 2 | document 4, ...
    step      0                 1

Row r of every step is the slot r. A slot whose document has ended takes the next one, the lowest
slot first, so that nothing depends on the processes. A stage begins with new documents. The state
in a checkpoint says where each slot is; without it the documents before are counted again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from palm_ds.common.lru_cache import RecentlyUsed
from palm_ds.data.stream.row_stream import RowStream
from palm_ds.data.stream.task_group_dataset import ExampleRef, PackedRow, build_rows
from palm_ds.data.stream.windows import DocumentDataset, as_windows
from palm_ds.model.inputs.batch import Batch

_CHUNK = 256  # documents whose windows are counted together
_STAGE = 1 << 40  # numbers of documents of one stage


class SlotDocument(NamedTuple):
    """A document in a slot."""

    document: int
    """Its number within the dataset."""
    first: int
    """The step of the stage at which it begins."""
    windows: int

    @property
    def end(self) -> int:
        return self.first + self.windows


@dataclass
class SlotQueue:
    """The documents of a stage, in slots."""

    dataset: DocumentDataset
    slots: int
    first: int
    """The number of its first document."""
    readings: list[SlotDocument] = field(default_factory=list)
    following: int = 0
    """The next document that no slot has had."""
    _reached: int = 0

    def __post_init__(self) -> None:
        if not self.readings:
            self._restart()

    def _restart(self) -> None:
        self.readings, self.following, self._reached = [], self.first, 0
        for _ in range(self.slots):
            self.readings.append(self._take(0))

    def at(self, step: int) -> list[SlotDocument]:
        """The document of each slot at a step of the stage."""
        if step < self._reached:
            self._restart()
        ending = [(reading.end, slot) for slot, reading in enumerate(self.readings)]
        heapq.heapify(ending)
        while ending[0][0] <= step:
            end, slot = ending[0]
            self.readings[slot] = self._take(end)
            heapq.heapreplace(ending, (self.readings[slot].end, slot))
        self._reached = step
        return self.readings

    def _take(self, step: int) -> SlotDocument:
        document, self.following = self.following, self.following + 1
        return SlotDocument(document, step, self._windows(document))

    def _windows(self, document: int) -> int:
        chunk = document // _CHUNK

        def count() -> np.ndarray:
            n = chunk * _CHUNK + np.arange(_CHUNK)
            return self.dataset.counts(self.dataset.layouts(n))

        return int(self._counted.get(chunk, count)[document % _CHUNK])

    @cached_property
    def _counted(self) -> RecentlyUsed[int, np.ndarray]:
        return RecentlyUsed(4)

    def state(self, step: int) -> dict[str, Any]:
        """The place of each slot, as JSON."""
        readings = [list(reading) for reading in self.at(step)]
        return {"readings": readings, "following": self.following, "step": step}

    def seek(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.readings = [SlotDocument(*reading) for reading in state["readings"]]
        self.following, self._reached = state["following"], state["step"]


@dataclass
class DocumentStream(RowStream[DocumentDataset]):
    """step -> this process's micro-batches. A mixture has the task groups of all that are as long,
    each with one dataset; `already_read` counts documents that started."""

    _queues: dict[int, SlotQueue] = field(default_factory=dict, repr=False)

    def step_rows(self, step: int) -> list[PackedRow]:
        """The rows of a step, in global order: a window each."""
        number = self.curriculum.stage_at(step)
        dataset, within = self._dataset(number), step - self.first_step(number)
        readings = self._queue(number).at(within)
        layouts = self.datasets[dataset].layouts(np.array([x.document for x in readings]))
        layouts["window"] = [within - reading.first for reading in readings]
        return [
            [ExampleRef(dataset, reading.document, layout)]
            for reading, layout in zip(readings, layouts, strict=True)
        ]

    def build(self, step: int, rows: Sequence[PackedRow], first_row: int = 0) -> Batch:
        """One micro-batch of some of a step's rows."""
        rate = self.mask_rates.at(step)
        batch = build_rows(self.datasets, rows, self.length_at(step), self.pad, rate)
        numbers = [self._number(step, row[0]) for row in rows]
        return replace(as_windows(batch, numbers, self.pad), first_row=first_row)

    def _number(self, step: int, ref: ExampleRef) -> int:
        """A number that differs where memories do not last."""
        remembers = self.datasets[ref.dataset].windows.settings.remembers
        if remembers == "slot":
            return 0
        if remembers == "nothing":
            return -1 - step
        return self.curriculum.stage_at(step) * _STAGE + ref.number

    def largest_step(self) -> tuple[list[Batch], int]:
        """A step of the stage with the longest rows, or the most of them, in one batch, and its
        rows."""
        rows = self.sizes[self.largest_stage].rows
        return [self._begin(self.largest_stage, rows)], rows

    def sampled_steps(self, number: int, rows: int) -> Iterator[tuple[Batch, int]]:
        """A step of a stage, of at most `rows` rows, and how many of its steps are like it: all."""
        steps = self.curriculum.stages[number].steps
        yield self._begin(number, min(rows, self.sizes[number].rows)), steps

    def _begin(self, number: int, rows: int) -> Batch:
        """The first windows of some documents, as at the beginning of a stage."""
        dataset = self._dataset(number)
        layouts = self.datasets[dataset].layouts(np.arange(rows))
        refs = [[ExampleRef(dataset, n, layout)] for n, layout in enumerate(layouts)]
        return self.build(self.first_step(number), refs)

    # ---- position ----

    def state_dict(self, step: int) -> dict[str, Any]:
        """The place of each slot before a step, as JSON."""
        if step >= self.curriculum.steps:
            return {}
        number = self.curriculum.stage_at(step)
        queue = self._queue(number)
        state = queue.state(step - self.first_step(number))
        return {"stage": number, "first": queue.first, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor of the same recipe and data."""
        if state:
            queue = self._open(state["stage"], state["first"])
            queue.seek(state)
            self._queues[state["stage"]] = queue

    def consumed(self, step: int | None = None) -> dict[str, int]:
        """{dataset: documents} that started in the first `step` steps (by default all)."""
        step = self.curriculum.steps if step is None else step
        last = self.curriculum.stage_at(max(step - 1, 0))
        total = {dataset.name: self.already_read.get(dataset.name, 0) for dataset in self.datasets}
        for number in range(last + 1):
            total[self.datasets[self._dataset(number)].name] = self._started(number, step)
        return total

    def _started(self, number: int, step: int) -> int:
        """One more than the number of the last document that a stage begins before a step."""
        within = min(step - self.first_step(number), self.curriculum.stages[number].steps)
        queue = self._queue(number)
        later = sum(reading.first >= within for reading in queue.at(within))
        return queue.following - later

    def _queue(self, number: int) -> SlotQueue:
        if number not in self._queues:
            dataset = self._dataset(number)
            first = self.already_read.get(self.datasets[dataset].name, 0)
            for earlier in range(number):
                if self._dataset(earlier) == dataset:
                    first = self._started(earlier, self.first_step(number))
            self._queues[number] = self._open(number, first)
        return self._queues[number]

    def _open(self, number: int, first: int) -> SlotQueue:
        return SlotQueue(self.datasets[self._dataset(number)], self.sizes[number].rows, first)

    def _dataset(self, stage: int) -> int:
        """The dataset of a stage."""
        ((group, _),) = self.curriculum.stages[stage].steps_of
        ((dataset, _),) = self.mixtures[stage][group]
        return dataset
