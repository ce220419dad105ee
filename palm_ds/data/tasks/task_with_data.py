"""A task together with its data, as defined in Python.

    palm.tasks.Classification.on(train="train.tsv", dev="dev.tsv", columns={"text_a": "sentence"})
    MyTask(smoothing=0.1).on(train=my_rows)

It becomes an entry of a recipe's `tasks` and one of its `sources`. Rows may be files, or whatever
palm_ds/data/sources/row_inputs.py reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.errors import UserError
from palm_ds.common.plugins import name_of
from palm_ds.common.summary import Summary
from palm_ds.data.reader.table import memory_rows, plain
from palm_ds.data.sources.row_inputs import TUPLE_ROLES, Rows, dataset_names_of, listed


@dataclass(frozen=True, kw_only=True)
class NamedRows:
    """Rows in memory, by the name of the argument that messages refer to."""

    name: str
    rows: tuple[Any, ...]


@dataclass(kw_only=True, repr=False)
class TaskWithData(Summary):
    """A task and the rows it learns from, as `Task.on` makes it."""

    kind: str
    """As in a recipe: the name of a file of palm_ds/tasks, or `module.Class`."""
    name: str
    train: Rows | None = None
    """None: it reads the rows of the task it is blended with."""
    dev: Rows | None = None
    read: Mapping[str, Any] = field(default_factory=dict)
    """How files are read, as in a source's `read`."""
    tuple_roles: Sequence[str] = TUPLE_ROLES
    """The roles of the elements of rows that are tuples."""
    mix_ratio: float = 1.0
    pass_examples: int = 0
    """Rows of a pass of a reader without an end, which `train` is; 0: it is none."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The task's keys."""
    datasets: set[str] = field(default_factory=set, init=False)
    """Data sets on the hub that its rows are from, as far as they say so."""
    in_memory: dict[str, NamedRows] = field(default_factory=dict, init=False, repr=False)
    """{file that rows in memory were written to: the rows}."""

    def facts(self) -> dict[str, object]:
        given = {"train": self.train, "dev": self.dev}
        rows = {name: _shown(value) for name, value in given.items() if value is not None}
        return {"kind": self.kind, "name": self.name, **rows, **self.settings}

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
        values = self._reader() if self.pass_examples else self._table(folder)
        if self.dev is not None:
            self.dev = _kept(self.dev)
            values["validation"] = self._files(self.dev, folder, "dev")
        return values | ({"read": dict(self.read)} if self.read else {})

    def check_blended(self, first: TaskWithData) -> None:
        """Raises UserError for rows, or a way to read them, other than those of the task whose text
        it labels."""
        for key in ("train", "dev", "read"):
            own, read = getattr(self, key), getattr(first, key)
            if own is None or own is read or (isinstance(own, Mapping) and not own):
                continue
            if not (isinstance(own, str | Path | Mapping) and str(own) == str(read)):
                raise UserError(
                    f"{self.name}: labels the rows of {first.name}, so that its own "
                    f"{'columns or read' if key == 'read' else key} would not be used; give it to "
                    f"{first.name}, or train the two apart"
                )

    def _table(self, folder: Path) -> dict[str, Any]:
        assert self.train is not None
        self.train = _kept(self.train)
        return {"table": self._files(self.train, folder, "train")}

    def _reader(self) -> dict[str, Any]:
        """Of a reader without an end. Raises UserError for what recipes cannot name."""
        reader = self.train
        if not isinstance(reader, type | FunctionType):
            raise UserError(
                f"train: {reader!r:.60} has passes (pass_examples), but is neither a function nor "
                "a class of a module"
            )
        return {"reader": name_of(reader), "pass_examples": self.pass_examples}

    def _files(self, rows: Rows, folder: Path, argument: str) -> str | list[str]:
        """Rows as a recipe refers to them."""
        self.datasets |= dataset_names_of(rows)
        listed_rows = listed(rows, argument, self.tuple_roles)
        if not isinstance(listed_rows, tuple):
            return listed_rows
        path = folder / f"{self.name}.{argument}.jsonl"
        self.in_memory[str(path)] = NamedRows(name=argument, rows=listed_rows)
        memory_rows(argument, listed_rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(plain(row), ensure_ascii=False) for row in listed_rows)
        # every process of a run writes this file
        write_file_atomically(path, "".join(f"{line}\n" for line in lines))
        return str(path)


def _shown(rows: object) -> str:
    """Rows in a few words: their files or their number."""
    if isinstance(rows, str | Path):
        return str(rows)
    return f"{len(rows):,} rows" if isinstance(rows, Sized) else type(rows).__name__


def _kept(rows: Rows) -> Rows:
    """The rows themselves, or those of an iterator, which can be read only once."""
    return tuple(rows) if isinstance(rows, Iterator) else rows  # type: ignore[return-value]
