"""What a task makes and what a model eats.

    Piece     tokens of a source and their marks, as read
    Example   one text for the model: ids, segments, marks, each token's origin, sparse labels
    Batch     rows of `length` tokens, each filled with whole examples that do not see one another

Labels are sparse: {task: (positions, targets)}. A label of the whole text sits at its [CLS].
Targets are whole numbers (classes) or real ones; a target may be a row of several.
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
    item: int = -1
    """The row of a table it was made of; -1: it was made of running text."""
    parts: tuple[int, ...] = ()
    """Lengths of the texts it consists of, when they do not see one another; none: one text."""
    whole: set[str] = field(default_factory=set)
    """Tasks whose labels of this example are one together (a sequence of tags, a span, a choice):
    they count as one, and the head is told which of its rows belong together."""
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
    groups: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of tasks whose labels of an example are one together: (n,) int64, for each labelled position
    the number, from 0 and ascending, of the example it belongs to."""

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
        """How many labels of a task there are."""
        if task in self.groups:
            return int(self.groups[task][-1]) + 1
        return len(self.labels[task][0]) if task in self.labels else 0


def join(examples: Sequence[Example]) -> Example:
    """Texts that do not see one another, as one example: they stay together in a row."""
    return Example(
        ids=np.concatenate([example.ids for example in examples]),
        segments=np.concatenate([example.segments for example in examples]),
        origin=np.concatenate([example.origin for example in examples]),
        marks={},
        parts=tuple(len(example) for example in examples),
    )


def collate(rows: Sequence[Sequence[tuple[Example, int]]], *, length: int, pad: int) -> Batch:
    """Rows of (example, task id) to one Batch. A row may be empty (all padding)."""
    shape = (len(rows), length)
    ids = np.full(shape, pad, np.int64)
    positions, segments, task_ids = (np.zeros(shape, np.int64) for _ in range(3))
    block = np.full(shape, -1, np.int64)
    sizes: list[int] = []
    labels = _Labels()
    for r, row in enumerate(rows):
        at = blocks = 0
        for example, task_id in row:
            inside = slice(at, at + len(example))
            assert inside.stop <= length, f"row {r} holds more than {length} tokens"
            ids[r, inside] = example.ids
            segments[r, inside] = example.segments
            task_ids[r, inside] = task_id
            parts = example.parts or (len(example),)
            positions[r, inside] = np.concatenate([np.arange(part) for part in parts])
            block[r, inside] = np.repeat(np.arange(blocks, blocks + len(parts)), parts)
            labels.add(example, r * length + at)
            sizes += parts
            blocks += len(parts)
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
        labels=labels.joined(),
        groups={task: torch.from_numpy(np.concatenate(x)) for task, x in labels.groups.items()},
    )


class _Labels:
    """The labels of examples one after the other, by task."""

    def __init__(self) -> None:
        self.positions: dict[str, list[np.ndarray]] = {}
        self.targets: dict[str, list[np.ndarray]] = {}
        self.groups: dict[str, list[np.ndarray]] = {}

    def add(self, example: Example, first: int) -> None:
        """Of an example that begins at this flat position."""
        for task, (where, targets) in example.labels.items():
            if not len(where):
                continue
            self.positions.setdefault(task, []).append(np.asarray(where, np.int64) + first)
            values = np.asarray(targets)
            values = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
            self.targets.setdefault(task, []).append(values)
            if task in example.whole:
                numbers = self.groups.setdefault(task, [])
                numbers.append(np.full(len(where), len(numbers), np.int64))

    def joined(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {
            task: (
                torch.from_numpy(np.concatenate(at)),
                torch.from_numpy(np.concatenate(self.targets[task])),
            )
            for task, at in self.positions.items()
        }
