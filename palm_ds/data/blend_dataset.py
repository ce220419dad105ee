"""Examples by number: the n-th of a blend over one corpus, and rows of them.

A feed is one blend over one source: its n-th example is a pure function of (seed, n), forever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from palm_ds.common import rng as keyed
from palm_ds.common.errors import UserError
from palm_ds.data.corpus_source import Source
from palm_ds.data.example import Example, collate
from palm_ds.data.packing import pack
from palm_ds.data.stages import tasks_of
from palm_ds.data.table_source import TableSource
from palm_ds.data.task import Task
from palm_ds.model.batch import Batch

_SAMPLE = 4096


@dataclass(frozen=True)
class Feed:
    """The examples of one blend over one source: the n-th is a pure function of (seed, n)."""

    name: str
    tasks: tuple[Task, ...]
    task_id: int
    source: Source | TableSource
    seed: int
    room: int
    fixed: bool = False
    """Held-out: the items in their order, every epoch the same."""
    segments: int = 0
    """How many segments the encoder tells apart; 0: enough. Further ones count as the last."""

    @cached_property
    def key(self) -> int:
        return keyed.key(self.seed, self.name)

    @cached_property
    def items(self) -> np.ndarray:
        items_of = self._task.items if self.fixed else self._task.training_items
        items = items_of(self.source, self.room)
        if not len(items):
            raise UserError(
                f"tasks.{self.tasks[0].name}: nothing in {self.source.name} is long enough "
                f"({len(self.source)} documents or rows read)"
            )
        return items

    def about(self) -> str:
        """A line for the beginning of a run, or nothing."""
        return self._task.about(self.source)

    @property
    def _task(self) -> Any:
        """The task that arranges; it reads this kind of source (run.Recipe sees to it)."""
        return self.tasks[0]

    def layouts(self, n: np.ndarray) -> np.ndarray:
        """(len(n), any): the layouts of these examples; column 0 is the length."""
        task = self._task
        index = n % len(self.items)
        if not self.fixed:
            epochs = n // len(self.items)
            for epoch in np.unique(epochs):
                here = epochs == epoch
                key = keyed.key(self.key, "epoch", int(epoch))
                index[here] = keyed.permutation_at(key, len(self.items), index[here])
        uniform = keyed.uniform(self.key, n, task.draws) if task.draws else np.empty((len(n), 0))
        layout = task.layout(self.items[index], uniform, self.source, self.room)
        longest = int(layout[:, 0].max(initial=0))
        if longest > self.room:
            raise UserError(
                f"tasks.{task.name}: layout() gave an example of {longest} tokens, rows hold "
                f"{self.room}"
            )
        return layout

    def example(self, n: int, layout: np.ndarray) -> Example:
        """The n-th example, arranged by the first task of the blend and labelled by all."""
        first = self._task
        example = first.example(layout, self.source, self._generator(first, "example", n))
        if len(example) != layout[0]:
            raise UserError(
                f"tasks.{first.name}: example() made {len(example)} tokens where layout() said "
                f"{layout[0]}; the two must agree"
            )
        source: Any = self.source
        for task in self.tasks:
            task.label(example, source, self._generator(task, "label", n))
        if self.segments:
            np.minimum(example.segments, self.segments - 1, out=example.segments)
        return example

    def _generator(self, task: Task, use: str, n: int) -> np.random.Generator:
        return keyed.generator(keyed.key(self.key, task.name, use), n)

    @cached_property
    def mean_tokens(self) -> Fraction:
        """Tokens of a row that an example takes on average: its own, what it is lengthened by to
        fill the row, and what stays free. Over the first few thousand; it turns tokens into
        examples."""
        lengths = self.layouts(np.arange(min(_SAMPLE, len(self.items))))[:, 0]
        return Fraction(len(pack(lengths, self.room)) * self.room, len(lengths))


Entry = tuple[int, int, np.ndarray]  # which feed, n, layout
Row = list[Entry]


def fill(row: Row, room: int) -> Row:
    """The free space of a row given to the examples in it that could be longer."""
    free = room - sum(int(layout[0]) for _, _, layout in row)
    for k, (feed, n, layout) in enumerate(row):
        more = min(free, int(layout[1]))
        if more > 0:
            longer = layout.copy()
            longer[:2] += more, -more
            row[k] = (feed, n, longer)
            free -= more
    return row


Built: TypeAlias = list[list[tuple[Entry, Example]]]
"""Rows of examples, each with where it comes from."""


def build_examples(feeds: Sequence[Feed], rows: Sequence[Row]) -> Built:
    """The examples of rows."""
    return [[(entry, feeds[entry[0]].example(*entry[1:])) for entry in row] for row in rows]


def collate_built(feeds: Sequence[Feed], built: Built, length: int, pad: int) -> Batch:
    """Examples that were built, as one batch."""
    rows = [[(example, feeds[entry[0]].task_id) for entry, example in row] for row in built]
    return collate(rows, length=length, pad=pad)


def build_rows(feeds: Sequence[Feed], rows: Sequence[Row], length: int, pad: int) -> Batch:
    """Examples of the rows, built and collated."""
    return collate_built(feeds, build_examples(feeds, rows), length, pad)


def held_out_rows(feed: Feed, feed_number: int, most: int) -> list[Row]:
    """The first `most` held-out examples of a feed, packed: the same at every evaluation."""
    n = np.arange(min(most, len(feed.items)))
    layouts = feed.layouts(n)
    packed = pack(layouts[:, 0], feed.room)
    return [[(feed_number, int(n[i]), layouts[i]) for i in row] for row in packed]


def make_feeds(
    blends: Sequence[str],
    tasks: Mapping[str, Task],
    task_ids: Mapping[str, int],
    sources: Mapping[str, Sequence[tuple[str, Any, float]]],
    *,
    seed: int,
    length: int,
    fixed: bool = False,
    segments: int = 0,
) -> tuple[list[Feed], dict[str, list[tuple[int, float]]]]:
    """The feeds of every blend, and which of them a blend draws from in what share.

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
