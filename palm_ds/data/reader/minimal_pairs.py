"""Files of minimal pairs: two sentences with a small difference, of which one is acceptable.

    {"sentence_good": "She runs.", "sentence_bad": "She run."}     JSON lines, as BLiMP's

    she run .                                                      text, as Zorro's: each odd line
    she runs .                                                     is bad, the line after it good

A file is a paradigm, named like the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from palm_ds.common.errors import UserError
from palm_ds.common.rows.stored import suffixes_of
from palm_ds.data.reader.find_files import File, find_files
from palm_ds.data.reader.formats import Row, read_jsonl, read_text
from palm_ds.data.reader.options import TableSettings

GOOD, BAD = "sentence_good", "sentence_bad"


class MinimalPair(NamedTuple):
    """Two sentences and where they are, `file:line`."""

    good: str
    bad: str
    place: str


@dataclass(frozen=True)
class Paradigm:
    """The pairs of a file."""

    name: str
    pairs: Sequence[MinimalPair]


def read_paradigms(paths: str | Sequence[str]) -> list[Paradigm]:
    """The paradigms of files and patterns, in their order. Raises UserError."""
    settings = TableSettings()
    files = find_files(paths, settings)
    names = [_stem(file.path) for file in files]
    counts = Counter(names)
    return [
        Paradigm(name if counts[name] == 1 else file.path, _pairs(file, settings))
        for name, file in zip(names, files, strict=True)
    ]


def _stem(path: str) -> str:
    suffix, compression = suffixes_of(path)
    return Path(path).name.removesuffix(compression)[: -len(suffix) or None]


def _pairs(file: File, settings: TableSettings) -> list[MinimalPair]:
    if file.format == "jsonl":
        pairs = [_of_record(row, file) for row in read_jsonl(file, settings) if _filled(row)]
    elif file.format == "text":
        pairs = list(_of_lines(read_text(file, settings), file))
    else:
        raise UserError(
            f"{file.path}: minimal pairs are JSON lines with {GOOD} and {BAD} (.jsonl), or lines "
            "of text, bad and good in turn (.txt)"
        )
    if not pairs:
        raise UserError(f"{file.path}: has no minimal pairs")
    return pairs


def _filled(row: Row) -> bool:
    return bool(row.values or row.bad)


def _of_record(row: Row, file: File) -> MinimalPair:
    values = _checked(row, file)
    place = f"{file.path}:{row.place}"
    for key in (GOOD, BAD):
        if key not in values:
            raise UserError(f"{place}: no {key!r}; expected {GOOD!r} and {BAD!r}")
    good, bad = (_sentence(values[key], place, key) for key in (GOOD, BAD))
    return MinimalPair(good, bad, place)


def _of_lines(rows: Iterator[Row], file: File) -> Iterator[MinimalPair]:
    """The pairs of lines; empty lines at the end are ignored."""
    texts = [(f"{file.path}:{row.place}", _checked(row, file)["text"]) for row in rows]
    while texts and not texts[-1][1].strip():
        texts.pop()
    if len(texts) % 2:
        raise UserError(
            f"{file.path}: {len(texts)} lines; a pair is two lines, the bad sentence first"
        )
    for (first, bad), (second, good) in zip(texts[::2], texts[1::2], strict=True):
        yield MinimalPair(_sentence(good, second, "line"), _sentence(bad, first, "line"), first)


def _checked(row: Row, file: File) -> Mapping[Any, Any]:
    if row.bad:
        raise UserError(f"{file.path}:{row.place}: {row.bad}")
    return row.values


def _sentence(value: object, place: str, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: {key}: expected a sentence, got {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: {key}: not Unicode: {error}") from None
    return value
