"""A task together with the files it learns from: what a person names in Python.

    palm.tasks.Classification(train="train.tsv", dev="dev.tsv", columns={"text_a": "sentence"})
    palm.TaskOn(MyTask, train=my_rows, smoothing=0.1)

It becomes an entry of a recipe's `tasks` and one of its `sources`. Rows may be files, or anything
that gives mappings, such as a list, a generator function or a data set: a reader of one's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.plugins import name_of
from palm_ds.data.task import Task, find, known_kinds

Rows: TypeAlias = (
    str
    | Path
    | Iterable[str | Path | Mapping[str, Any]]
    | Callable[[], Iterable[Mapping[str, Any]]]
)
"""A file, a pattern or a folder of `datasets`; several; or rows, or what makes them when called."""
_WORDS = {"reuse_head_with": "share", "set_as_aux": "auxiliary"}
"""PaddlePALM's words for keys of tasks."""


class TaskOn:
    """A kind of task, or a class of one's own, on rows to train and evaluate on.

    Further keywords are the task's own keys; `reuse_head_with` is PaddlePALM's word for `share`.
    """

    def __init__(
        self,
        kind: str | type[Task],
        *,
        train: Rows | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        **options: Any,
    ):
        """`columns` {role: column} and the other keys of a source's `read` say how files are read
        (docs/finetuning.md); without `train` it reads the rows of the task it is blended with."""
        self.kind = kind if isinstance(kind, str) else kind_of(kind)
        find(self.kind, "TaskOn")
        self.name = name or self.kind.rpartition(".")[2].lower()
        self.train, self.dev = train, dev
        self.read = {**(read or {}), **({"columns": dict(columns)} if columns else {})}
        self.options = {_WORDS.get(key, key): value for key, value in options.items()}
        self.mix_ratio = mix_ratio

    @property
    def auxiliary(self) -> bool:
        """It is there to help the others."""
        return bool(self.options.get("auxiliary"))

    def entry(self, source: str) -> dict[str, Any]:
        """What stands in a recipe's `tasks` under the task's name."""
        return {"kind": self.kind, "source": source, **self.options}

    def source(self, folder: Path) -> dict[str, Any]:
        """What stands in a recipe's `sources`; rows that are no files become files in `folder`."""
        if self.train is None:
            raise UserError(f"{self.name}: there are no rows to learn from; give it `train`")
        values: dict[str, Any] = {"table": files(self.train, folder / f"{self.name}.train.jsonl")}
        if self.dev is not None:
            values["validation"] = files(self.dev, folder / f"{self.name}.dev.jsonl")
        return values | ({"read": dict(self.read)} if self.read else {})


def files(rows: Rows, path: Path) -> str | list[str]:
    """Rows as a recipe names them; those that are no files are written to `path`."""
    if isinstance(rows, str | Path):
        return str(rows)
    found: list[Any] = list(rows() if callable(rows) else rows)
    if found and all(isinstance(each, str | Path) for each in found):
        return [str(each) for each in found]
    for number, row in enumerate(found):
        if not isinstance(row, Mapping):
            raise UserError(f"row {number} of {path.stem}: expected a mapping, got {row!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(dict(row), ensure_ascii=False, default=_plain) for row in found)
    # every process of a run writes it
    write_file_atomically(path, "".join(f"{line}\n" for line in lines))
    return str(path)


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as Python's own."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def kind_of(task: type[Task]) -> str:
    """What a recipe calls a task's class. Raises UserError where it could not find it again."""
    for kind, module in known_kinds().items():
        if task.__module__ == module:
            return kind
    return name_of(task)


def named(name: str) -> Callable[..., TaskOn]:
    """`Classification` -> TaskOn of that kind. Raises AttributeError where there is no such
    task."""
    kinds = {"".join(part.title() for part in kind.split("_")): kind for kind in known_kinds()}
    if name.startswith("_") or name not in kinds:
        raise AttributeError(f"no task {name!r}{suggest(name, kinds)}")

    def on(**values: Any) -> TaskOn:
        return TaskOn(kinds[name], **values)

    on.__name__ = on.__qualname__ = name
    on.__doc__ = find(kinds[name]).__doc__
    return on
