"""The items of a task in the order in which a run reads them.

    a table, a small corpus   all items in memory, shuffled differently in every epoch
    a large corpus            windows of blocks (data/sources/corpus_blocks.py), two or three in
                              memory; the counts of items per block say where any n is
    held-out documents        the same items in every epoch
    a reader without end      row n of the reader is item n; an epoch is a pass

Every epoch has every item exactly once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Thread
from typing import Generic, NamedTuple, Protocol

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.lru_cache import RecentlyUsed
from palm_ds.common.messages import counted
from palm_ds.common.rng import derive_key, permutation_at
from palm_ds.data.sources.corpus import CorpusSource, CorpusSplit
from palm_ds.data.sources.corpus_blocks import BlockOrder
from palm_ds.data.sources.table import EndlessSources, TableSource
from palm_ds.data.stream.item_counts import ItemCounts, item_counts
from palm_ds.data.tasks.task import CorpusTask, SourceT, TableTask, Task

_CACHED_WINDOWS = 3
"""Windows in memory: examples of two are packed together, and rows are built a little later."""


class Found(NamedTuple, Generic[SourceT]):
    """Some of the items that were looked up, all of one source."""

    places: np.ndarray
    """Their places among those that were looked up."""
    source: SourceT
    items: np.ndarray


class ItemOrder(Protocol[SourceT]):
    """Numbered items, n = 0, 1, ...: epoch after epoch."""

    def __len__(self) -> int:
        """The items of an epoch."""
        ...

    def up_to(self, most: int) -> int:
        """The items of an epoch if they are fewer, else `most`; cheaper than `len`."""
        ...

    def look_up(self, n: np.ndarray) -> Iterator[Found[SourceT]]:
        """The items of these numbers, grouped by source."""
        ...

    def source_of(self, n: int) -> SourceT:
        """The source of one item."""
        ...


@dataclass(frozen=True)
class WholeOrder(Generic[SourceT]):
    """The items of a source that is in memory."""

    source: SourceT
    items: np.ndarray
    key: int
    fixed: bool

    def __len__(self) -> int:
        return len(self.items)

    def up_to(self, most: int) -> int:
        return min(most, len(self.items))

    def look_up(self, n: np.ndarray) -> Iterator[Found[SourceT]]:
        epochs, index = np.divmod(n, len(self.items))
        if not self.fixed:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                key = derive_key(self.key, "epoch", int(epoch))
                index[here] = permutation_at(key, len(self.items), index[here])
        yield Found(np.arange(len(n)), self.source, self.items[index])

    def source_of(self, n: int) -> SourceT:
        return self.source


@dataclass(frozen=True)
class EndlessOrder:
    """The items of a reader that has no end, in its order: row n is item n; an epoch is a pass."""

    tasks: Sequence[TableTask]
    rows: EndlessSources
    max_length: int

    def __len__(self) -> int:
        return self.rows.pass_examples

    def up_to(self, most: int) -> int:
        return min(most, self.rows.pass_examples)

    def look_up(self, n: np.ndarray) -> Iterator[Found[TableSource]]:
        windows = n // self.rows.window
        for window in np.unique(windows).tolist():
            here = np.flatnonzero(windows == window)
            source = self.rows.source(window)
            items = self._items(source)
            yield Found(here, source, items[n[here] - window * self.rows.window])

    def source_of(self, n: int) -> TableSource:
        return self.rows.source(n // self.rows.window)

    def _items(self, source: TableSource) -> np.ndarray:
        """The items of a window, one for each row. Raises UserError for rows that a task cannot
        learn from."""
        names = " + ".join(task.name for task in self.tasks)
        return source.cached(f"items of {names}", lambda: self._made(source))

    def _made(self, source: TableSource) -> np.ndarray:
        for task in self.tasks:
            task.check(source, labeled=True)
        items = self.tasks[0].training_items(source, self.max_length)
        if len(items) != len(source):
            raise UserError(
                f"{self.rows.where}: tasks.{self.tasks[0].name} makes {len(items):,} examples from "
                f"{len(source):,} rows; with a reader, a task must make one from each"
            )
        return items


class Window(NamedTuple):
    """The items of some blocks, shuffled."""

    source: CorpusSource
    items: np.ndarray
    first: int = 0
    """The number of the first item."""

    def __contains__(self, n: object) -> bool:
        return isinstance(n, int) and 0 <= n - self.first < len(self.items)


@dataclass(frozen=True)
class WindowReader:
    """Makes the windows of one task."""

    task: CorpusTask
    split: CorpusSplit
    max_length: int

    def read(self, blocks: np.ndarray, key: int) -> Window:
        """The window of some ascending blocks."""
        source = self.split.window(blocks)
        items = self.task.items(source, self.max_length) if len(source) else np.zeros((0, 1))
        order = permutation_at(key, len(items), np.arange(len(items)))
        return Window(self._with_others(source) if len(items) else source, items[order])

    def _with_others(self, source: CorpusSource) -> CorpusSource:
        """The source; with the sample of the corpus, if it is too small for the task by itself (its
        only document has no other to be paired with)."""
        try:
            self.task.check(source, self.max_length)
        except UserError:
            documents = np.union1d(source.documents, self.split.reference.documents)
            return replace(source, documents=documents)
        return source


@dataclass(frozen=True)
class _Group:
    """The windows of a group of segments."""

    windows: list[np.ndarray]
    upto: np.ndarray
    """(windows + 1,) the items of the epoch before each window."""


@dataclass(frozen=True)
class _Epoch:
    """The windows of an epoch, and how many items they have."""

    order: BlockOrder
    counts: ItemCounts

    @cached_property
    def upto(self) -> np.ndarray:
        """(groups + 1,) the items before each group."""
        groups = range(self.order.groups)
        items = [self.counts.of_segments[self.order.group_segments(g)].sum() for g in groups]
        return np.cumsum([0, *items])

    @cached_property
    def _groups(self) -> RecentlyUsed[int, _Group]:
        return RecentlyUsed(2)

    def group(self, number: int) -> _Group:
        """The windows of a group."""
        return self._groups.get(number, lambda: self._make_group(number))

    def _make_group(self, number: int) -> _Group:
        fetch = Thread(target=self.order.prefetch, args=(number,), daemon=True)
        fetch.start()
        windows = self.order.windows(number)
        items = [self.counts.of_blocks[blocks].sum() for blocks in windows]
        return _Group(windows, np.cumsum([self.upto[number], *items]))

    def places(self, n: np.ndarray) -> np.ndarray:
        """(len(n), 2) the group and the window of each item of the epoch."""
        groups = np.searchsorted(self.upto, n, side="right") - 1
        windows = np.empty_like(n)
        for group in np.unique(groups).tolist():
            here = groups == group
            windows[here] = np.searchsorted(self.group(group).upto, n[here], side="right") - 1
        return np.column_stack([groups, windows])


@dataclass(frozen=True)
class WindowedOrder:
    """The items of a large corpus, window by window."""

    reader: WindowReader
    key: int

    @cached_property
    def counts(self) -> ItemCounts:
        """The items of all blocks."""
        return item_counts(self.reader.task, self.reader.split, self.reader.max_length)

    @cached_property
    def _items(self) -> int:
        return int(self.counts.of_segments.sum())

    def __len__(self) -> int:
        return self._items

    def up_to(self, most: int) -> int:
        return min(most, self._items)

    def look_up(self, n: np.ndarray) -> Iterator[Found[CorpusSource]]:
        epochs, within = np.divmod(n, self._items)
        for number in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == number)
            epoch = self._epoch(number)
            places, which = np.unique(epoch.places(within[here]), axis=0, return_inverse=True)
            for i, (group, place) in enumerate(places.tolist()):
                these = here[which.ravel() == i]
                window = self._window(number, group, place)
                yield Found(these, window.source, window.items[n[these] - window.first])

    def source_of(self, n: int) -> CorpusSource:
        kept = next((window for window in self._windows.values() if n in window), None)
        return kept.source if kept else next(self.look_up(np.array([n]))).source

    @cached_property
    def _epochs(self) -> RecentlyUsed[int, _Epoch]:
        return RecentlyUsed(2)

    @cached_property
    def _windows(self) -> RecentlyUsed[tuple[int, int, int], Window]:
        return RecentlyUsed(_CACHED_WINDOWS)

    def _epoch(self, number: int) -> _Epoch:
        def make() -> _Epoch:
            order = BlockOrder(
                self.reader.split.blocks, number, derive_key(self.key, "epoch", number)
            )
            return _Epoch(order, self.counts)

        return self._epochs.get(number, make)

    def _window(self, epoch: int, group: int, window: int) -> Window:
        def make() -> Window:
            members = self._epoch(epoch).group(group)
            blocks = members.windows[window]
            key = derive_key(self.key, "window", epoch, group, window)
            made = self.reader.read(blocks, key)
            self._check(len(made.items), int(self.counts.of_blocks[blocks].sum()))
            return made._replace(first=epoch * self._items + int(members.upto[window]))

        return self._windows.get((epoch, group, window), make)

    def _check(self, made: int, found: int) -> None:
        if made != found:
            raise UserError(
                f"tasks.{self.reader.task.name}: items() made {made} items of a window of "
                f"{self.reader.split.corpus.path} and {found} of its blocks one by one; the "
                "items of a document must not depend on other documents"
            )


@dataclass(frozen=True)
class HeldOutOrder:
    """The held-out items of a large corpus, the same in every run. Only the windows that are
    needed are made: nothing is counted."""

    reader: WindowReader

    def __len__(self) -> int:
        return self.up_to(sys.maxsize)

    @cached_property
    def _unread(self) -> Iterator[Window]:
        order = BlockOrder(self.reader.split.blocks, 0, derive_key("held out"))
        for group in range(order.groups):
            for number, blocks in enumerate(order.windows(group)):
                yield self.reader.read(blocks, derive_key("held out", group, number))

    @cached_property
    def _read(self) -> list[Window]:
        return []

    def up_to(self, most: int) -> int:
        items = sum(len(window.items) for window in self._read)
        while items < most and (window := next(self._unread, None)):
            self._read.append(window)
            items += len(window.items)
        return min(items, most)

    def look_up(self, n: np.ndarray) -> Iterator[Found[CorpusSource]]:
        self.up_to(int(n.max(initial=-1)) + 1)
        upto = np.cumsum([0, *(len(window.items) for window in self._read)])
        windows = np.searchsorted(upto, n, side="right") - 1
        for number in np.unique(windows).tolist():
            here = np.flatnonzero(windows == number)
            window = self._read[number]
            yield Found(here, window.source, window.items[n[here] - upto[number]])

    def source_of(self, n: int) -> CorpusSource:
        return next(self.look_up(np.array([n]))).source


def item_order(
    task: Task[SourceT], source: SourceT, max_length: int, key: int, fixed: bool
) -> ItemOrder[SourceT]:
    """The order of the items of a task. `fixed`: held-out data, the same in every epoch. Raises
    UserError if there are none."""
    order = _windowed(task, source, max_length, key, fixed)
    if order is None:
        items_of = task.items if fixed else task.training_items
        order = WholeOrder(source, items_of(source, max_length), key, fixed)
    if not order.up_to(1):
        table = isinstance(source, TableSource)
        read = counted(len(source), "row" if table else "document")
        hint = "" if table else "; tasks over sentences need several in a document that fit a row"
        raise UserError(
            f"tasks.{task.name}: nothing in {source.name} makes an example for rows of "
            f"{max_length} tokens ({read} read){hint}"
        )
    return order


def _windowed(
    task: Task, source: CorpusSource | TableSource, max_length: int, key: int, fixed: bool
) -> ItemOrder | None:
    """The order of a task over a large corpus; None for other sources."""
    if not (isinstance(task, CorpusTask) and isinstance(source, CorpusSource)):
        return None
    task.check(source, max_length)
    if source.split is None:
        return None
    reader = WindowReader(task, source.split, max_length)
    return HeldOutOrder(reader) if fixed else WindowedOrder(reader, key)
