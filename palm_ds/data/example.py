"""One text for the model with its labels, and examples collated into a Batch.

    TokenSpan ──arrange──> Example: ids, segments, marks, each token's source offset, sparse labels
    rows of examples ──collate──> Batch

Labels are sparse: {task: (positions, targets)}. A label of the whole text is at its [CLS].
Targets are integers (classes) or floats; a target may be a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from palm_ds.model.batch import Batch, PackedText
from palm_ds.text.tokens import SpecialTokens, TokenSpan


@dataclass
class Example:
    """One text. All arrays except the labels have one entry per token, special tokens included."""

    ids: np.ndarray
    segments: np.ndarray
    origin: np.ndarray  # the token's offset in the source; -1: a special token
    marks: dict[str, np.ndarray]  # annotations; 0 for special tokens
    labels: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    item: int = -1
    """Its row in the table; -1: it comes from running text."""
    parts: tuple[int, ...] = ()
    """Lengths of its texts if they must not attend to one another; empty: one text."""
    whole: set[str] = field(default_factory=set)
    """Tasks whose labels of this example form one unit (a tag sequence, a span, a choice): they
    count as one, and the head gets the group of each row."""
    original: np.ndarray = field(init=False)  # the ids before any task of the blend masked some

    def __post_init__(self) -> None:
        self.original = self.ids.copy()

    def __len__(self) -> int:
        return len(self.ids)

    def packed(self, task_id: int) -> PackedText:
        """Its tokens in the form of a Batch."""
        return PackedText(
            input_ids=self.ids,
            token_type_ids=self.segments,
            task_id=task_id,
            sub_lengths=self.parts,
        )


def arrange(
    pieces: Sequence[TokenSpan], vocabulary: SpecialTokens, segments: Sequence[int] | None = None
) -> Example:
    """[CLS] piece 0 [SEP] piece 1 [SEP] ...; a [SEP] carries the segment of the piece it closes,
    [CLS] that of the first (ERNIE 2.0, figure 3). `segments` has one number per piece; by default
    0, 1, ..."""
    numbers = range(len(pieces)) if segments is None else segments
    total = 1 + sum(len(piece) + 1 for piece in pieces)
    ids = np.full(total, vocabulary.sep, np.int64)
    segment_of = np.full(total, numbers[0], np.int64)
    origin = np.full(total, -1, np.int64)
    marks = {name: np.zeros(total, np.uint8) for name in pieces[0].annotations}
    ids[0], at = vocabulary.cls, 1
    for number, piece in zip(numbers, pieces, strict=True):
        inside = slice(at, at + len(piece))
        ids[inside] = piece.ids
        origin[inside] = np.arange(piece.start, piece.start + len(piece))
        for name, values in piece.annotations.items():
            marks[name][inside] = values
        segment_of[at : inside.stop + 1] = number
        at = inside.stop + 1
    return Example(ids=ids, segments=segment_of, origin=origin, marks=marks)


def join(examples: Sequence[Example]) -> Example:
    """Texts that must not attend to one another as one example, so that they share a row."""
    return Example(
        ids=np.concatenate([example.ids for example in examples]),
        segments=np.concatenate([example.segments for example in examples]),
        origin=np.concatenate([example.origin for example in examples]),
        marks={},
        parts=tuple(len(example) for example in examples),
    )


def collate(rows: Sequence[Sequence[tuple[Example, int]]], *, length: int, pad: int) -> Batch:
    """Collates rows of (example, task id) into one Batch. A row may be empty (all padding)."""
    texts, labels = [], _LabelCollector()
    for r, row in enumerate(rows):
        at = r * length
        for example, _ in row:
            labels.add(example, at)
            at += len(example)
        texts.append([example.packed(task_id) for example, task_id in row])
    return replace(
        Batch.from_rows(texts, length=length, pad=pad),
        labels=labels.joined(),
        groups={task: torch.from_numpy(np.concatenate(x)) for task, x in labels.groups.items()},
    )


class _LabelCollector:
    """Collects the labels of examples by task."""

    def __init__(self) -> None:
        self.positions: dict[str, list[np.ndarray]] = {}
        self.targets: dict[str, list[np.ndarray]] = {}
        self.groups: dict[str, list[np.ndarray]] = {}

    def add(self, example: Example, first: int) -> None:
        """Adds the labels of an example that starts at this flat position."""
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
