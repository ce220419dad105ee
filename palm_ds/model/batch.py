"""A micro-batch of packed rows: what a model reads.

    row 0   [CLS] a b [SEP] | [CLS] c [SEP] d [SEP] | padding
    row 1   [CLS] e f g h [SEP]              | padding

Each row holds whole sequences that do not attend to one another. `Batch.from_rows` packs tokens
alone (trials, parity checks); `palm_ds.data.example.collate` adds labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """Tokens that stay together in a row."""

    ids: np.ndarray
    """(tokens,) int64"""
    segments: np.ndarray
    """(tokens,) int64: token type ids"""
    task_id: int = 0
    parts: tuple[int, ...] = ()
    """Lengths of the sequences it consists of, where these do not attend to one another; empty
    means one sequence."""


@dataclass
class Batch:
    """A micro-batch of packed rows, as tensors.

    Every token belongs to a sequence: a text, or the padding at the end of a row. Sequences never
    cross rows and cover the batch, so `starts` holds the cumulative lengths that variable-length
    attention needs, and `block` (a token's sequence, counted within its row) is what a mask needs.
    """

    ids: torch.Tensor  # (rows, length) int64
    positions: torch.Tensor  # (rows, length) int64, from 0 in each sequence
    segments: torch.Tensor  # (rows, length) int64
    task_ids: torch.Tensor  # (rows, length) int64
    block: torch.Tensor  # (rows, length) int64; -1: padding
    starts: torch.Tensor  # (sequences + 1,) int32, over the flattened rows; last = rows * length
    longest: int  # tokens of the longest sequence
    labels: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """{task: (flat positions, targets)}"""
    groups: dict[str, torch.Tensor] = field(default_factory=dict)
    """For tasks whose labels of an example count as one: (n,) int64, the number of the example that
    each labelled position belongs to, ascending from 0."""

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[PackedText]], *, length: int, pad: int) -> Batch:
        """Rows of `length` tokens without labels. A row may be empty (all padding)."""
        shape = (len(rows), length)
        ids = np.full(shape, pad, np.int64)
        positions, segments, task_ids = (np.zeros(shape, np.int64) for _ in range(3))
        block = np.full(shape, -1, np.int64)
        sizes: list[int] = []
        for r, row in enumerate(rows):
            at = sequences = 0
            for text in row:
                inside = slice(at, at + len(text.ids))
                assert inside.stop <= length, f"row {r} holds more than {length} tokens"
                parts = text.parts or (len(text.ids),)
                ids[r, inside] = text.ids
                segments[r, inside] = text.segments
                task_ids[r, inside] = text.task_id
                positions[r, inside] = np.concatenate([np.arange(part) for part in parts])
                block[r, inside] = np.repeat(np.arange(sequences, sequences + len(parts)), parts)
                sizes += parts
                sequences += len(parts)
                at = inside.stop
            if at < length:
                sizes.append(length - at)
        return cls(
            ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            segments=torch.from_numpy(segments),
            task_ids=torch.from_numpy(task_ids),
            block=torch.from_numpy(block),
            starts=torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)),
            longest=max(sizes, default=0),
        )

    def to(self, device: torch.device | str) -> Batch:
        move = lambda x: x.to(device, non_blocking=True)  # noqa: E731
        return Batch(
            ids=move(self.ids),
            positions=move(self.positions),
            segments=move(self.segments),
            task_ids=move(self.task_ids),
            block=move(self.block),
            starts=move(self.starts),
            longest=self.longest,
            labels={task: (move(at), move(y)) for task, (at, y) in self.labels.items()},
            groups={task: move(number) for task, number in self.groups.items()},
        )

    @property
    def real_tokens(self) -> int:
        return int((self.block >= 0).sum())

    def count(self, task: str) -> int:
        """The number of labels of a task."""
        if task in self.groups:
            return int(self.groups[task][-1]) + 1
        return len(self.labels[task][0]) if task in self.labels else 0
