"""The items of a reader that has no end: row n of the reader is item n."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import EndlessSources, TableSource
from palm_ds.data.stream.item_order import Found
from palm_ds.data.tasks.task import TableTask


@dataclass(frozen=True)
class EndlessOrder:
    """The items in the order in which the reader gives them; an epoch is a pass."""

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
        return source.cached(f"items of {self.tasks[0].name}", lambda: self._made(source))

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
