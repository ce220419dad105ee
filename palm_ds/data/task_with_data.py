"""A task together with its data, as defined in Python.

    palm.tasks.Classification.on(train="train.tsv", dev="dev.tsv", columns={"text_a": "sentence"})
    MyTask.on(train=my_rows, smoothing=0.1)

It becomes an entry of a recipe's `tasks` and one of its `sources`. Rows may be files, or any
iterable of mappings, such as a list, a generator function, a dataset or a user-defined reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.errors import UserError
from palm_ds.data.reader import Table, TableSettings, open_table
from palm_ds.data.reader.memory_rows import memory_rows, plain

Rows: TypeAlias = (
    str
    | Path
    | Iterable[str | Path | Mapping[str, Any]]
    | Callable[[], Iterable[Mapping[str, Any]]]
)
"""A file, a pattern or a `datasets` folder; several; rows; or a function returning rows."""


@dataclass(frozen=True, kw_only=True)
class NamedRows:
    """Rows in memory, by the name of the argument that messages refer to."""

    name: str
    rows: tuple[Any, ...]


@dataclass(kw_only=True)
class TaskWithData:
    """A task and the rows it learns from, as `Task.on` makes it."""

    kind: str
    """As in a recipe: the name of a file of palm_ds/tasks, or `module.Class`."""
    name: str
    train: Rows | None = None
    """None: it reads the rows of the task it is blended with."""
    dev: Rows | None = None
    read: Mapping[str, Any] = field(default_factory=dict)
    """How files are read, as in a source's `read`."""
    mix_ratio: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)
    """The task's keys."""
    in_memory: dict[str, NamedRows] = field(default_factory=dict, init=False, repr=False)
    """{file that rows in memory were written to: the rows}."""

    @property
    def auxiliary(self) -> bool:
        """Whether it only supports the other tasks."""
        return bool(self.settings.get("auxiliary"))

    def entry(self, source: str) -> dict[str, Any]:
        """The task's entry in a recipe's `tasks`."""
        return {"kind": self.kind, "source": source, **self.settings}

    def source(self, folder: Path) -> dict[str, Any]:
        """Its entry in a recipe's `sources`; rows in memory are written to files in `folder`."""
        if self.train is None:
            raise UserError(f"{self.name}: no rows to train on; give it `train`")
        values: dict[str, Any] = {"table": self._files(self.train, folder, "train")}
        if self.dev is not None:
            values["validation"] = self._files(self.dev, folder, "dev")
        return values | ({"read": dict(self.read)} if self.read else {})

    def _files(self, rows: Rows, folder: Path, argument: str) -> str | list[str]:
        """Rows as a recipe refers to them."""
        found = listed(rows)
        if not isinstance(found, tuple):
            return found
        path = folder / f"{self.name}.{argument}.jsonl"
        self.in_memory[str(path)] = NamedRows(name=argument, rows=found)
        memory_rows(argument, found)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(plain(row), ensure_ascii=False) for row in found)
        # every process of a run writes this file
        write_file_atomically(path, "".join(f"{line}\n" for line in lines))
        return str(path)


Listed: TypeAlias = str | list[str] | tuple[Any, ...]
"""Paths of files, or a tuple of rows."""


def listed(rows: Rows) -> Listed:
    """The paths of the files, or the rows, generated once."""
    if isinstance(rows, str | Path):
        return str(rows)
    found = tuple(rows() if callable(rows) else rows)
    paths = [str(each) for each in found if isinstance(each, str | Path)]
    return paths if paths and len(paths) == len(found) else found


def open_rows(rows: Listed, settings: TableSettings, name: str) -> Table:
    """The table of files or rows; messages refer to rows as `name[0]`. Raises UserError."""
    if isinstance(rows, tuple):
        return Table.from_rows(rows, settings, name=name)
    return open_table(rows, settings)
