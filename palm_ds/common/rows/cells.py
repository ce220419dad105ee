"""Rows of cells: TSV and CSV.

for row in csv_rows(Lines(handle, 0, -1), ","):
    row.values(names)       # {name: cell}, or BadRecordError with the reason
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from palm_ds.common.rows.lines import LONGEST, BadRecordError, NumberedLines, decoded

_SEPARATORS = (";", "\t", ",", "|")
"""Usual separators of cells: spreadsheets write `;` where a comma is the decimal point."""


class CellRow(NamedTuple):
    """A row of cells, or why it cannot be read."""

    line: int
    """Number of its first line, from 1; of one that is no text, its own."""
    offset: int
    """Of its first byte."""
    size: int
    """Bytes, line ends included."""
    source: bytes
    cells: Sequence[str] = ()
    """Empty for an empty line."""
    bad: str = ""

    def values(self, names: Sequence[Any], of: str = "the header") -> dict[Any, str]:
        """The cells by column. Raises BadRecordError, also for too many or too few."""
        cells = self.cells
        if self.bad:
            raise BadRecordError(f"{self.bad}{other_separator(names)}")
        if len(cells) == len(names):
            return dict(zip(names, cells, strict=False))
        many = f"{len(cells)} cell{'s' * (len(cells) != 1)}"
        raise BadRecordError(f"{many}, but {of} has {len(names)}{other_separator(names)}")


def tsv_rows(lines: NumberedLines, delimiter: str = "\t") -> Iterator[CellRow]:
    """Cells separated by tabs, without quoting. The delimiter space matches any number of them."""

    def split(text: str) -> list[str]:
        return text.split(delimiter) if delimiter != " " else re.split(" +", text.strip(" "))

    for number, offset, line, size in lines:
        try:
            yield CellRow(number, offset, size, line, split(decoded(line)) if line else ())
        except BadRecordError as bad:
            yield CellRow(number, offset, size, line, bad=bad.args[0])


def csv_rows(lines: NumberedLines, delimiter: str = ",") -> Iterator[CellRow]:
    """Cells separated by commas, quoted if they contain commas, quotes or newlines (RFC 4180)."""
    text = _Decoded(lines)
    # Python's limit of a cell is one of the whole process; a program may have raised it further.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        cells, bad, place = [], "", 0
        text.taken.clear()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad = f"not CSV: {error}"
            if "new-line character" in bad:
                bad = "CR within a line; only a line feed ends a line (`tr '\\r' '\\n'` makes them)"
        except BadRecordError as error:
            bad, place = error.args[0], -1
        number, offset, source, size = text.taken[place]
        if len(text.taken) > 1:
            size = sum(size for _, _, _, size in text.taken)
            source = b"\n".join(line for _, _, line, _ in text.taken)
        yield CellRow(number, offset, size, source, cells, bad)


class _Decoded:
    """Decodes lines. Unlike a generator it continues after a line that is not valid text."""

    def __init__(self, lines: NumberedLines) -> None:
        self.lines = iter(lines)
        self.taken: list[tuple[int, int, bytes, int]] = []

    def __iter__(self) -> _Decoded:
        return self

    def __next__(self) -> str:
        line = next(self.lines)
        self.taken.append(line)
        return decoded(line[2]) + "\n"


def column_names(row: CellRow) -> list[str]:
    """The names of the columns in a header. Raises BadRecordError."""
    if row.bad:
        raise BadRecordError(row.bad)
    if any("\r" in name.strip() for name in row.cells):
        raise BadRecordError("its lines end with CR alone; only a line feed ends a line")
    if excel := re.fullmatch(r'"?sep=(.)"?', row.source.decode()):
        advice = other_separator([excel[1]]) if len(row.cells) == 1 else ""
        raise BadRecordError(
            f"`sep={excel[1]}` tells Excel the separator; remove this line{advice}"
        )
    if row.source.startswith(b"#FORMAT=WebAnno"):
        raise BadRecordError("WebAnno's TSV is not read; export CoNLL 2002, and give format: conll")
    names = [name.strip() for name in row.cells]
    if (unnamed := names.count("")) > 1:
        raise BadRecordError(
            f"{unnamed} of {len(names)} columns have no name in the header; name or remove them"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadRecordError(f"two columns have the name `{' '.join(twice[0].split())}`")
    return names


def other_separator(names: Sequence[Any]) -> str:
    """What to try, for messages, if the only column looks like several with another separator."""
    apart = next((x for x in _SEPARATORS if len(names) == 1 and x in str(names[0])), "")
    if not apart:
        return ""
    quoted = json.dumps(apart)
    return f"; if {quoted} separates the columns, a recipe says so: read: {{delimiter: {quoted}}}"
