"""Numbered examples of a blend over one source, and packed rows of them.

A feed is one blend over one source: its n-th example is a pure function of (seed, n), for any n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Generic, NamedTuple, TypeAlias

import numpy as np

from palm_ds.common import rng as keyed
from palm_ds.common.errors import UserError
from palm_ds.data.corpus_source import Source
from palm_ds.data.example import Example, collate
from palm_ds.data.layout import lengthened
from palm_ds.data.packing import pack
from palm_ds.data.stages import tasks_of
from palm_ds.data.table_source import TableSource
from palm_ds.data.task import SourceT, Task
from palm_ds.model.batch import Batch

_SAMPLE = 4096


@dataclass(frozen=True)
class Feed(Generic[SourceT]):
    """The examples of one blend over one source: the n-th is a pure function of (seed, n)."""

    name: str
    tasks: tuple[Task[SourceT], ...]
    task_id: int
    source: SourceT
    seed: int
    room: int
    fixed: bool = False
    """Held-out data: the items in order, the same in every epoch."""
    segments: int = 0
    """Number of segments of the encoder, 0 for no limit; further segments get the last one."""

    @cached_property
    def key(self) -> int:
        return keyed.key(self.seed, self.name)

    @cached_property
    def items(self) -> np.ndarray:
        first = self.tasks[0]
        items_of = first.items if self.fixed else first.training_items
        items = items_of(self.source, self.room)
        if not len(items):
            raise UserError(
                f"tasks.{first.name}: nothing in {self.source.name} is long enough "
                f"({len(self.source)} documents or rows read)"
            )
        return items

    def about(self) -> str:
        """A line for the start of a run; may be empty."""
        tasks = self.tasks if self.tasks[0].reads == "table" else self.tasks[:1]
        return "\n".join(filter(None, (task.about(self.source) for task in tasks)))

    def layouts(self, n: np.ndarray) -> np.ndarray:
        """(len(n),) the layouts of these examples (palm_ds/data/layout.py)."""
        task = self.tasks[0]
        index = n % len(self.items)
        if not self.fixed:
            epochs = n // len(self.items)
            for epoch in np.unique(epochs):
                here = epochs == epoch
                key = keyed.key(self.key, "epoch", int(epoch))
                index[here] = keyed.permutation_at(key, len(self.items), index[here])
        uniform = keyed.uniform(self.key, n, task.draws) if task.draws else np.empty((len(n), 0))
        found = task.layout(self.items[index], uniform, self.source, self.room)
        longest = int(found["length"].max(initial=0))
        if longest > self.room:
            raise UserError(
                f"tasks.{task.name}: layout() returned an example of {longest} tokens; rows have "
                f"{self.room}"
            )
        return found

    def example(self, n: int, layout: np.void) -> Example:
        """The n-th example, built by the first task of the blend and labelled by all."""
        first = self.tasks[0]
        example = first.example(layout, self.source, self._generator(first, "example", n))
        if len(example) != layout["length"]:
            raise UserError(
                f"tasks.{first.name}: example() returned {len(example)} tokens, but layout() "
                f"promised {layout['length']}; the two must agree"
            )
        for task in self.tasks:
            task.label(example, self.source, self._generator(task, "label", n))
        if self.segments:
            np.minimum(example.segments, self.segments - 1, out=example.segments)
        return example

    def _generator(self, task: Task[SourceT], use: str, n: int) -> np.random.Generator:
        return keyed.generator(keyed.key(self.key, task.name, use), n)

    @cached_property
    def mean_tokens(self) -> Fraction:
        """Mean number of row tokens per example: its own tokens, those it grows by to fill the row,
        and padding. Measured on the first few thousand; it converts tokens to examples."""
        lengths = self.layouts(np.arange(min(_SAMPLE, len(self.items))))["length"]
        return Fraction(len(pack(lengths, self.room)) * self.room, len(lengths))


class ExampleRef(NamedTuple):
    """An example that is not built yet."""

    feed: int
    """The index of its feed."""
    number: int
    """Its number within the feed."""
    layout: np.void

    @property
    def length(self) -> int:
        """Its tokens."""
        return int(self.layout["length"])


PackedRow: TypeAlias = list[ExampleRef]
"""The examples of a row, in order."""


def refs(feed: int, numbers: np.ndarray, layouts: np.ndarray) -> list[ExampleRef]:
    """Examples of one feed, given their numbers and layouts."""
    pairs = zip(numbers.tolist(), layouts, strict=True)
    return [ExampleRef(feed, number, layout) for number, layout in pairs]


def fill(row: PackedRow, room: int) -> PackedRow:
    """Gives the free space of a row to the examples in it that can grow."""
    free = room - sum(ref.length for ref in row)
    for k, ref in enumerate(row):
        more = min(free, int(ref.layout["spare"]))
        if more > 0:
            row[k] = ref._replace(layout=lengthened(ref.layout, more))
            free -= more
    return row


class BuiltExample(NamedTuple):
    """An example with the reference it was built from."""

    ref: ExampleRef
    example: Example


BuiltRow: TypeAlias = list[BuiltExample]


def build_examples(feeds: Sequence[Feed], rows: Sequence[PackedRow]) -> list[BuiltRow]:
    """The examples of rows."""
    return [
        [BuiltExample(ref, feeds[ref.feed].example(ref.number, ref.layout)) for ref in row]
        for row in rows
    ]


def collate_built(feeds: Sequence[Feed], built: Sequence[BuiltRow], length: int, pad: int) -> Batch:
    """Built examples as one batch."""
    rows = [[(each.example, feeds[each.ref.feed].task_id) for each in row] for row in built]
    return collate(rows, length=length, pad=pad)


def build_rows(feeds: Sequence[Feed], rows: Sequence[PackedRow], length: int, pad: int) -> Batch:
    """The examples of rows, built and collated."""
    return collate_built(feeds, build_examples(feeds, rows), length, pad)


def held_out_rows(feed: Feed, feed_number: int, most: int) -> list[PackedRow]:
    """The first `most` held-out examples of a feed, packed: the same at every evaluation."""
    n = np.arange(min(most, len(feed.items)))
    layouts = feed.layouts(n)
    every = refs(feed_number, n, layouts)
    return [[every[i] for i in row] for row in pack(layouts["length"], feed.room)]


def make_feeds(
    blends: Sequence[str],
    tasks: Mapping[str, Task],
    task_ids: Mapping[str, int],
    sources: Mapping[str, Sequence[tuple[str, Source | TableSource, float]]],
    *,
    seed: int,
    length: int,
    fixed: bool = False,
    segments: int = 0,
) -> tuple[list[Feed], dict[str, list[tuple[int, float]]]]:
    """The feeds of every blend, and {blend: (feed, share) pairs}.

    `sources[name]` are the (corpus or table, documents or rows, weight) of a recipe's source."""
    feeds: list[Feed] = []
    feeds_of: dict[str, list[tuple[int, float]]] = {}
    for blend in blends:
        parts = tuple(tasks[name] for name in tasks_of(blend))
        corpora = sources[parts[0].source]
        total = sum(weight for _, _, weight in corpora)
        for corpus_name, source, weight in corpora:
            name = blend if len(corpora) == 1 else f"{blend} @ {corpus_name}"
            feeds_of.setdefault(blend, []).append((len(feeds), weight / total))
            feeds.append(
                Feed(
                    name=name,
                    tasks=parts,
                    task_id=task_ids[parts[0].name],
                    source=source,
                    seed=seed,
                    room=length,
                    fixed=fixed,
                    segments=segments,
                )
            )
    return feeds, feeds_of
