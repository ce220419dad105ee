"""Memories that the slots of a run have of the documents that they read.

    slot r     the row r of every step, over all processes: one window after another of a document,
               then the next document
    begin      gives the batches of a step the memories of their rows; another document begins
               without any
    keep       after the forward pass of a batch, which has set what follows

Memories belong to slots, not to processes, so that any number of processes reads with the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from palm_ds.model.inputs.batch import Batch, SegmentMemory


@dataclass(frozen=True)
class SlotMemory:
    """Memory of one slot."""

    document: int
    """The one that it is of, as in `Batch.documents`."""
    values: torch.Tensor  # (layers, memory, hidden)


class SlotMemories:
    """The memories of some slots, on the device of the model."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device):
        """`shape`: (layers, memory, hidden) of a slot; a memory of 0 for an encoder without."""
        self._shape, self._device = shape, device
        self.now: dict[int, SlotMemory] = {}

    def begin(self, batches: Sequence[Batch]) -> None:
        """Give the batches of a step what their rows remember, if they are windows of documents. A
        batch that is read again later still has it."""
        before, self.now = self.now, {}
        for batch in batches:
            if batch.documents is not None:
                documents = enumerate(batch.documents.tolist(), batch.first_row)
                rows = [self._of(before.get(slot), document) for slot, document in documents]
                batch.memory = SegmentMemory(torch.stack(rows, 1))

    def _of(self, known: SlotMemory | None, document: int) -> torch.Tensor:
        if known is None or known.document != document:
            return torch.zeros(self._shape, device=self._device)
        return known.values.to(self._device, torch.float32)

    def keep(self, batch: Batch) -> None:
        """Remember what the forward pass of a batch has set. Values that are not finite, of a step
        that changes nothing, are forgotten."""
        if batch.documents is None or batch.memory is None:
            return
        following, batch.memory.following = batch.memory.following, None
        assert following is not None, "the encoder has not read it"
        following = torch.nan_to_num(following, nan=0.0, posinf=0.0, neginf=0.0)
        for row, document in enumerate(batch.documents.tolist()):
            self.now[batch.first_row + row] = SlotMemory(document, following[:, row])

    # ---- checkpoints ----

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, flat values) of what is remembered now."""
        for slot, memory in self.now.items():
            yield f"{slot}.{memory.document}", memory.values.reshape(-1)

    def restore(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Remember what `stored` gave, of all processes."""
        self.now = {}
        for name, values in stored.items():
            slot, document = map(int, name.split("."))
            self.now[slot] = SlotMemory(document, values.view(self._shape))
