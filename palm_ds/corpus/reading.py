"""A span of an input to documents, one at a time; what cannot be one is named, not dropped.

for record in read_span(inputs[0], span, options):
    ...   # Record(id, text), or Rejected(reason) with the line it stands on
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

from palm_ds.corpus import embedded
from palm_ds.corpus.inputs import Input, InputOptions, Span, open_dataset
from palm_ds.errors import UserError

LONGEST = 64 << 20  # bytes of one document; memory is bounded by it
_EXCERPT = 120  # characters of a rejected line that are kept
_ROWS = 256  # rows of a table read at once


@dataclass(frozen=True)
class Record:
    """A document as it stands in the input."""

    id: str
    text: str
    line: int  # counted from 1 within the span; a row of a table from 0 within the input
    cost: int  # bytes of the input, for progress


@dataclass(frozen=True)
class Rejected:
    """A line or row that is no document."""

    reason: str
    excerpt: str
    line: int
    cost: int


Found = Record | Rejected


class Lines:
    """The lines of a span with their numbers; `count` is how many there were."""

    def __init__(self, handle: BinaryIO, start: int, end: int) -> None:
        self.handle, self.at, self.end = handle, start, end
        self.count = 0
        if start:
            handle.seek(start)

    def __iter__(self) -> Iterator[tuple[int, int, bytes, int]]:
        """(number, offset, line without its end, bytes with it). A line over LONGEST comes cut."""
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


class SpanReader:
    """Iterates over a span's documents and rejected lines; `lines` is right at the end."""

    def __init__(self, item: Input, span: Span, options: InputOptions) -> None:
        self.item, self.span, self.options = item, span, options
        self._lines: Lines | None = None

    @property
    def lines(self) -> int:
        return self._lines.count if self._lines else 0

    def __iter__(self) -> Iterator[Found]:
        if self.item.kind == "embedded":
            return _read_embedded(self.span)
        if self.item.kind == "parquet":
            return _read_parquet(self.item, self.span, self.options)
        if self.item.kind == "arrow":
            return _read_arrow(self.item, self.span, self.options)
        return self._read_lines()

    def _read_lines(self) -> Iterator[Found]:
        read = {
            "jsonl": _jsonl,
            "line": _text_lines,
            "blank_line": _paragraphs,
            "file": _whole_file,
        }["jsonl" if self.item.kind == "jsonl" else self.options.text_documents]
        try:
            with _open(self.item) as handle:
                self._lines = Lines(handle, self.span.start, self.span.end)
                yield from read(self._lines, self.item.name, self.options)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            at = f"after line {self.lines}"
            raise UserError(f"input {self.item.path}: damaged gzip file {at}: {error}") from None
        except OSError as error:
            raise UserError(f"input {self.item.path}: cannot be read: {error}") from None


def _open(item: Input) -> BinaryIO:
    if item.compression == ".gz":
        return cast(BinaryIO, gzip.open(item.path, "rb"))
    if item.compression == ".zst":
        return io.BufferedReader(_Zstandard(item.path), 1 << 20)
    return open(item.path, "rb", buffering=1 << 20)


class _Zstandard(io.RawIOBase):
    """Decompresses frame after frame and, unlike the library's reader, notices a file cut short."""

    def __init__(self, path: str) -> None:
        import zstandard

        self.path, self._handle = path, open(path, "rb")  # noqa: SIM115
        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new()
        self._ready, self._waiting, self._begun = b"", b"", False

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._handle.close()
        super().close()

    def readinto(self, buffer) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._ready:
            data = self._waiting or self._handle.read(1 << 16)
            if not data:
                if self._begun:
                    raise UserError(f"input {self.path}: damaged zstd file: it ends too early")
                return 0
            self._advance(data)
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n

    def _advance(self, data: bytes) -> None:
        try:
            self._ready, self._begun = self._frame.decompress(data), True
        except self._error as error:
            raise UserError(f"input {self.path}: damaged zstd file: {error}") from None
        self._waiting = b""
        if self._frame.eof:
            self._waiting, self._frame, self._begun = self._frame.unused_data, self._new(), False


def _excerpt(line: bytes) -> str:
    return line[: 4 * _EXCERPT].decode("utf-8", "backslashreplace")[:_EXCERPT]


def _jsonl(lines: Lines, name: str, options: InputOptions) -> Iterator[Found]:
    for number, offset, line, cost in lines:
        try:
            identity, text = _fields(line, f"{name}@{offset}", options)
            yield Record(identity, text, number, cost)
        except _BadError as bad:
            yield Rejected(bad.args[0], _excerpt(line), number, cost)


class _BadError(Exception):
    """Why a line is no document."""


