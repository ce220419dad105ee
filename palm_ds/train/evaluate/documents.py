"""Held-out documents, which an encoder with memories reads window by window.

Each document begins without memories, whatever the recipe says about training, so that scores
depend neither on the order of documents nor on the processes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from palm_ds.data.stream.task_group_dataset import (
    BuiltRow,
    ExampleRef,
    PackedRow,
    build_examples,
    collate_built,
    refs,
)
from palm_ds.data.stream.windows import DocumentDataset, as_windows
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.memory import SlotMemories
from palm_ds.train.evaluate.evaluate import HeldOutSet

_MOST = 1 << 32
"""More documents than a dataset has."""


@dataclass(frozen=True)
class HeldOutDocuments(HeldOutSet):
    """Documents, each in `rows` with its first window."""

    memory_shape: tuple[int, int, int] = (0, 0, 0)

    def batches(
        self, rank: int, world: int, micro_rows: int
    ) -> Iterator[tuple[list[BuiltRow], Batch]]:
        """This process's micro-batches, with their examples. The caller passes each through the
        model before it takes the next."""
        slots = self._slots(world * micro_rows)
        own = slots[rank * micro_rows : (rank + 1) * micro_rows]
        memories = SlotMemories(self.memory_shape, torch.device("cpu"))
        for step in range(max(map(len, slots), default=0)):
            rows = [[slot[step]] if step < len(slot) else [] for slot in own]
            built = build_examples(self.datasets, rows, self.mask_rate)
            batch = collate_built(self.datasets, built, self.length, self.pad)
            numbers = [self._number(row, step) for row in rows]
            batch = as_windows(batch, numbers, self.pad)
            memories.begin([batch])
            yield built, batch
            memories.keep(batch)

    def _slots(self, count: int) -> list[list[ExampleRef]]:
        """The windows of `count` slots, each of whose documents follow one another."""
        slots: list[list[ExampleRef]] = [[] for _ in range(count)]
        shortest = [(0, slot) for slot in range(count)]
        for (document,) in self.rows:
            length, slot = shortest[0]
            slots[slot] += self._windows(document)
            heapq.heapreplace(shortest, (len(slots[slot]), slot))
        return slots

    def _windows(self, document: ExampleRef) -> list[ExampleRef]:
        dataset = self.datasets[document.dataset]
        assert isinstance(dataset, DocumentDataset)
        first = np.array([document.layout])
        layouts = np.repeat(first, dataset.counts(first)[0])
        layouts["window"] = np.arange(len(layouts))
        return [document._replace(layout=layout) for layout in layouts]

    def _number(self, row: PackedRow, step: int) -> int:
        """Differs where memories do not last."""
        if not row:
            return -1
        dataset = self.datasets[row[0].dataset]
        assert isinstance(dataset, DocumentDataset)
        if dataset.windows.settings.remembers == "nothing":
            return -2 - step
        return row[0].dataset * _MOST + row[0].number


def held_out_documents(
    datasets: Sequence[DocumentDataset],
    examples: int,
    length: int,
    pad: int,
    memory_shape: tuple[int, int, int],
) -> HeldOutDocuments:
    """The first `examples` held-out documents of every dataset over a corpus, and all of every
    dataset over a table."""
    rows = []
    for number, dataset in enumerate(datasets):
        most = dataset.num_items if dataset.tasks[0].reads == "table" else examples
        n = np.arange(dataset.order.up_to(most))
        rows += [[ref] for ref in refs(number, n, dataset.layouts(n))]
    return HeldOutDocuments(datasets, rows, length, pad, memory_shape=memory_shape)
