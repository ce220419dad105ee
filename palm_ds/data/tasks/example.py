"""One text for the model with its labels, and examples collated into a Batch.

Layouts are structured arrays that say what an example is made of before it is built:

    layouts(length, spare, start=start, tokens=tokens)["start"]    (n,) int64

Every layout has a `length` and by how many tokens the example could be longer (`spare`); the other
fields are the task's. Rows are packed from the lengths alone.

    TokenSpan ──build_input──> Example: ids, token types, annotations, source offsets, labels
    rows of examples ──collate──> Batch

Labels are sparse: {task: (positions, targets)}. A label of the whole text is at its [CLS].
Targets are integers (classes) or floats; a target may be a vector.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import torch

from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.inputs.regions import PackedRegions, join_regions
from palm_ds.model.inputs.visibility import Visibility
from palm_ds.text.tokens import SpecialTokens, TokenSpan


def layouts(length: np.ndarray, spare: np.ndarray | int = 0, **fields: np.ndarray) -> np.ndarray:
    """(n,) structured int64: one field per argument; an (n, k) argument becomes a field of shape
    (k,)."""
    columns = {"length": length, "spare": spare, **fields}
    dtype = [(name, np.int64, np.shape(values)[1:]) for name, values in columns.items()]
    table = np.empty(len(length), dtype)
    for name, values in columns.items():
        table[name] = values
    return table


def lengthened(layout: np.void, tokens: int) -> np.void:
    """A copy of one layout that is longer by some of its spare tokens."""
    longer = layout.copy()
    longer["length"] += tokens
    longer["spare"] -= tokens
    return longer


@dataclass
class Example:
    """One text. All arrays except the labels have one entry per token, special tokens included."""

    input_ids: np.ndarray
    token_type_ids: np.ndarray
    source_offsets: np.ndarray  # the token's offset in the source; -1: a special token
    annotations: dict[str, np.ndarray]  # 0 for special tokens
    labels: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    placeholders: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """{task: (positions, keys)} of tokens that the encoder itself fills in before it reads the
    text (model/heads/pseudo_tokens.py); behind the last of them is another token."""
    item: int = -1
    """Its row in the table; -1: it comes from running text."""
    sub_lengths: tuple[int, ...] = ()
    """Lengths of its texts if they must not attend to one another; empty: one text."""
    grouped_labels: set[str] = field(default_factory=set)
    """Tasks whose labels of this example form one unit (a tag sequence, a span, a choice): they
    count as one, and the head gets the group of each row."""
    position_ids: np.ndarray | None = None
    """None: from 0 in each text."""
    visibility: Visibility | None = None
    """Which of its tokens attend to one another; None: all of a text."""
    regions: PackedRegions | None = None
    """The regions of its image, or of those of its texts."""
    image: int = -1
    """The row in the table whose image it has; -1: none."""
    unmasked_ids: np.ndarray = field(init=False)  # before any task masked some

    def __post_init__(self) -> None:
        self.unmasked_ids = self.input_ids.copy()

    def __len__(self) -> int:
        return len(self.input_ids)

    def packed(self, task_id: int) -> PackedText:
        """Its tokens in the form of a Batch."""
        return PackedText(
            input_ids=self.input_ids,
            token_type_ids=self.token_type_ids,
            task_id=task_id,
            sub_lengths=self.sub_lengths,
            position_ids=self.position_ids,
            visibility=self.visibility,
            regions=self.regions,
        )


def build_input(
    pieces: Sequence[TokenSpan], vocabulary: SpecialTokens, segments: Sequence[int] | None = None
) -> Example:
    """[CLS] piece 0 [SEP] piece 1 [SEP] ..., with as many [SEP] between pieces as the tokenizer
    puts; a [SEP] carries the segment of the piece it closes, [CLS] that of the first (ERNIE 2.0,
    figure 3). `segments` has one number per piece; by default the tokenizer's token types."""
    numbers = vocabulary.types(len(pieces)) if segments is None else segments
    total = vocabulary.around(len(pieces)) + sum(map(len, pieces))
    ids = np.full(total, vocabulary.sep, np.int64)
    segment_of = np.full(total, numbers[0], np.int64)
    origin = np.full(total, -1, np.int64)
    annotations = {name: np.zeros(total, np.uint8) for name in pieces[0].annotations}
    ids[0], at = vocabulary.cls, 1
    for number, piece in zip(numbers, pieces, strict=True):
        inside = slice(at, at + len(piece))
        ids[inside] = piece.ids
        origin[inside] = np.arange(piece.start, piece.start + len(piece))
        for name, values in piece.annotations.items():
            annotations[name][inside] = values
        after = inside.stop + vocabulary.separators
        segment_of[at:after] = number
        at = after
    return Example(
        input_ids=ids, token_type_ids=segment_of, source_offsets=origin, annotations=annotations
    )


