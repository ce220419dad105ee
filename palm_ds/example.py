"""What a task makes and what a model eats.

    Piece     tokens of a source and their marks, as read
    Example   one text for the model: ids, segments, marks, each token's origin, sparse labels
    Batch     rows of `length` tokens, each filled with whole examples that do not see one another

Labels are sparse: {task: (positions, targets)}. A label of the whole text sits at its [CLS].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The ids that tasks need to know. `regular` are the ids a random replacement may be."""

    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    unk: int
    regular: np.ndarray


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document: ids and marks of the same length; `start` is where
    its first token stands in the source."""

    start: int
    ids: np.ndarray
    marks: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Example:
    """One text. All arrays but the labels have one entry a token, special tokens included."""

    ids: np.ndarray
    segments: np.ndarray
    origin: np.ndarray  # where in the source the token stands; -1: a special token
    marks: dict[str, np.ndarray]  # a special token has mark 0
    labels: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    original: np.ndarray = field(init=False)  # the ids before any task of the blend hid some

    def __post_init__(self) -> None:
        self.original = self.ids.copy()

    def __len__(self) -> int:
        return len(self.ids)


def arrange(
    pieces: Sequence[Piece], vocabulary: Vocabulary, segments: Sequence[int] | None = None
) -> Example:
    """[CLS] piece 0 [SEP] piece 1 [SEP] ...; a [SEP] carries the segment of the piece it closes,
    [CLS] that of the first (ERNIE 2.0, figure 3). `segments`: one a piece; by default 0, 1, ..."""
    numbers = range(len(pieces)) if segments is None else segments
    total = 1 + sum(len(piece) + 1 for piece in pieces)
    ids = np.full(total, vocabulary.sep, np.int64)
    segment_of = np.full(total, numbers[0], np.int64)
    origin = np.full(total, -1, np.int64)
    marks = {name: np.zeros(total, np.uint8) for name in pieces[0].marks}
    ids[0], at = vocabulary.cls, 1
    for number, piece in zip(numbers, pieces, strict=True):
        inside = slice(at, at + len(piece))
        ids[inside] = piece.ids
        origin[inside] = np.arange(piece.start, piece.start + len(piece))
        for name, values in piece.marks.items():
            marks[name][inside] = values
        segment_of[at : inside.stop + 1] = number
        at = inside.stop + 1
    return Example(ids=ids, segments=segment_of, origin=origin, marks=marks)


@dataclass
class Batch:
    """A micro-batch of packed rows, as tensors.

    Every token belongs to a block: an example, or the padding at the end of a row. Blocks never
    cross rows and cover the batch, so that `starts` are the cumulative lengths that variable-length
    attention wants, and `block` (a token's block, counted within its row) is what a mask needs.
    """

    ids: torch.Tensor  # (rows, length) int64
    positions: torch.Tensor  # (rows, length) int64, from 0 in each block
    segments: torch.Tensor  # (rows, length) int64
    task_ids: torch.Tensor  # (rows, length) int64
    block: torch.Tensor  # (rows, length) int64; -1: padding
    starts: torch.Tensor  # (blocks + 1,) int32, over the flattened rows; last = rows * length
    longest: int  # tokens of the longest block
    labels: dict[str, tuple[torch.Tensor, torch.Tensor]]  # task -> (flat positions, targets)

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
        )

    @property
    def real_tokens(self) -> int:
        return int((self.block >= 0).sum())


def collate(rows: Sequence[Sequence[tuple[Example, int]]], *, length: int, pad: int) -> Batch:
    """Rows of (example, task id) to one Batch. A row may be empty (all padding)."""
    shape = (len(rows), length)
    ids = np.full(shape, pad, np.int64)
    positions, segments, task_ids = (np.zeros(shape, np.int64) for _ in range(3))
    block = np.full(shape, -1, np.int64)
    sizes: list[int] = []
    labels: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    for r, row in enumerate(rows):
        at = 0
        for k, (example, task_id) in enumerate(row):
            inside = slice(at, at + len(example))
            assert inside.stop <= length, f"row {r} holds more than {length} tokens"
            ids[r, inside] = example.ids
            positions[r, inside] = np.arange(len(example))
            segments[r, inside] = example.segments
            task_ids[r, inside] = task_id
            block[r, inside] = k
            for task, (where, targets) in example.labels.items():
                flat, values = labels.setdefault(task, ([], []))
                flat.append(np.asarray(where, np.int64) + (r * length + at))
                values.append(np.asarray(targets, np.int64))
            sizes.append(len(example))
            at = inside.stop
        if at < length:
            sizes.append(length - at)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        segments=torch.from_numpy(segments),
        task_ids=torch.from_numpy(task_ids),
        block=torch.from_numpy(block),
        starts=torch.from_numpy(starts),
        longest=max(sizes, default=0),
        labels={
            task: (torch.from_numpy(np.concatenate(at)), torch.from_numpy(np.concatenate(y)))
            for task, (at, y) in labels.items()
        },
    )
