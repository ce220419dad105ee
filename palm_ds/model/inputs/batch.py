"""A micro-batch of packed rows: the input of the model.

    row 0   [CLS] a b [SEP] | [CLS] c [SEP] d [SEP] | padding
    row 1   [CLS] e f g h [SEP]              | padding

Each row holds whole sequences that do not attend to one another. `Batch.from_rows` packs tokens
without labels (trials, parity checks); `palm_ds.data.tasks.example.collate` adds the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from palm_ds.model.inputs.regions import BatchRegions, PackedRegions, batch_regions
from palm_ds.model.inputs.visibility import Visibility


@dataclass
class EncoderStates:
    """States of a forward pass of an encoder, by the number of the layer, from 1."""

    embeddings: torch.Tensor | None = None  # (rows, length, hidden)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # (rows, length, hidden)
    qkv: dict[int, torch.Tensor] = field(default_factory=dict)  # (rows, length, 3 hidden)


class VocabularyScores(Protocol):
    """A teacher's scores of the vocabulary for n rows."""

    def scores(self, inside: slice, size: int) -> torch.Tensor:
        """Those of some rows: (rows, size) in fp32; minus infinity where the teacher gives
        none."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class TeacherOutputs:
    """Teacher outputs for a batch."""

    states: EncoderStates | None = None
    words: Mapping[str, VocabularyScores] = field(default_factory=dict)
    """{task of masked words: scores at its soft labels}"""


@dataclass(eq=False)
class SegmentMemory:
    """Memories that the rows of a batch have of the windows before: an encoder with memories reads
    `past` and sets `following`, both without gradients."""

    past: torch.Tensor | None = None  # (layers, rows, memory, hidden); None: zeros
    following: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """Tokens that stay together in a row."""

    input_ids: np.ndarray
    """(tokens,) int64"""
    token_type_ids: np.ndarray
    """(tokens,) int64"""
    task_id: int = 0
    sub_lengths: tuple[int, ...] = ()
    """Lengths of the sequences in it that do not attend to one another; empty means one
    sequence."""
    position_ids: np.ndarray | None = None
    """(tokens,) int64; None: from 0 in each sequence."""
    visibility: Visibility | None = None
    """Which tokens of a sequence attend to one another; None: all."""
    regions: PackedRegions | None = None
    """The regions of the image beside it, or of those beside its sequences."""

    def positions(self, parts: Sequence[int]) -> np.ndarray:
        """(tokens,) its position ids, given the lengths of its sequences."""
        if self.position_ids is not None:
            return self.position_ids
        return np.concatenate([np.arange(part) for part in parts])


@dataclass
class Batch:
    """A micro-batch of packed rows, as tensors.

    Every token belongs to a sequence: a text, or the padding at the end of a row. Sequences never
    cross rows and cover the batch, so `cu_seqlens` holds the cumulative lengths that
    variable-length attention needs, and `sequence_ids` (numbered within the row) what a mask needs.
    """

    input_ids: torch.Tensor
    """(rows, length) int64"""
    position_ids: torch.Tensor
    """(rows, length) int64; from 0 in each sequence unless its text has its own"""
    token_type_ids: torch.Tensor
    """(rows, length) int64"""
    task_ids: torch.Tensor
    """(rows, length) int64"""
    sequence_ids: torch.Tensor
    """(rows, length) int64; -1 is padding"""
    cu_seqlens: torch.Tensor
    """(sequences + 1,) int32, over the flattened rows; the last one is rows * length"""
    labels: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """{task: (flat positions, targets)}"""
    placeholders: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """{task: (flat positions, keys)} of tokens that the encoder itself fills in beforehand
    (model/heads/pseudo_tokens.py)"""
    masked: tuple[torch.Tensor, torch.Tensor] | None = None
    """(flat positions, ids) of the tokens of texts with placeholders that tasks have changed, as
    they were; None: none."""
    groups: dict[str, torch.Tensor] = field(default_factory=dict)
    """For tasks whose labels of an example count as one: (n,) int64, ascending from 0, the number
    of the example that each labeled position belongs to."""
    first_row: int = 0
    """The number of its first row within the step, over all processes."""
    dropout_key: int | None = None
    """What dropout masks follow from, besides the place of a number: from 0 to 2^63; None: drawn
    from torch's generator."""
    visibility: torch.Tensor | None = None
    """(2, rows, length) int32: the order and the limit of each token (model/inputs/visibility.py);
    None: every token attends to its whole sequence."""
    displaced: bool = False
    """Whether tokens of texts with a visibility stand elsewhere than their positions say, as
    queries do: distances within a row are then not those of the text."""
    teacher: TeacherOutputs | None = None
    """What teachers make of it; None where nothing is learned from them."""
    documents: torch.Tensor | None = None
    """(rows,) int64: a number of the document that each row is a window of. None: rows are packed
    with texts."""
    memory: SegmentMemory | None = None
    """What its rows remember of earlier windows (palm_ds/model/inputs/memory.py)."""
    regions: BatchRegions | None = None
    """The regions of images beside its texts; None: there are none."""

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[PackedText]], *, length: int, pad: int) -> Batch:
        """Rows of `length` tokens without labels. A row may be empty (all padding)."""
        shape = (len(rows), length)
        input_ids = np.full(shape, pad, np.int64)
        position_ids, token_type_ids, task_ids = (np.zeros(shape, np.int64) for _ in range(3))
        sequence_ids = np.full(shape, -1, np.int64)
        partial = any(text.visibility is not None for row in rows for text in row)
        visibility = np.zeros((2, *shape), np.int32) if partial else None
        displaced = False
        lengths: list[int] = []
        placed: list[tuple[int, PackedRegions]] = []
        for r, row in enumerate(rows):
            start = sequences = 0
            for text in row:
                inside = slice(start, start + len(text.input_ids))
                assert inside.stop <= length, f"row {r} holds more than {length} tokens"
                parts = text.sub_lengths or (len(text.input_ids),)
                numbers = np.arange(sequences, sequences + len(parts))
                input_ids[r, inside] = text.input_ids
                token_type_ids[r, inside] = text.token_type_ids
                task_ids[r, inside] = text.task_id
                position_ids[r, inside] = text.positions(parts)
                sequence_ids[r, inside] = np.repeat(numbers, parts)
                if visibility is not None and text.visibility is not None:
                    visibility[:, r, inside] = text.visibility.order, text.visibility.limit
                    displaced |= text.position_ids is not None
                if text.regions is not None:
                    placed.append((r * length + inside.start, text.regions))
                lengths += parts
                sequences += len(parts)
                start = inside.stop
            if start < length:
                lengths.append(length - start)
        return cls(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(position_ids),
            token_type_ids=torch.from_numpy(token_type_ids),
            task_ids=torch.from_numpy(task_ids),
            sequence_ids=torch.from_numpy(sequence_ids),
            cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
            visibility=None if visibility is None else torch.from_numpy(visibility),
            displaced=displaced,
            regions=batch_regions(placed),
        )

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """A batch of the changed tensors."""
        return Batch(
            input_ids=change(self.input_ids),
            position_ids=change(self.position_ids),
            token_type_ids=change(self.token_type_ids),
            task_ids=change(self.task_ids),
            sequence_ids=change(self.sequence_ids),
            cu_seqlens=change(self.cu_seqlens),
            labels={task: (change(at), change(y)) for task, (at, y) in self.labels.items()},
            placeholders={
                task: (change(at), change(y)) for task, (at, y) in self.placeholders.items()
            },
            masked=self.masked and (change(self.masked[0]), change(self.masked[1])),
            groups={task: change(number) for task, number in self.groups.items()},
            first_row=self.first_row,
            dropout_key=self.dropout_key,
            visibility=None if self.visibility is None else change(self.visibility),
            displaced=self.displaced,
            teacher=self.teacher,
            documents=self.documents,  # the host reads it
            memory=self.memory,
            regions=self.regions and self.regions.map(change),
        )

    def to(self, device: torch.device | str) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The batch in pinned memory, from which a GPU copies without the host."""
        return self.map(torch.Tensor.pin_memory)

    def with_dropout_key(self, key: int) -> Batch:
        return replace(self, dropout_key=key)

    def sequence_of(self, positions: torch.Tensor) -> torch.Tensor:
        """(n,) the numbers within the batch of the sequences that flat positions (n,) are in."""
        return torch.searchsorted(self.cu_seqlens.long(), positions, right=True) - 1

    def first_of(self, positions: torch.Tensor) -> torch.Tensor:
        """(n,) the flat positions of the first tokens of these sequences."""
        return self.cu_seqlens.long()[self.sequence_of(positions)]

    def tokens_of(self, positions: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """The flat positions (tokens,) of all tokens of the sequences that flat positions (n,) are
        in, one sequence after the other, and the lengths of these. Waits for the device."""
        number = self.sequence_of(positions)
        first, lengths = self.cu_seqlens.long()[number], self.sequence_lengths[number]
        behind = lengths.cumsum(0)
        shift = (first - behind + lengths).repeat_interleave(lengths)
        return torch.arange(len(shift), device=shift.device) + shift, lengths.tolist()

    def first_regions_of(self, positions: torch.Tensor) -> torch.Tensor:
        """(n,) the flat positions of the first regions of the sequences, each with an image, that
        flat positions (n,) are in."""
        assert self.regions is not None, "checked where examples are labeled"
        firsts = self.regions.firsts.long()
        return firsts[torch.searchsorted(firsts, self.first_of(positions))]

    def padding_row(self) -> Batch:
        """A batch of one row of padding, of the same length on the same device."""
        row = self.input_ids[:1]
        zeros, end = torch.zeros_like(row), row.shape[1]
        return Batch(
            input_ids=zeros,
            position_ids=zeros,
            token_type_ids=zeros,
            task_ids=zeros,
            sequence_ids=zeros - 1,
            cu_seqlens=torch.arange(2, dtype=torch.int32, device=row.device) * end,
            first_row=self.first_row,
            dropout_key=self.dropout_key,
        )

    @property
    def sequence_lengths(self) -> torch.Tensor:
        """(sequences,) int64: the tokens of each sequence; padding is one too."""
        return self.cu_seqlens.diff().long()

    @property
    def real_tokens(self) -> int:
        """The number of tokens that are not padding, counted on the host.

        By numpy: torch would wake a thread for each core in each step, while the GPU waits."""
        return int(np.count_nonzero(self.sequence_ids.cpu().numpy() >= 0))

    def count(self, task: str) -> int:
        """The number of labels of a task; those of a group count as one."""
        if task in self.groups:
            return int(self.groups[task][-1]) + 1
        return len(self.labels[task][0]) if task in self.labels else 0
