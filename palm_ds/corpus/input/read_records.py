"""Reads the records in a span of an input; malformed ones are reported, not dropped.

for found in RecordReader(inputs[0], span, options):
    ...   # a Record, or a Rejection with its reason and line
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, TypeVar

from palm_ds.common.errors import UserError
from palm_ds.common.remote_files import is_url
from palm_ds.corpus.input import python_docs
from palm_ds.corpus.input.compression import open_bytes, open_stored, reading
from palm_ds.corpus.input.discover import Input, InputSpan, open_dataset
from palm_ds.corpus.input.ernie_lines import ernie_record
from palm_ds.corpus.input.json_array import elements
from palm_ds.corpus.input.options import InputOptions
from palm_ds.corpus.input.records import (
    BadRecordError,
    Record,
    RecordOrRejection,
    Rejection,
    SourceLocation,
    plain_record,
    record_of,
    required_fields,
    type_name,
)

T = TypeVar("T")

LONGEST = 64 << 20  # bytes of one document; bounds memory
_EXCERPT = 120  # characters kept of a rejected line
_ROWS = 256  # rows per read of a table


class Lines:
    """Iterates over the lines of a span; `count` is the number of lines so far."""

    def __init__(self, handle: BinaryIO, start: int, end: int) -> None:
        self.handle, self.at, self.end = handle, start, end
        self.count = 0
        if start:
            handle.seek(start)

    def __iter__(self) -> Iterator[tuple[int, int, bytes, int]]:
        """Yields (number, offset, line without line end, bytes with line end). Lines over LONGEST
        bytes are truncated."""
        while (self.end < 0 or self.at < self.end) and (line := self.handle.readline(LONGEST + 1)):
            size = len(line)
            while size > LONGEST and not line.endswith(b"\n"):
                rest = self.handle.readline(LONGEST)
                size += len(rest)
                if not rest or rest.endswith(b"\n"):
                    break
            self.count += 1
            start, self.at = self.at, self.at + size
            if start == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield self.count, start, line.removesuffix(b"\n").removesuffix(b"\r"), size


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
    found: T,
    place: SourceLocation,
    excerpt: Callable[[T], str],
) -> RecordOrRejection:
    """The record made by `make`, or a rejection with the reason."""
    try:
        return make(found, place)
    except BadRecordError as bad:
        return Rejection(bad.args[0], excerpt(found), place.line, place.cost)


def _each_line(
    lines: Iterable[tuple[int, int, bytes, int]],
    item: Input,
    make: Callable[[bytes, SourceLocation], Record],
) -> Iterator[RecordOrRejection]:
    for number, offset, line, cost in lines:
        yield _record_or_rejection(
            make, line, SourceLocation(f"{item.name}@{offset}", number, cost), _excerpt
        )


def _jsonl(lines: Lines, item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    return _each_line(lines, item, lambda line, at: record_of(json_row(line), at, options))


def json_row(line: bytes, *, unique: bool = False) -> dict:
    """Parses the JSON object in a line. `unique`: a key must not be given twice."""
    if len(line) > LONGEST:
        raise BadRecordError(f"longer than {LONGEST} bytes")
    if not line.strip():
        raise BadRecordError("empty line")
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except UnicodeDecodeError as error:
        raise BadRecordError(f"invalid UTF-8 at byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        raise BadRecordError(f"not JSON: {error.msg} at character {error.colno}") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadRecordError(f"not JSON: {error}") from None
    except RecursionError:
        raise BadRecordError("not JSON: nested too deeply") from None
    return _object(row)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRecordError(f"the key `{twice}` is given twice")
    return values


def _object(row: object) -> dict:
    if not isinstance(row, dict):
        raise BadRecordError(f"a JSON {type_name(row)}, expected an object")
    return row


def _ernie(lines: Lines, item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    return _each_line(lines, item, lambda line, at: ernie_record(decoded(line), at, item.mask_word))


def decoded(data: bytes) -> str:
    """Decodes a line or a document."""
    if len(data) > LONGEST:
        raise BadRecordError(f"longer than {LONGEST} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start)
        where = f"; line {line + 1} of the document" if line else ""
        raise BadRecordError(f"invalid UTF-8 at byte {error.start + 1}{where}") from None


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


def _after_header(lines: Lines) -> Iterator[tuple[int, int, bytes, int]]:
    return (line for line in lines if line[1])


def _tsv(lines: Lines, item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    """Reads cells separated by tabs; quotes have no special meaning."""
    names = _header(item, options, lambda text: text.split("\t"))
    return _each_line(
        _after_header(lines),
        item,
        lambda line, place: record_of(_row(line, names, lambda x: x.split("\t")), place, options),
    )


def _csv(lines: Lines, item: Input, options: InputOptions) -> Iterator[RecordOrRejection]:
    """Reads cells separated by commas, in quotes if they contain commas, quotes or line ends (RFC
    4180)."""
    names = _header(item, options, _csv_cells)
    return _each_line(
        _quoted_lines(_after_header(lines)),
        item,
        lambda line, place: record_of(_row(line, names, _csv_cells), place, options),
    )


def _quoted_lines(
    lines: Iterable[tuple[int, int, bytes, int]],
) -> Iterator[tuple[int, int, bytes, int]]:
    """Joins lines until their quotes are closed; the result has the number of the first line."""
    pending: list[bytes] = []
    first = start = size = 0
    for number, offset, line, cost in lines:
        if not pending:
            first, start, size = number, offset, 0
        pending.append(line)
        size += cost
        if size > LONGEST or sum(x.count(b'"') for x in pending) % 2 == 0:
            yield first, start, b"\n".join(pending), size
            pending = []
    if pending:
        yield first, start, b"\n".join(pending), size


def _csv_cells(text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True))
    except (csv.Error, StopIteration) as error:
        raise BadRecordError(f"not CSV: {error}") from None


def _row(line: bytes, names: list[str], cells: Callable[[str], list[str]]) -> dict[str, str]:
    if not line.strip():
        raise BadRecordError("empty line")
    values = cells(decoded(line))
    if len(values) != len(names):
        raise BadRecordError(f"{len(values)} cells, but the header has {len(names)}")
    return dict(zip(names, values, strict=True))


def _header(item: Input, options: InputOptions, cells: Callable[[str], list[str]]) -> list[str]:
    """Reads the column names in the first line. Raises UserError if a required one is missing."""
    with reading(item.path), open_bytes(item.path) as handle:
        line = next(iter(Lines(handle, 0, -1)), (0, 0, b"", 0))[2]
    try:
        names = [name.strip() for name in cells(decoded(line))] if line.strip() else []
    except BadRecordError as bad:
        raise UserError(f"input {item.path}: line 1, the column names: {bad}") from None
    if line.strip():
        _columns(names, item, options)
    return names


_LINE_READERS: Mapping[str, Callable[[Lines, Input, InputOptions], Iterator[RecordOrRejection]]] = {
    "jsonl": _jsonl,
    "tsv": _tsv,
    "csv": _csv,
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
                lambda value, place: record_of(_object(value), place, options),
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
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=columns):
                yield from _rows(batch.to_pylist(), row, item, options)
                row += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"input {item.path}: damaged parquet file: {error}") from None


def _read_arrow(item: Input, span: InputSpan, options: InputOptions) -> Iterator[RecordOrRejection]:
    table = open_dataset(item.path)
    table = table.select_columns(_columns(table.column_names, item, options))
    names = {name: getattr(kind, "names", None) for name, kind in table.features.items()}
    for start in range(span.start, span.end, _ROWS):
        columns = table[start : min(start + _ROWS, span.end)]
        for name, known in names.items():
            if known:  # a class label: use its name, not its number
                columns[name] = [
                    known[n] if n is not None and n >= 0 else None for n in columns[name]
                ]
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values())]  # noqa: B905
        yield from _rows(rows, start, item, options)


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
    rows: list[dict[str, Any]], first: int, item: Input, options: InputOptions
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