def _fields(line: bytes, default: str, options: InputOptions) -> tuple[str, str]:
    """(id, text) of a line of JSON."""
    if len(line) > LONGEST:
        raise _BadError(f"longer than {LONGEST} bytes")
    if not line.strip():
        raise _BadError("empty line")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadError(f"invalid UTF-8 at byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        raise _BadError(f"not JSON: {error.msg} at character {error.colno}") from None
    except RecursionError:
        raise _BadError("not JSON: nested too deep") from None
    if not isinstance(row, dict):
        raise _BadError(f"a JSON {type(row).__name__} where an object is due")
    return _row_fields(row, default, options)


def _row_fields(row: dict, default: str, options: InputOptions) -> tuple[str, str]:
    """(id, text) of a row that has fields."""
    field = options.text_field
    if field not in row:
        has = ", ".join(f"`{key}`" for key in list(row)[:8]) or "none"
        raise _BadError(f"no field `{field}`; it has {has}")
    return _identity(row, default, options), _checked(row[field], f"field `{field}`")


def _identity(row: dict, default: str, options: InputOptions) -> str:
    field = options.id_field
    value = row.get(field or "id")
    if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
        return _checked(str(value), "the id")
    if field is None:
        return default
    what = "no field" if field not in row else f"{type(value).__name__} in field"
    raise _BadError(f"{what} `{field}`, which is to be the id")


def _checked(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise _BadError(f"{what} is {'null' if text is None else type(text).__name__}, not text")
    if not text.strip():
        raise _BadError("empty text")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _BadError(
                f"{what}: half a surrogate pair at character {error.start + 1}"
            ) from None
    return text


def _decode(data: bytes) -> str:
    if len(data) > LONGEST:
        raise _BadError(f"longer than {LONGEST} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start)
        where = f"; line {line + 1} of the document" if line else ""
        raise _BadError(f"invalid UTF-8 at byte {error.start + 1}{where}") from None


def _text(data: bytes, identity: str, number: int, cost: int) -> Found:
    try:
        return Record(identity, _checked(_decode(data), "the text"), number, cost)
    except _BadError as bad:
        return Rejected(bad.args[0], _excerpt(data), number, cost)


def _text_lines(lines: Lines, name: str, options: InputOptions) -> Iterator[Found]:
    for number, offset, line, cost in lines:
        yield _text(line, f"{name}@{offset}", number, cost)


def _paragraphs(lines: Lines, name: str, options: InputOptions) -> Iterator[Found]:
    """Documents that an empty line ends."""
    held: list[bytes] = []
    first, start, size = 0, 0, 0
    for number, offset, line, cost in lines:
        if not line.strip():
            if held:
                yield _text(b"\n".join(held), f"{name}@{start}", first, size + cost)
            held, size = [], 0
            continue
        if not held:
            first, start = number, offset
        size += cost
        if size - cost <= LONGEST:  # what is longer is rejected whole: no need to keep it
            held.append(line)
    if held:
        yield _text(b"\n".join(held), f"{name}@{start}", first, size)


def _whole_file(lines: Lines, name: str, options: InputOptions) -> Iterator[Found]:
    held, size = [], 0
    for _, _, line, cost in lines:
        if size <= LONGEST:
            held.append(line)
        size += cost
    yield _text(b"\n".join(held), name, 1, size)


def _read_embedded(span: Span) -> Iterator[Found]:
    documents = embedded.all_documents()[span.start : span.end]
    for row, (name, text) in enumerate(documents, span.start):
        yield Record(name, text, row, len(text))


def _read_parquet(item: Input, span: Span, options: InputOptions) -> Iterator[Found]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(item.path, memory_map=True) as file:
            columns = _columns(file.schema_arrow.names, item, options)
            groups = range(span.start, span.end)
            row = sum(file.metadata.row_group(i).num_rows for i in range(span.start))
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=columns):
                yield from _rows(batch.to_pylist(), row, item, options)
                row += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"input {item.path}: damaged parquet file: {error}") from None


def _read_arrow(item: Input, span: Span, options: InputOptions) -> Iterator[Found]:
    table = open_dataset(item.path)
    table = table.select_columns(_columns(table.column_names, item, options))
    for start in range(span.start, span.end, _ROWS):
        columns = table[start : min(start + _ROWS, span.end)]
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values())]  # noqa: B905
        yield from _rows(rows, start, item, options)


def _columns(names: list[str], item: Input, options: InputOptions) -> list[str]:
    """The columns to read; a table without them is a mistake as a whole."""
    wanted = [options.text_field] + ([options.id_field] if options.id_field else [])
    for name in wanted:
        if name not in names:
            raise UserError(
                f"input {item.path}: no column `{name}`; it has {', '.join(names)} "
                "(--text_field, --id_field)"
            )
    return wanted + (["id"] if options.id_field is None and "id" in names else [])


def _rows(rows: list[dict], first: int, item: Input, options: InputOptions) -> Iterator[Found]:
    for number, row in enumerate(rows, first):
        cost = len(row[options.text_field]) if isinstance(row[options.text_field], str) else 1
        try:
            identity, text = _row_fields(row, f"{item.name}#{number}", options)
            yield Record(identity, text, number, cost)
        except _BadError as bad:
            excerpt = repr(row.get(options.text_field))[:_EXCERPT]
            yield Rejected(bad.args[0], excerpt, number, cost)
