"""Formats whose rows span several lines: CoNLL sentences, and SMART documents and queries."""

from __future__ import annotations

import re
from collections.abc import Iterator

from palm_ds.common.errors import UserError
from palm_ds.common.rows.lines import BadRecordError, decoded
from palm_ds.data.reader.find_files import File
from palm_ds.data.reader.formats import Row, lines_of
from palm_ds.data.reader.options import TableSettings

_BLANKS = re.compile(r"[ \t]+")
_CONLLU_WIDTH = 10
_ID = re.compile(r"\d+([-.]\d+)?")
"""Of a token of CoNLL-U, of a range of them, or of an empty node."""
Numbered = list[tuple[int, str]]


def read_conll(file: File, settings: TableSettings) -> Iterator[Row]:
    """One token per line, an empty line after each sentence; columns are lists, keyed by number.
    CoNLL-U's ranges of tokens (`2-3`) and empty nodes (`3.1`) are left out."""
    delimiter = settings.delimiter
    comments, width = _comments_of_each(file), 0
    for block in _sentences(file):
        if isinstance(block, Row):
            yield block
            continue
        block = block[comments:]
        if block and not width:
            line = next((x for _, x in block if not x.startswith("# ")), block[0][1])
            delimiter = delimiter or ("\t" if "\t" in line else "")
            width = len(_cells(line, delimiter))
        while block and _is_comment(block[0][1], delimiter, width):
            block = block[1:]
        if block:
            yield _sentence(block, delimiter, width)


def _comments_of_each(file: File) -> int:
    """The number of `# ` lines that begin every sentence of a file. If all have them, they are
    comments, even with as many columns as a token; a sentence among others may begin with the token
    #."""
    fewest = 0
    for block in _sentences(file):
        if isinstance(block, Row):
            continue
        first = next((i for i, (_, line) in enumerate(block) if not line.startswith("# ")), None)
        if first == 0:
            return 0
        if first is not None:  # a block of such lines alone is no sentence to judge by
            fewest = min(fewest or first, first)
    return fewest


def _is_comment(line: str, delimiter: str, width: int) -> bool:
    """Whether a line before a sentence starts with `# ` and has other columns than a token."""
    return line.startswith("# ") and len(_cells(line, delimiter)) != width


def _cells(line: str, delimiter: str) -> list[str]:
    return line.split(delimiter) if delimiter else _BLANKS.split(line.strip(" \t"))


def _sentences(file: File) -> Iterator[Numbered | Row]:
    """Groups of lines between empty lines; a Row for a group that is not valid text."""
    block: Numbered = []
    bad: Row | None = None
    for number, _, line, _ in lines_of(file):
        if line.strip(b" \t") and not line.startswith(b"-DOCSTART-"):
            try:
                block.append((number, decoded(line)))
            except BadRecordError as error:
                bad = bad or Row(number, bad=error.args[0])
            continue
        if bad or block:
            yield bad or block
        block, bad = [], None
    if bad or block:
        yield bad or block


def _sentence(block: Numbered, delimiter: str, width: int) -> Row:
    rows = [_cells(line, delimiter) for _, line in block]
    for (number, _), cells in zip(block, rows, strict=True):
        if len(cells) != width:
            many = f"{len(cells)} column{'s' * (len(cells) != 1)}"
            return Row(number, bad=f"{many}, but the file's first sentence has {width}")
        if "" in cells:
            return Row(number, bad=f"column {cells.index('')} is empty")
    if width == _CONLLU_WIDTH and all(_ID.fullmatch(cells[0]) for cells in rows):
        rows = [cells for cells in rows if cells[0].isdecimal()]
    return Row(block[0][0], {i: list(column) for i, column in enumerate(zip(*rows, strict=True))})


def read_smart(file: File, settings: TableSettings) -> Iterator[Row]:
    """`.I 7` starts a record; `.T`, `.W` and so on start its columns T, W, ..."""
    values: dict[str, str] = {}
    first, name = 0, ""
    for number, _, line, _ in lines_of(file):
        try:
            text = decoded(line)
        except BadRecordError as bad:
            yield Row(number, bad=bad.args[0])
            continue
        if re.match(r"\.I(\s|$)", text):
            if len(values) > 1:  # a bare `.I` may end the file
                yield Row(first, values)
            values, first, name = {"I": text[3:].strip()}, number, ""
        elif re.fullmatch(r"\.[A-Z]\s*", text) and first:
            name = text[1]
            values[name] = ""
        elif name:
            values[name] += (" " if values[name] else "") + text.strip()
        elif text.strip():
            raise UserError(f"{file.path}:{number}: expected `.I NUMBER` or `.W` here")
    if len(values) > 1:
        yield Row(first, values)