def with_image(
    example: Example,
    image: int,
    tags: np.ndarray,
    regions: tuple[np.ndarray, np.ndarray],
    token: int,
) -> Example:
    """A text without labels, then the tokens of object tags, whose positions begin again, then the
    places of regions of the row `image`, which hold `token`. `regions`: their features and
    locations."""
    features, locations = regions
    text, many = len(example), len(features)
    positions = np.arange(text) if example.position_ids is None else example.position_ids
    more, places = len(tags) + many, np.full(many, token)
    return Example(
        input_ids=np.concatenate([example.input_ids, tags, places]).astype(np.int64),
        token_type_ids=np.append(example.token_type_ids, np.zeros(more, np.int64)),
        source_offsets=np.append(example.source_offsets, np.full(more, -1)),
        annotations={
            name: np.append(values, np.zeros(more, values.dtype))
            for name, values in example.annotations.items()
        },
        item=example.item,
        position_ids=np.concatenate([positions, np.arange(len(tags)), np.zeros(many, np.int64)]),
        regions=PackedRegions(
            features=features, locations=locations, places=text + len(tags) + np.arange(many)
        ),
        image=image,
    )


def join(examples: Sequence[Example]) -> Example:
    """Texts that must not attend to one another as one example, so that they share a row."""
    assert all(example.visibility is None for example in examples), "not needed so far"
    starts = np.cumsum([0, *map(len, examples)]).tolist()
    images = [(at, x.regions) for at, x in zip(starts, examples, strict=False) if x.regions]
    positions = [np.arange(len(x)) if x.position_ids is None else x.position_ids for x in examples]
    return Example(
        input_ids=np.concatenate([example.input_ids for example in examples]),
        token_type_ids=np.concatenate([example.token_type_ids for example in examples]),
        source_offsets=np.concatenate([example.source_offsets for example in examples]),
        annotations={
            name: np.concatenate([example.annotations[name] for example in examples])
            for name in examples[0].annotations
        },
        sub_lengths=tuple(len(example) for example in examples),
        position_ids=np.concatenate(positions) if images else None,
        regions=join_regions(images) if images else None,
        image=examples[0].image,
    )


def select_tokens(example: Example, kept: np.ndarray) -> Example:
    """Some of the tokens, (tokens,) bool, of an example without labels."""
    return Example(
        input_ids=example.input_ids[kept],
        token_type_ids=example.token_type_ids[kept],
        source_offsets=example.source_offsets[kept],
        annotations={name: values[kept] for name, values in example.annotations.items()},
        item=example.item,
    )


def text_numbers(example: Example) -> np.ndarray:
    """(texts,) int64, equal for texts of the same tokens."""
    parts = np.split(example.unmasked_ids, np.cumsum(example.sub_lengths)[:-1])
    hashes = [blake2b(part.tobytes(), digest_size=8).digest() for part in parts]
    return np.frombuffer(b"".join(hashes), np.int64)


def collate(rows: Sequence[Sequence[tuple[Example, int]]], *, length: int, pad: int) -> Batch:
    """Collates rows of (example, task id) into one Batch. A row may be empty (all padding)."""
    texts, labels, placeholders, masked = [], _LabelCollector(), _LabelCollector(), []
    for r, row in enumerate(rows):
        at = r * length
        for example, _ in row:
            labels.add(example.labels, example.grouped_labels, at)
            placeholders.add(example.placeholders, (), at)
            if example.placeholders:
                changed = np.flatnonzero(example.input_ids != example.unmasked_ids)
                masked.append(np.stack([changed + at, example.unmasked_ids[changed]]))
            at += len(example)
        texts.append([example.packed(task_id) for example, task_id in row])
    return replace(
        Batch.from_rows(texts, length=length, pad=pad),
        labels=labels.joined(),
        placeholders=placeholders.joined(),
        masked=tuple(torch.from_numpy(np.concatenate(masked, 1))) if masked else None,
        groups={
            task: torch.from_numpy(np.concatenate(group)) for task, group in labels.groups.items()
        },
    )


class _LabelCollector:
    """Collects the labels, or placeholders, of examples by task."""

    def __init__(self) -> None:
        self.positions: dict[str, list[np.ndarray]] = {}
        self.targets: dict[str, list[np.ndarray]] = {}
        self.groups: dict[str, list[np.ndarray]] = {}

    def add(
        self,
        labels: Mapping[str, tuple[np.ndarray, np.ndarray]],
        grouped: Collection[str],
        first: int,
    ) -> None:
        """Adds the labels of an example that starts at this flat position."""
        for task, (where, targets) in labels.items():
            if not len(where):
                continue
            self.positions.setdefault(task, []).append(np.asarray(where, np.int64) + first)
            values = np.asarray(targets)
            values = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
            self.targets.setdefault(task, []).append(values)
            if task in grouped:
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
