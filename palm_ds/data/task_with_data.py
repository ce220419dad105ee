"""A task together with its data, as named in Python.

    palm.tasks.Classification.on(train="train.tsv", dev="dev.tsv", columns={"text_a": "sentence"})
    MyTask.on(train=my_rows, smoothing=0.1)

It becomes an entry of a recipe's `tasks` and one of its `sources`. Rows may be files, or anything
that gives mappings, such as a list, a generator function or a data set: a user-defined reader.
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
"""A file, a pattern or a folder of `datasets`; several; or rows, or what makes them when called."""


@dataclass(kw_only=True)
class TaskWithData:
    """A task and the rows it learns from, as `Task.on` makes it."""

    kind: str
    """As in a recipe: the name of a file of palm_ds/tasks, or `module.Class`."""
    name: str
    train: Rows | None = None
    """Without them it reads the rows of the task it is blended with."""
    dev: Rows | None = None
    read: Mapping[str, Any] = field(default_factory=dict)
    """How files are read: a source's `read`."""
    mix_ratio: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)
    """The task's own keys."""

    @property
    def auxiliary(self) -> bool:
        """It is there to help the others."""
        return bool(self.settings.get("auxiliary"))

    def entry(self, source: str) -> dict[str, Any]:
        """What stands in a recipe's `tasks` under the task's name."""
        return {"kind": self.kind, "source": source, **self.settings}

    def source(self, folder: Path) -> dict[str, Any]:
        """What stands in a recipe's `sources`; rows that are no files become files in `folder`."""
        if self.train is None:
            raise UserError(f"{self.name}: there are no rows to learn from; give it `train`")
        values: dict[str, Any] = {
            "table": files(self.train, folder / f"{self.name}.train.jsonl", "train")
        }
        if self.dev is not None:
            values["validation"] = files(self.dev, folder / f"{self.name}.dev.jsonl", "dev")
        return values | ({"read": dict(self.read)} if self.read else {})


Listed: TypeAlias = str | list[str] | tuple[Any, ...]
"""Files by their paths, or a tuple of rows."""


def listed(rows: Rows) -> Listed:
    """The files, or the rows, made once."""
    if isinstance(rows, str | Path):
        return str(rows)
    found = tuple(rows() if callable(rows) else rows)
    paths = [str(each) for each in found if isinstance(each, str | Path)]
    return paths if paths and len(paths) == len(found) else found


def open_rows(rows: Listed, settings: TableSettings, name: str) -> Table:
    """The table of files, or of rows, which messages call `name[0]`. Raises UserError."""
    if isinstance(rows, tuple):
        return Table.from_rows(rows, settings, name=name)
    return open_table(rows, settings)


def files(rows: Rows, path: Path, name: str) -> str | list[str]:
    """Rows as a recipe names them; those in memory, called `name`, are written to `path`."""
    found = listed(rows)
    if not isinstance(found, tuple):
        return found
    memory_rows(name, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(plain(row), ensure_ascii=False) for row in found)
    # every process of a run writes it
    write_file_atomically(path, "".join(f"{line}\n" for line in lines))
    return str(path)
