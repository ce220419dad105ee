"""Rows of a pipe in batches: what has come is answered while the next rows are written.

for batch in row_batches(open_pipe(0), settings, most=64, seconds=0.02):
    batch.rows      # those that came within 20 ms of the first, at most 64

{"text_a": ...}     JSON lines
text_a<TAB>label    TSV, with the names of the columns in the first line
a text              else a text on each line
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, BinaryIO, cast

from palm_ds.common.errors import UserError
from palm_ds.data.reader.find_files import File
from palm_ds.data.reader.formats import Row
from palm_ds.data.reader.options import TableSettings, WholeRows
from palm_ds.data.reader.table import ReadRows, rows_in, where

STDIN = "<stdin>"
"""The pipe's name in messages."""
LINE_FORMATS = ("jsonl", "tsv", "csv", "text")
"""Formats whose rows can be read one after another."""
_READ = 1 << 16  # bytes at a time: what a pipe holds


@dataclass
class Pipe:
    """The lines of a file descriptor. Unlike Python's files it tells whether another one has
    come."""

    descriptor: int
    _buffer: bytearray = field(default_factory=bytearray)
    _ended: bool = False

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever opened the descriptor closes it."""

    def readline(self, most: int = -1) -> bytes:
        """The next line with its end, or its first `most` bytes; empty at the end of the input."""
        while not self._ended and not self._has_line(most):
            self._more()
        end = self._buffer.find(b"\n") + 1 or len(self._buffer)
        size = min(end, most) if most >= 0 else end
        line = bytes(self._buffer[:size])
        del self._buffer[:size]
        return line

    def first_byte(self) -> bytes:
        """The first byte that is no white space, which stays unread; empty if there is none."""
        while not (text := self._buffer.lstrip().removeprefix(b"\xef\xbb\xbf")) and not self._ended:
            self._more()
        return bytes(text[:1])

    def peek_line(self) -> bytes:
        """The next line, which stays unread."""
        while not self._ended and not self._has_line(-1):
            self._more()
        return bytes(self._buffer.partition(b"\n")[0])

    def ready(self, deadline: float) -> bool:
        """Whether a line comes before the deadline, in seconds of the monotonic clock."""
        while not self._has_line(-1) and not self._ended:
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([self.descriptor], [], [], wait)[0]:
                return False
            self._more()
        return bool(self._buffer)

    def _has_line(self, most: int) -> bool:
        return b"\n" in self._buffer or 0 <= most <= len(self._buffer)

    def _more(self) -> None:
        data = os.read(self.descriptor, _READ)
        self._buffer += data
        self._ended = not data


@dataclass(frozen=True)
class _PipedFile(File):
    pipe: Pipe

    def opened(self) -> BinaryIO:
        return cast(BinaryIO, self.pipe)  # read line by line alone


def format_of(pipe: Pipe, wanted: str = "", as_in_training: str = "auto") -> str:
    """The format of the rows: the wanted one, else JSON lines by their {, else as in training, else
    by a tab in the first line. Raises UserError for one that is not read line by line."""
    if wanted not in ("auto", "", *LINE_FORMATS):
        raise UserError(
            f"--format {wanted}: standard input is read line by line; expected one of "
            f"{', '.join(LINE_FORMATS)}"
        )
    if wanted in LINE_FORMATS:
        return wanted
    if pipe.first_byte() == b"{":
        return "jsonl"
    if as_in_training in ("tsv", "csv", "text"):
        return as_in_training
    return "tsv" if b"\t" in pipe.peek_line() else "text"


def row_batches(
    pipe: Pipe, format: str, settings: TableSettings, *, most: int, seconds: float
) -> Iterator[ReadRows]:
    """The rows of a pipe; a batch has at most `most`, which came within `seconds` of its first.
    Raises UserError, after the rows before it, for a line that cannot be read."""
    read = WholeRows(header=settings.header, delimiter=settings.delimiter)
    rows = rows_in(_PipedFile(STDIN, format, pipe), read)
    for first in rows:
        batch, deadline = [first], time.monotonic() + seconds
        while not batch[-1].bad and len(batch) < most and pipe.ready(deadline):
            if (row := next(rows, None)) is None:
                break
            batch.append(row)
        if good := [_named(row, format) for row in batch if row.values]:
            yield ReadRows(STDIN, format, good)
        if bad := batch[-1].bad:
            raise UserError(f"{where(File(STDIN, format), batch[-1].place)}: {bad}")


def _named(row: Row, format: str) -> Row:
    """A line of text by the role of a text."""
    return replace(row, values={"text_a": row.values["text"]}) if format == "text" else row


def alike(rows: ReadRows) -> Iterator[ReadRows]:
    """The rows in runs of the same columns, so that the answer to a row does not depend on its
    neighbors."""

    def columns(row: Row) -> frozenset[Any]:
        return frozenset(row.values)

    for _, run in groupby(rows.rows, columns):
        yield replace(rows, rows=list(run))
