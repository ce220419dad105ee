"""Rows of cells: where each is, and why one cannot be read."""

from __future__ import annotations

import csv as csv_module
import io

import pytest

from palm_ds.common.rows.cells import CellRow, column_names, csv_rows, tsv_rows
from palm_ds.common.rows.lines import BadRecordError, Lines


def rows_of(text: bytes, *, csv: bool = True) -> list[CellRow]:
    return list((csv_rows if csv else tsv_rows)(Lines(io.BytesIO(text), 0, -1)))


def test_a_row_knows_where_it_is() -> None:
    """Also one of several lines; places are those of its first byte."""
    text = b'a,b\r\n"one\ntwo",2\n\n5" disk,x\n'
    found = rows_of(text)
    assert [list(row.cells) for row in found] == [
        ["a", "b"],
        ["one\ntwo", "2"],
        [],
        ['5" disk', "x"],
    ]
    assert [row.line for row in found] == [1, 2, 4, 5]
    assert [row.offset for row in found] == [0, 5, 17, 18]
    for row in found:
        assert text[row.offset : row.offset + row.size].replace(b"\r", b"") == row.source + b"\n"


def test_a_row_that_cannot_be_read_does_not_end_the_rows() -> None:
    found = rows_of(b'1,"a"b\n2,\xff\n3,"c\n\xff",x\n4,d\n')
    assert [(row.line, row.bad[:22]) for row in found if row.bad] == [
        (1, "not CSV: ',' expected "),
        (2, "invalid UTF-8 at byte "),
        (4, "invalid UTF-8 at byte "),
    ]
    assert list(found[-1].cells) == ["4", "d"]
    (open_quote,) = rows_of(b'1,"a\nb\n')
    assert open_quote.line == 1 and "unexpected end" in open_quote.bad


def test_a_cell_may_be_as_long_as_a_line() -> None:
    """Python's own limit is 131,072 characters."""
    before = csv_module.field_size_limit(131_072)
    try:
        long = b"x " * 70_000
        quoted, plain = rows_of(b'"%b\n",1\n%b,2\n' % (long, long))
        assert len(quoted.cells[0]) == len(long) + 1 and len(plain.cells[0]) == len(long)
        csv_module.field_size_limit(1 << 30)
        rows_of(b"a\n")
        assert csv_module.field_size_limit() == 1 << 30
    finally:
        csv_module.field_size_limit(before)


def test_tabs_have_no_quotes() -> None:
    found = rows_of(b'"a\tb"\n\n\xff\tc\n', csv=False)
    assert list(found[0].cells) == ['"a', 'b"'] and not found[1].cells and not found[1].bad
    assert found[2].bad.startswith("invalid UTF-8 at byte 1") and found[2].offset == 7


def test_cells_get_names() -> None:
    (row,) = rows_of(b"1,2\n")
    assert row.values(["a", "b"]) == {"a": "1", "b": "2"}
    for names, reason in ((["a"], "2 cells, but the header has 1"), ([0, 1, 2], "header has 3")):
        with pytest.raises(BadRecordError, match=reason):
            row.values(names)
    with pytest.raises(BadRecordError, match="^1 cell, but line 1 has 2$"):
        rows_of(b"x\n")[0].values([0, 1], "line 1")


@pytest.mark.parametrize(
    ("line", "csv", "reason"),
    [
        (b"a,a \n", True, "^two columns have the name `a`"),
        (b"a\tb\rc\n", False, "^its lines end with CR alone"),
        (b'"a\n', True, "^not CSV: unexpected end"),
        (b"sep=,\n", True, "^`sep=,` tells Excel the separator; remove this line$"),
        (b'"sep=;"\n', True, 'remove this line; if ";" separates .* read: {delimiter: ";"}$'),
        (b"sep=\t\n", True, r'remove this line; if "\\t" separates'),
        (b"sep=\t\n", False, r"^`sep=\t` tells Excel the separator; remove this line$"),
    ],
)
def test_names_of_columns_are_checked(line: bytes, csv: bool, reason: str) -> None:
    assert column_names(rows_of(b" a ,b\n")[0]) == ["a", "b"]
    with pytest.raises(BadRecordError, match=reason):
        column_names(rows_of(line, csv=csv)[0])
