"""Reads the records in a span of an input; malformed ones are reported, not dropped.

for found in RecordReader(inputs[0], span, options):
    ...   # a Record, or a Rejection with its reason and line
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from palm_ds.common.errors import UserError
from palm_ds.common.remote_files import is_url
from palm_ds.common.rows.cells import CellRow, column_names, csv_rows, tsv_rows
from palm_ds.common.rows.columnar import dataset_rows, open_dataset, parquet_features, renamed_rows
from palm_ds.common.rows.json_array import elements
from palm_ds.common.rows.lines import (
    LONGEST,
    BadRecordError,
    Lines,
    NumberedLines,
    decoded,
    json_object,
    json_row,
)
from palm_ds.common.rows.stored import open_bytes, open_stored, reading
from palm_ds.corpus.input import python_docs
from palm_ds.corpus.input.discover import Input, InputSpan
from palm_ds.corpus.input.ernie_lines import ernie_record
from palm_ds.corpus.input.records import (
    Record,
    RecordOrRejection,
    Rejection,
    SourceLocation,
    plain_record,
    record_of,
    required_fields,
)
from palm_ds.corpus.options import InputOptions

T = TypeVar("T")

_EXCERPT = 120  # characters kept of a rejected line
_ROWS = 256  # rows per read of a table


class RecordReader:
    """Iterates over the records and rejections in a span; `lines` is complete after iterating."""

    def __init__(self, item: Input, span: InputSpan, options: InputOptions) -> None:
        self.item, self.span, self.options = item, span, options
        self._lines: Lines | None = None

    @property
    def lines(self) -> int:
        return self._lines.count if self._lines else 0

    def __iter__(self) -> Iterator[RecordOrRejection]:
        if self.item.kind == "embedded":
            return _read_embedded(self.span)
        if self.item.kind == "parquet":
            return _read_parquet(self.item, self.span, self.options)
        if self.item.kind == "arrow":
            return _read_arrow(self.item, self.span, self.options)
        if self.item.kind == "array":
            return _read_array(self.item, self.options)
        return self._read_lines()

    def _read_lines(self) -> Iterator[RecordOrRejection]:
        read = _LINE_READERS[
            self.options.text_documents if self.item.kind == "text" else self.item.kind
        ]
        with (
            reading(self.item.path, lambda: f" after line {self.lines}"),
            open_bytes(self.item.path) as handle,
        ):
            self._lines = Lines(handle, self.span.start, self.span.end)
            yield from read(self._lines, self.item, self.options)


def _excerpt(line: bytes) -> str:
    return line[: 4 * _EXCERPT].decode("utf-8", "backslashreplace")[:_EXCERPT]


def _record_or_rejection(
    make: Callable[[T, SourceLocation], Record],
    raw: T,
    place: SourceLocation,
    excerpt: Callable[[T], str],
) -> RecordOrRejection:
    """The record made by `make`, or a rejection with the reason."""
    try:
        return make(raw, place)
    except BadRecordError as bad:
        return Rejection(bad.args[0], excerpt(raw), place.line, place.cost)


def _each_line(
    lines: NumberedLines,
    item: Input,
    make: Callable[[bytes, SourceLocation], Record],
) -> Iterator[RecordOrRejection]:
    for number, offset, line, cost in lines:
        yield _record_or_rejection(
            make, line, SourceLocation(f"{item.name}@{offset}", number, cost), _excerpt
        )


def _jsonl(lines: Lines, item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    return _each_line(lines, item, lambda line, at: record_of(json_row(line), at, options))


def _ernie(lines: Lines, item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    return _each_line(lines, item, lambda line, at: ernie_record(decoded(line), at, item.mask_word))


def _text(data: bytes, place: SourceLocation) -> Record:
    return plain_record(decoded(data), place)


def _text_lines(lines: Lines, item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    return _each_line(lines, item, _text)


def _paragraphs(lines: Lines, item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    """Reads documents separated by empty lines."""
    pending: list[bytes] = []
    first, start, size = 0, 0, 0
    for number, offset, line, cost in lines:
        if not line.strip():
            if pending:
                place = SourceLocation(f"{item.name}@{start}", first, size + cost)
                yield _record_or_rejection(_text, b"\n".join(pending), place, _excerpt)
            pending, size = [], 0
            continue
        if not pending:
            first, start = number, offset
        size += cost
        if size - cost <= LONGEST:  # longer documents are rejected, so need not be kept
            pending.append(line)
    if pending:
        place = SourceLocation(f"{item.name}@{start}", first, size)
        yield _record_or_rejection(_text, b"\n".join(pending), place, _excerpt)


def _whole_file(lines: Lines, item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    pending, size = [], 0
    for _, _, line, cost in lines:
        if size <= LONGEST:
            pending.append(line)
        size += cost
    yield _record_or_rejection(
        _text, b"\n".join(pending), SourceLocation(item.name, 1, size), _excerpt
    )


def _cells(lines: Lines, item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    """Reads cells separated by tabs, or by commas with quotes (RFC 4180), under a header."""
    read = csv_rows if item.kind == "csv" else tsv_rows
    names = _header(item, options, read)

    def make(row: CellRow, place: SourceLocation) -> Record:
        if not row.source.strip():
            raise BadRecordError("empty line")
        return record_of(row.values(names), place, options)

    for row in read(lines):
        if row.offset:  # at 0 is the header
            place = SourceLocation(f"{item.name}@{row.offset}", row.line, row.size)
            yield _record_or_rejection(make, row, place, lambda row: _excerpt(row.source))


def _header(
    item: Input, options: InputOptions, read: Callable[[NumberedLines], Iterator[CellRow]]
) -> list[str]:
    """Reads the column names in the first row. Raises UserError if a required one is missing."""
    with reading(item.path), open_bytes(item.path) as handle:
        first = next(read(Lines(handle, 0, -1)), None)
    if first is None or not first.source.strip():
        return []
    try:
        names = column_names(first)
    except BadRecordError as bad:
        raise UserError(f"input {item.path}: line 1, the column names: {bad}") from None
    _columns(names, item, options)
    return names


_LINE_READERS: Mapping[str, Callable[[Lines, Input, InputOptions], Iterator[RecordOrRejection]]] = {
    "jsonl": _jsonl,
    "tsv": _cells,
    "csv": _cells,
    "ernie": _ernie,
    "line": _text_lines,
    "blank_line": _paragraphs,
    "file": _whole_file,
}


def _read_embedded(span: InputSpan) -> Iterator[RecordOrRejection]:
    documents = python_docs.all_documents()[span.start : span.end]
    for row, (name, text) in enumerate(documents, span.start):
        yield plain_record(text, SourceLocation(name, row, len(text)))


def _read_array(item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    """Reads a JSON array of objects."""
    with reading(item.path), open_bytes(item.path) as handle:
        for row, (value, size) in enumerate(elements(handle, item.path, LONGEST)):
            yield _record_or_rejection(
                lambda value, place: record_of(json_object(value), place, options),
                value,
                SourceLocation(f"{item.name}#{row}", row, size),
                lambda value: json.dumps(value, ensure_ascii=False)[:_EXCERPT],
            )


def _read_parquet(
    item: Input, span: InputSpan, options: InputOptions
) -> Iterator[RecordOrRejection]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with (
            open_stored(item.path) as handle,
            pq.ParquetFile(handle if is_url(item.path) else item.path, memory_map=True) as file,
        ):
            columns = _columns(file.schema_arrow.names, item, options)
            groups = range(span.start, span.end)
            row = sum(file.metadata.row_group(i).num_rows for i in range(span.start))
            batches = file.iter_batches(_ROWS, row_groups=groups, columns=columns)
            values = (row for batch in batches for row in batch.to_pylist())
            features = parquet_features(file.schema_arrow)
            yield from _rows(renamed_rows(values, features), row, item, options)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"input {item.path}: damaged parquet file: {error}") from None


def _read_arrow(item: Input, span: InputSpan, options: InputOptions) -> Iterator[RecordOrRejection]:
    table = open_dataset(item.path)
    columns = _columns(table.column_names, item, options)
    rows = dataset_rows(table, columns, span.start, span.end, size=_ROWS)
    return _rows(rows, span.start, item, options)


def _columns(names: list[str], item: Input, options: InputOptions) -> list[str]:
    """The columns to read. Raises UserError if a required one is missing."""
    wanted = []
    for either in required_fields(options) + ([(options.id_field,)] if options.id_field else []):
        there = [name for name in either if name in names]
        if not there:
            missing = " or ".join(f"`{name}`" for name in either)
            raise UserError(
                f"input {item.path}: no column {missing}; it has {', '.join(names)} "
                f"({_naming(options)})"
            )
        wanted.append(there[0])
    return wanted + (["id"] if options.id_field is None and "id" in names else [])


def _naming(options: InputOptions) -> str:
    if options.structure == "pairs":
        return "--pair_fields; --no_label if the pairs have none"
    if options.structure == "dialogues":
        return "--turns_field"
    return "--text_field, --id_field" + (", --title_field" if options.title_field else "")


def _rows(
    rows: Iterable[dict[str, Any]], first: int, item: Input, options: InputOptions
) -> Iterator[RecordOrRejection]:
    names = required_fields(options)[0]

    def make(row: dict[str, Any], place: SourceLocation) -> Record:
        return record_of(row, place, options)

    def main(row: dict[str, Any]) -> Any:
        return next((row[name] for name in names if name in row), None)

    for number, row in enumerate(rows, first):
        size = len(value) if isinstance(value := main(row), str) else 1
        place = SourceLocation(f"{item.name}#{number}", number, size)
        yield _record_or_rejection(make, row, place, lambda row: repr(main(row))[:_EXCERPT])
