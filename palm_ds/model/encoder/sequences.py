"""Places of the sequences in packed rows, for layers that mix neighbors or whole sequences.

    row        [CLS] a b [SEP] | [CLS] c [SEP] | padding
    first        1   0 0   0       1   0   0     ...
    pooled       what each token's own sequence adds up to
    shifted      each token's neighbor, `fill` beyond the border of its sequence

No vector ever depends on another sequence of its row. Padding counts as one more sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.inputs.batch import Batch

WORD_POOLINGS = ("softsign_sum", "mean", "max")


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch."""

    ids: torch.Tensor
    """(rows, length) int64: numbered within the row; -1 is padding."""
    first: torch.Tensor
    """(rows, length) bool: the first token of each sequence, which heads of whole texts read."""

    @classmethod
    def of(cls, batch: Batch) -> Sequences:
        ids = batch.sequence_ids
        return cls(ids, ids != _moved(ids[..., None], -1, fill=-2)[..., 0])

    @property
    def numbers(self) -> torch.Tensor:
        """(rows, length) int64: numbers that no two sequences of the batch share, below
        rows * (length + 1)."""
        rows, length = self.ids.shape
        row = torch.arange(rows, device=self.ids.device)[:, None]
        return row * (length + 1) + self.ids + 1

    def pooled(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """For each token of (rows, length, hidden) what the vectors of its sequence come to, fp32;
        `how` is one of WORD_POOLINGS."""
        x = x.float()
        if how == "max":
            return self._reduced(x, "amax")
        total = self._reduced(x, "sum")
        if how == "softsign_sum":
            return F.softsign(total)
        return total / self._reduced(torch.ones_like(x[..., :1]), "sum")

    def _reduced(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        rows, length, hidden = x.shape
        lowest = -torch.inf if reduction == "amax" else 0.0
        if torch.compiler.is_exporting():  # rows of one text; runtimes have no scatter in fp16
            own = torch.where(self.ids[..., None] >= 0, x, lowest)
            return own.amax(1, keepdim=True) if reduction == "amax" else own.sum(1, keepdim=True)
        at = self.numbers.flatten()
        totals = x.new_full((rows * (length + 1), hidden), lowest)
        index = at[:, None].expand(-1, hidden)
        totals = totals.scatter_reduce(0, index, x.flatten(0, 1), reduction)
        return totals.index_select(0, at).view(rows, length, hidden)

    def shifted(self, x: torch.Tensor, offset: int, fill: float = 0.0) -> torch.Tensor:
        """(rows, length, hidden): the vector `offset` positions further on, or `fill` where that is
        no part of the sequence."""
        if offset == 0:
            return x
        same = _moved(self.ids[..., None], offset, fill=-2) == self.ids[..., None]
        return torch.where(same, _moved(x, offset), fill)

    def time_order(self) -> tuple[np.ndarray, np.ndarray]:
        """The flat positions ordered by their place in a sequence, longer sequences first, as a
        PackedSequence wants them, and how many there are of each place. Waits for the device."""
        numbers = self.numbers.flatten().cpu().numpy()
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        lengths = np.diff(starts, append=len(numbers))
        place = np.arange(len(numbers)) - np.repeat(starts, lengths)
        order = np.lexsort((np.repeat(starts, lengths), -np.repeat(lengths, lengths), place))
        return order, np.bincount(place)


def _moved(x: torch.Tensor, offset: int, fill: int = 0) -> torch.Tensor:
    """x (rows, length, any), read `offset` positions further on; `fill` beyond the row."""
    length = x.shape[1]
    if offset < 0:
        return F.pad(x, (0, 0, -offset, 0), value=fill)[:, :length]
    return F.pad(x, (0, 0, 0, offset), value=fill)[:, offset:]
