"""Rows of a pipe are read as those of a file are, but as soon as they come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.reader import TableSettings
from palm_ds.data.reader.piped_rows import Pipe, alike, format_of, row_batches

SECONDS = 0.01


@contextmanager
def pipe(text: bytes = b"", *, open_end: bool = False) -> Iterator[tuple[Pipe, int]]:
    """A pipe with some text, and the end that is written to, unless it is closed."""
    out, into = os.pipe()
    os.write(into, text)
    if not open_end:
        os.close(into)
    try:
        with Pipe(out) as opened:
            yield opened, into
    finally:
        os.close(out)


def read(opened: Pipe, most: int = 10, **settings: str | bool) -> Iterator[list[tuple]]:
    """(place, values) of the rows of each batch."""
    made = TableSettings(**settings)  # pyright: ignore[reportArgumentType]
    found = format_of(opened, as_in_training=made.format)
    for batch in row_batches(opened, found, made, most=most, seconds=SECONDS):
        yield [(row.place, dict(row.values)) for row in batch.rows]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (b'\n{"a": 1}\n\n{"b": "x\\ny"}', [(2, {"a": 1}), (4, {"b": "x\ny"})]),
        (b"\xef\xbb\xbfa\tb\r\n1\t2\n\n", [(2, {"a": "1", "b": "2"})]),
        (b"one\n\ntwo", [(1, {"text_a": "one"}), (2, {"text_a": ""}), (3, {"text_a": "two"})]),
        (b"", []),
    ],
)
def test_the_format_is_seen_in_the_first_line(text: bytes, rows: list) -> None:
    with pipe(text) as (opened, _):
        assert [row for batch in read(opened) for row in batch] == rows


@pytest.mark.parametrize("text", [b'a,b\n"1,\n2",3\n', b'{"a": "1,\\n2", "b": "3"}\n'])
def test_as_in_training_unless_json(text: bytes) -> None:
    with pipe(text) as (opened, _):
        ((row,),) = read(opened, format="csv")
        assert row[1] == {"a": "1,\n2", "b": "3"}


def test_a_row_does_not_wait_for_the_next() -> None:
    """Nor does an empty line, or a part of a line, keep it."""
    with pipe(b'{"a": 1}\n{"a": 2}\n\n{"a"', open_end=True) as (opened, into):
        batches, started = read(opened), time.monotonic()
        assert [row[0] for row in next(batches)] == [1, 2]
        assert time.monotonic() - started < 5
        os.write(into, b": 3}")
        os.close(into)
        assert list(batches) == [[(4, {"a": 3})]]


def test_a_batch_has_a_bound() -> None:
    with pipe(b"x\n" * 7) as (opened, _):
        assert [len(batch) for batch in read(opened, most=3)] == [3, 3, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1}\n{"a": 1,}\n{"a": 2}\n', "<stdin>:2: not JSON"),
        (b"a\tb\n1\t2\n3\n", "<stdin>:3: 1 cell, but the header has 2"),
        (b"one\n\xff\n", "<stdin>:2: invalid UTF-8 at byte 1"),
    ],
)
def test_rows_before_a_bad_one_come_first(text: bytes, message: str) -> None:
    with pipe(text) as (opened, _):
        batches = read(opened)
        assert len(next(batches)) == 1
        with pytest.raises(UserError, match=message):
            next(batches)


def test_blocks_of_lines_are_refused() -> None:
    with pipe(b"x") as (opened, _), pytest.raises(UserError, match="conll: standard input is read"):
        format_of(opened, "conll")


def test_rows_of_other_columns_stand_apart() -> None:
    with pipe(b'{"a": 1, "b": 2}\n{"b": 3, "a": 4}\n{"a": 5}\n') as (opened, _):
        (batch,) = row_batches(opened, "jsonl", TableSettings(), most=10, seconds=SECONDS)
        assert [len(run.rows) for run in alike(batch)] == [2, 1]
