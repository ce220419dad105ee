"""Rows of files of every format but blocks of lines (block_formats.py): values by column, or the
reason a row is bad."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palm_ds.common.errors import UserError, first_line
from palm_ds.common.rows.cells import CellRow, column_names, csv_rows, tsv_rows
from palm_ds.common.rows.columnar import dataset_rows, open_dataset, parquet_features, renamed_rows
from palm_ds.common.rows.lines import BadRecordError, Lines, decoded, json_row, not_utf8, type_name
from palm_ds.common.rows.stored import open_bytes, reading
from palm_ds.data.reader.annotation_tools import unfold
from palm_ds.data.reader.column_roles import pick
from palm_ds.data.reader.find_files import File
from palm_ds.data.reader.options import TableSettings, WholeRows
from palm_ds.data.reader.questions import is_questions, questions

_ROWS = 1000  # of a columnar file, converted to Python values per batch


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file: empty for an empty line; `bad` says why it cannot be read."""

    place: int | str  # a line or number from 1, or a readable name
    values: Mapping[Any, Any] = field(default_factory=dict)
    bad: str = ""
    unlabeled: str = ""
    """A note, if a tool says that the row has no label."""


def lines_of(file: File) -> Iterator[tuple[int, int, bytes, int]]:
    """The lines of a file as (number, offset, line, bytes); only a line feed ends a line."""
    lines: Lines | None = None
    with (
        reading(file.path, lambda: f" after line {lines.count if lines else 0}"),
        file.opened() as handle,
    ):
        lines = Lines(handle, 0, -1)
        yield from lines


def read_tsv(file: File, settings: TableSettings) -> Iterator[Row]:
    """Cells separated by tabs, without quoting. The delimiter space matches any number of them."""
    return _named(tsv_rows(lines_of(file), settings.delimiter or "\t"), file, settings)


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
    return _named(csv_rows(lines_of(file), settings.delimiter or ","), file, settings)


def _named(rows: Iterator[CellRow], file: File, settings: TableSettings) -> Iterator[Row]:
    """Cells keyed by the names in the first line; without a header by number."""
    names: list[str] | list[int] = []
    of = ""
    for row in rows:
        if not names and settings.header and (row.cells or row.bad):
            try:
                names, of = column_names(row), "the header"
            except BadRecordError as bad:
                what = "the names of the columns: " if row.bad else ""
                raise UserError(f"{file.path}:{row.line}: {what}{bad}") from None
            continue
        if not names and row.cells:
            names, of = list(range(len(row.cells))), f"line {row.line}"
        try:
            yield Row(row.line, row.values(names, of) if row.cells or row.bad else {})
        except BadRecordError as bad:
            yield Row(row.line, bad=bad.args[0])


def read_jsonl(file: File, settings: TableSettings) -> Iterator[Row]:
    """One JSON object per line."""
    for number, _, line, _ in lines_of(file):
        if not line.strip():
            yield Row(number)
            continue
        try:
            yield unfolded(number, json_row(line, unique=True))
        except BadRecordError as bad:
            array = "; format: json reads an array of rows" if line.startswith(b"[") else ""
            yield Row(number, bad=bad.args[0] + array)


def read_json(file: File, settings: TableSettings) -> Iterator[Row]:
    """One JSON value: an array of objects, possibly under `data`; or questions about passages."""
    value = _document(file)
    items = value.get("data") if isinstance(value, dict) else value
    if not isinstance(items, list):
        what = "no array under `data`" if isinstance(value, dict) else f"a JSON {type_name(value)}"
        raise UserError(f"{file.path}:1: {what}; expected an array of objects, or SQuAD's format")
    if any(map(is_questions, items[:1])):
        yield from (Row(*question) for question in questions(items))
        return
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            yield Row(number, bad=f"expected an object, got a JSON {type_name(item)}")
            continue
        try:
            yield unfolded(number, item)
        except BadRecordError as bad:
            yield Row(number, bad=bad.args[0])


def _document(file: File) -> Any:
    with reading(file.path), open_bytes(file.path) as handle:
        data = handle.read()
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file.path}:{line}: {not_utf8(error)}") from None
    except json.JSONDecodeError as error:
        where = f"{file.path}:{error.lineno}"
        raise UserError(f"{where}: not JSON: {error.msg} at character {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.path}:1: not JSON: {error}") from None


def unfolded(place: int, values: dict[str, Any]) -> Row:
    """A JSON object as a row. Raises BadRecordError."""
    plain, note = unfold(values)
    return Row(place, plain, unlabeled=note)


def read_parquet(file: File, settings: TableSettings) -> Iterator[Row]:
    """The rows of a parquet file; its schema may have class names, written by `datasets`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path, memory_map=True) as table:
            schema = table.schema_arrow
            sample = next(table.iter_batches(1), None)
            first = sample.to_pylist() if sample is not None else []
            if not first:
                return
            wanted = _wanted(schema.names, first[0], file, settings)
            batches = table.iter_batches(_ROWS, columns=wanted)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from _numbered(renamed_rows(rows, parquet_features(schema)))
    except (pa.ArrowException, OSError) as error:
        reason = first_line(error)
        raise UserError(f"{file.path}: damaged, or not a parquet file: {reason}") from None


def read_arrow(file: File, settings: TableSettings) -> Iterator[Row]:
    """The rows of an Arrow file, or of a folder saved by `datasets`."""
    table = open_dataset(file.path)
    if not len(table):
        return
    arrow: Any = table.with_format("arrow")  # slices are pyarrow tables
    first = arrow[:1].to_pylist()[0]
    wanted = _wanted(table.column_names, first, file, settings)
    yield from _numbered(dataset_rows(table, wanted, 0, len(table), size=_ROWS))


def _wanted(
    names: Sequence[str], first: dict[str, Any], file: File, settings: TableSettings
) -> list[str]:
    """The columns of the roles. A dot is part of a name, or leads into a nested value."""
    if isinstance(settings, WholeRows):
        return list(names)
    keys: list[Any] = []
    for key in pick(list(names), first, settings, file).values():
        keys += key if isinstance(key, list) else [key]
    return list(dict.fromkeys(key if key in names else key.split(".")[0] for key in keys))


def _numbered(rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    return (Row(number, values) for number, values in enumerate(rows, 1))
