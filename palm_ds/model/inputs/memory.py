"""What the slots of a run remember of the documents that they read.

    slot r     the row r of every step, over all processes: one window after another of a document,
               then the next document
    attached   batch + the memories of its rows; another document begins without any
    keep       after the forward pass, which has set `following`

Memories belong to slots, not to processes, so that any number of processes reads with the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from palm_ds.model.inputs.batch import Batch, SegmentMemory


@dataclass(frozen=True)
class SlotMemory:
    """What one slot remembers."""

    document: int
    """The one that it is of, as in `Batch.documents`."""
    values: torch.Tensor  # (layers, memory, hidden)


class SlotMemories:
    """The memories of some slots, before and after a step."""

    def __init__(self, shape: tuple[int, int, int]):
        """`shape`: (layers, memory, hidden) of a slot; a memory of 0 for an encoder without."""
        self._shape = shape
        self._before: dict[int, SlotMemory] = {}
        self.now: dict[int, SlotMemory] = {}

    def begin(self) -> None:
        """Begin a step: `attached` gives what is remembered now, `keep` adds to what follows."""
        self._before, self.now = self.now, {}

    def attached(self, batch: Batch) -> Batch:
        """The batch with the memories of its rows, if it has windows of documents."""
        if batch.documents is None:
            return batch
        slots = range(batch.first_row, batch.first_row + len(batch.input_ids))
        pairs = zip(slots, batch.documents.tolist(), strict=True)
        device = batch.input_ids.device
        rows = [self._of(slot, document, device) for slot, document in pairs]
        return replace(batch, memory=SegmentMemory(torch.stack(rows, 1)))

    def _of(self, slot: int, document: int, device: torch.device) -> torch.Tensor:
        known = self._before.get(slot)
        if known is None or known.document != document:
            return torch.zeros(self._shape, device=device)
        return known.values.to(device, torch.float32)

    def keep(self, batch: Batch) -> None:
        """Remember what the forward pass of an attached batch has set. Values that are not finite,
        of a step that changes nothing, are forgotten."""
        if batch.documents is None or batch.memory is None:
            return
        following = batch.memory.following
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
