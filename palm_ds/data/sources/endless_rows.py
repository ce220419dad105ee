"""Rows of a reader that has no end, by number.

    def reviews(start=0):                       # in a module of the user's own
        for number in itertools.count(start):
            yield {"text_a": ..., "label": ...}

    reader ──rows──> window 0 | window 1 | ...      each a TableSource; the last few are kept

A reader gives the same rows in the same order whenever it is called. Every process reads all of
them and takes its own by number, so a run has one curve whatever its processes, and a step is found
again after a restart: directly if the reader takes `start`, the number of its first row, otherwise
by reading what was there before it again.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.lru_cache import RecentlyUsed
from palm_ds.common.messages import counted
from palm_ds.common.plugins import import_callable
from palm_ds.data.reader import Table, TableSettings
from palm_ds.data.reader.formats import Row
from palm_ds.data.reader.table import MEMORY, ReadRows, plain
from palm_ds.data.sources.row_inputs import TUPLE_ROLES, listed
from palm_ds.data.sources.table import TableSource
from palm_ds.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
_WINDOW = 1024
"""Rows that are read and tokenized together."""
_KEPT = 3
"""Windows in memory: a step may begin in one and end in the next."""
_START = "start"


@dataclass(kw_only=True, eq=False)
class EndlessRows:
    """A reader, and how its rows become those of a table."""

    reader: str
    """`module.function`, or a class whose objects are iterable."""
    where: str
    """`sources.NAME.reader`, for messages."""
    pass_examples: int
    """Rows of a pass."""
    read: TableSettings
    tokenizer: Tokenizer
    tuple_roles: Sequence[str] = TUPLE_ROLES
    _next: int = -1
    """The number of the next row of `_rows`; -1: it is not open."""
    _rows: Iterator[Any] = field(default_factory=lambda: iter(()))
    _process: int = -1

    def __getstate__(self) -> dict[str, Any]:
        """Without the open reader, which cannot be pickled."""
        return {**vars(self), "_rows": iter(()), "_next": -1, "_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if value is not None})

    @property
    def window(self) -> int:
        """The rows of a window."""
        return min(_WINDOW, self.pass_examples)

    @cached_property
    def sample(self) -> Table:
        """The first window, which shows the columns and classes. Raises UserError."""
        return self._checked(
            Table.from_rows(self._listed(0), self.read, name=self.where), self.where
        )

    def source(self, number: int) -> TableSource:
        """A window, from 0. Raises UserError."""
        if "_kept" not in vars(self):
            self._kept: RecentlyUsed[int, TableSource] = RecentlyUsed(_KEPT)
        return self._kept.get(number, lambda: self._source(number))

    def _source(self, number: int) -> TableSource:
        table = self._table(number) if number else self.sample
        return TableSource(table, np.arange(len(table)), self.tokenizer, self.where)

    def _table(self, number: int) -> Table:
        known, first = self.sample.columns, number * self.window
        rows = [Row(first + n, plain(row)) for n, row in enumerate(self._listed(number))]
        table = Table.from_read(ReadRows(self.where, MEMORY, rows), self.read)
        place = f"{self.where}[{first}]"
        if set(table.columns) != set(known):
            raise UserError(
                f"{place}: from here on rows have the columns {', '.join(table.columns)}; before "
                f"they had {', '.join(known)}"
            )
        return self._checked(table, place)

    def _checked(self, table: Table, place: str) -> Table:
        if len(table) != self.window:
            raise UserError(f"{place}: {table.notes[0] if table.notes else 'rows are skipped'}")
        return table

    def _listed(self, number: int) -> Sequence[Any]:
        """The rows of a window, as mappings."""
        rows = listed(self._taken(number * self.window), self.where, self.tuple_roles)
        if not isinstance(rows, tuple):
            raise UserError(f"{self.where}: {self.reader} yields file names; it must yield rows")
        return rows

    def _taken(self, first: int) -> list[Any]:
        """The rows [first, first + window). Raises UserError if the reader has fewer."""
        # a forked process shares the files of its parent's reader
        is_open = self._next >= 0 and self._process == os.getpid()
        if not is_open or first < self._next or (first > self._next and self._takes_start):
            self._open(first)
        self._skip(first)
        rows = list(islice(self._rows, self.window))
        self._next = first + len(rows)
        if len(rows) < self.window:
            raise UserError(
                f"{self.where}: {self.reader} ended after {counted(self._next, 'row')}; it must "
                "not end, but start over; for rows that end use a `table`"
            )
        return rows

    def _open(self, first: int) -> None:
        options = {_START: first} if self._takes_start else {}
        made: object = self._function(**options)
        if not isinstance(made, Iterable) or isinstance(made, str | bytes):
            raise UserError(f"{self.where}: {self.reader}: expected rows, got {made!r:.60}")
        self._rows, self._process = iter(made), os.getpid()
        self._next = first if self._takes_start else 0

    def _skip(self, first: int) -> None:
        """Read up to the row `first`."""
        if (many := first - self._next) <= 0:
            return
        if many > _KEPT * self.window:
            log.info(
                f"{self.where}: {many:,} rows are read again and skipped; a reader with a "
                f"parameter `{_START}`, the number of its first row, would begin there"
            )
        next(islice(self._rows, many - 1, many), None)
        self._next = first

    @cached_property
    def _function(self) -> Callable[..., Any]:
        """The reader. Raises UserError for one that cannot be called without arguments."""
        function = import_callable(self.reader, self.where)
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            why = f"{error}; it is called without arguments"
            raise UserError(f"{self.where}: {self.reader}: {why}") from None
        return function

    @cached_property
    def _takes_start(self) -> bool:
        return _START in inspect.signature(self._function).parameters
