"""Rows in memory, passed by a program in place of a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.data.reader.find_files import File
from palm_ds.data.reader.options import TableSettings
from palm_ds.data.reader.text_formats import Row

MEMORY = "memory"


@dataclass(frozen=True)
class MemoryRows(File):
    """Rows, with the name of their argument, such as `rows`."""

    rows: Sequence[Any]


def memory_rows(name: str, rows: Sequence[Any]) -> MemoryRows:
    """Raises UserError if there are no rows, or one is empty or not a mapping."""
    if not rows:
        raise UserError(f"{name}: no rows")
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not row:
            raise UserError(f"{name}[{index}]: expected a mapping with columns, got {row!r}")
    return MemoryRows(name, MEMORY, rows)


def read_memory(file: File, settings: TableSettings) -> Iterator[Row]:
    assert isinstance(file, MemoryRows)
    for index, row in enumerate(file.rows):
        yield Row(index, plain(row))


def plain(value: object) -> Any:
    """A value as JSON would return it: NumPy numbers and arrays as Python values, tuples as lists,
    anything unknown as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    to_list = getattr(value, "tolist", None)
    return str(value) if to_list is None else to_list()


def rows_hash(file: MemoryRows, settings: TableSettings) -> str:
    """A hash of the rows and the settings."""
    text = json.dumps([asdict(settings), plain(file.rows)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
