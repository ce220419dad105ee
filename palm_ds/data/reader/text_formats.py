"""Rows of line-based and JSON files: values by column, or what is wrong with them."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.corpus.input.compression import open_bytes, reading
from palm_ds.corpus.input.read_records import Lines, decoded, json_row
from palm_ds.corpus.input.records import BadRecordError, type_name
from palm_ds.data.reader.find_files import File
from palm_ds.data.reader.options import TableSettings
from palm_ds.data.reader.questions import is_questions, questions

NumberedLines = Iterable[tuple[int, int, bytes, int]]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file: empty for an empty line; `bad` says why it cannot be read."""

    place: int | str  # a line or number from 1, or a readable name
    values: Mapping[Any, Any] = field(default_factory=dict)
    bad: str = ""


def lines_of(file: File) -> Iterator[tuple[int, int, bytes, int]]:
    """The lines of a file as (number, offset, line, bytes); only a line feed ends a line."""
    lines: Lines | None = None
    with (
        reading(file.path, lambda: f" after line {lines.count if lines else 0}"),
        open_bytes(file.path) as handle,
    ):
        lines = Lines(handle, 0, -1)
        yield from lines


def read_tsv(file: File, settings: TableSettings) -> Iterator[Row]:
    """Cells separated by tabs, without quoting. The delimiter space matches any number of them."""
    delimiter = settings.delimiter or "\t"

    def split(text: str) -> list[str]:
        return text.split(delimiter) if delimiter != " " else re.split(" +", text.strip(" "))

    def cells() -> Iterator[tuple[int, list[str] | str]]:
        for number, _, line, _ in lines_of(file):
            try:
                yield number, split(decoded(line)) if line else []
            except BadRecordError as bad:
                yield number, bad.args[0]

    return _named(cells(), file, settings)


def read_text(file: File, settings: TableSettings) -> Iterator[Row]:
    """A text on each line, also on an empty one."""
    for number, _, line, _ in lines_of(file):
        try:
            yield Row(number, {"text": decoded(line)})
        except BadRecordError as bad:
            yield Row(number, bad=bad.args[0])


def read_csv(file: File, settings: TableSettings) -> Iterator[Row]:
    """Cells separated by commas, quoted if they contain commas, quotes or newlines (RFC 4180)."""
    if len(settings.delimiter) > 1:
        raise UserError(f"delimiter {settings.delimiter!r}: csv needs a single character")
    return _named(_csv_cells(lines_of(file), settings.delimiter or ","), file, settings)


class _Decoded:
    """Decodes lines. Unlike a generator it continues after a line that is not valid text."""

    def __init__(self, lines: NumberedLines) -> None:
        self.lines, self.number = iter(lines), 0

    def __iter__(self) -> _Decoded:
        return self

    def __next__(self) -> str:
        self.number, _, line, _ = next(self.lines)
        return decoded(line) + "\n"


def _csv_cells(lines: NumberedLines, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    text = _Decoded(lines)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        first = text.number + 1
        try:
            yield first, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield first, f"not CSV: {error}"
        except BadRecordError as bad:
            yield text.number, bad.args[0]


def _named(
    rows: Iterator[tuple[int, list[str] | str]], file: File, settings: TableSettings
) -> Iterator[Row]:
    """Cells keyed by the names in the first line; without a header by number."""
    names: list[str] | list[int] = []
    of = ""
    for number, cells in rows:
        if isinstance(cells, str):
            if settings.header and not names:
                raise UserError(f"{file.path}:{number}: the names of the columns: {cells}")
            yield Row(number, bad=cells)
        elif not cells:
            yield Row(number)
        elif not names and settings.header:
            names, of = _header(cells, f"{file.path}:{number}"), "the header"
        else:
            if not names:
                names, of = list(range(len(cells))), f"line {number}"
            if len(cells) == len(names):
                yield Row(number, dict(zip(names, cells, strict=True)))
            else:
                yield Row(number, bad=f"{_count(cells)}, but {of} has {len(names)}")


def _count(cells: list[str]) -> str:
    return f"{len(cells)} cell{'s' * (len(cells) != 1)}"


def _header(cells: list[str], where: str) -> list[str]:
    if any("\r" in name.strip() for name in cells):
        raise UserError(f"{where}: its lines end with CR alone; only a line feed ends a line")
    names = [name.strip() for name in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{where}: two columns have the name `{' '.join(twice[0].split())}`")
    return names


def read_jsonl(file: File, settings: TableSettings) -> Iterator[Row]:
    """One JSON object per line."""
    for number, _, line, _ in lines_of(file):
        if not line.strip():
            yield Row(number)
            continue
        try:
            yield Row(number, unfold(json_row(line, unique=True)))
        except BadRecordError as bad:
            yield Row(number, bad=bad.args[0])


def read_json(file: File, settings: TableSettings) -> Iterator[Row]:
    """One JSON value: an array of objects, possibly under `data`; or questions about passages."""
    value = _document(file)
    items = value.get("data") if isinstance(value, dict) else value
    if not isinstance(items, list):
        what = "no array under `data`" if isinstance(value, dict) else f"a JSON {type_name(value)}"
        raise UserError(f"{file.path}:1: {what}; expected an array of objects, or SQuAD's format")
    if any(map(is_questions, items[:1])):
        yield from (Row(*found) for found in questions(items))
        return
    for number, item in enumerate(items, 1):
        if isinstance(item, dict):
            yield Row(number, unfold(item))
        else:
            yield Row(number, bad=f"expected an object, got a JSON {type_name(item)}")


def _document(file: File) -> Any:
    with reading(file.path), open_bytes(file.path) as handle:
        data = handle.read()
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file.path}:{line}: invalid UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        where = f"{file.path}:{error.lineno}"
        raise UserError(f"{where}: not JSON: {error.msg} at character {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.path}:1: not JSON: {error}") from None


def unfold(row: dict[str, Any]) -> dict[str, Any]:
    """Restaurants-8k's format as plain columns; any other row unchanged. Without `labels` it has no
    spans."""
    user = row.get("userInput")
    if not isinstance(user, dict) or "text" not in user:
        return row
    rest = {key: x for key, x in row.items() if key not in ("userInput", "context", "labels")}
    return {"text_a": user["text"], "spans": row.get("labels", []), **rest}
