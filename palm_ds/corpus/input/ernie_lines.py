"""Reads and writes the lines and file lists of ERNIE 1.0's pretraining data.

    token_ids;sentence_type_ids;position_ids;seg_labels;next_sentence_label

The first four fields are space-separated numbers, equally many: [CLS] first text [SEP] second text
[SEP]; 0 for the first text and 1 for the second; 0, 1, 2 ...; 0 at the start of a word, 1 inside
it, -1 at a special token. The last is 1 if the second text follows the first in the source, else 0.
A list has a line `path<TAB>mask_word_prob` per file (ERNIE's repro branch,
ernie/reader/pretraining.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rows.lines import BadRecordError
from palm_ds.common.rows.stored import COMPRESSED, first_bytes
from palm_ds.corpus.input.records import PretokenizedPair, Record, SourceLocation

FIELDS = (
    "token_ids",
    "sentence_type_ids",
    "position_ids",
    "seg_labels",
    "next_sentence_label",
)
LABELS = ("0", "1")
_NUMBERS = re.compile(r"\s*-?[0-9]{1,9}(?:\s+-?[0-9]{1,9})*\s*")
_EXCERPT = 80


def ernie_record(line: str, place: SourceLocation, mask_word: int) -> Record:
    """Parses the text pair in a line. Raises BadRecordError if the line is malformed. Ids are not
    checked against the vocabulary here; `DocumentAnalyzer` does that."""
    fields = line.split(";")
    if len(fields) != len(FIELDS):
        raise BadRecordError(f"expected 5 fields, {';'.join(FIELDS)}; got {len(fields)}")
    ids, types, positions, words = (
        _numbers(field, name) for field, name in zip(fields[:4], FIELDS, strict=False)
    )
    for name, values in zip(FIELDS[1:], (types, positions, words), strict=False):
        if len(values) != len(ids):
            raise BadRecordError(f"{len(values)} {name} for {len(ids)} token_ids")
    label = fields[4].strip()
    if label not in LABELS:
        raise BadRecordError(f"next_sentence_label is {label[:20]!r}, expected 0 or 1")
    second = _second(types)
    special = np.flatnonzero(words == -1)
    if special.tolist() != [0, second - 1, len(ids) - 1]:
        raise BadRecordError(
            "seg_labels: must be -1 at the first token and after each text, and nowhere else"
        )
    if second < 3 or len(ids) - second < 2:
        raise BadRecordError("one of the two texts is empty")
    if (words[words != -1] > 1).any() or (words < -1).any():
        raise BadRecordError("seg_labels: values other than -1, 0 and 1")
    if (positions != np.arange(len(ids))).any():
        raise BadRecordError("position_ids are not 0, 1, 2 ... in order")
    inside = words != -1
    cls, middle, last = ids[special].tolist()
    tokens = PretokenizedPair(
        ids[inside], words[inside] == 0, second - 2, (cls, middle, last), line[:_EXCERPT]
    )
    columns = {"mask_word": (mask_word, mask_word)}
    return Record(
        place.id,
        (),
        place.line,
        place.cost,
        unsplit_parts=2,
        part_values=columns,
        label=label,
        tokens=tokens,
    )


def _numbers(text: str, name: str) -> np.ndarray:
    if not _NUMBERS.fullmatch(text):
        wrong = next((x for x in text.split() if not _NUMBERS.fullmatch(x)), "")
        raise BadRecordError(
            f"{name}: {wrong[:20]!r} is not a whole number" if wrong else f"no {name}"
        )
    return np.array(text.split(), np.int64)


def _second(types: np.ndarray) -> int:
    """The index of the second text's first token."""
    second = int((types == 0).sum())
    if not 0 < second < len(types) or (types[second:] != 1).any() or (types[:second] != 0).any():
        raise BadRecordError("sentence_type_ids are not 0 ... 0 1 ... 1")
    return second


def ernie_line(
    first: tuple[np.ndarray, np.ndarray],
    second: tuple[np.ndarray, np.ndarray],
    label: int,
    *,
    cls: int,
    sep: int,
) -> str:
    """Formats two texts, each (ids, 1 at the start of a word), as a line without line end."""
    ids = np.concatenate([[cls], first[0], [sep], second[0], [sep]])
    words = [[-1], first[1] == 0, [-1], second[1] == 0, [-1]]
    left = len(first[0]) + 2
    fields = (ids, np.arange(len(ids)) >= left, np.arange(len(ids)), np.concatenate(words))
    return ";".join([*(_joined(field.astype(np.int64).tolist()) for field in fields), str(label)])


def _joined(values: Iterable[int]) -> str:
    return " ".join(map(str, values))


def is_list(path: Path) -> bool:
    """Whether a file is a list of files: its first line has a tab or no semicolon."""
    if path.suffix in COMPRESSED:
        return False
    lines = (line for line in first_bytes(path).split(b"\n") if line.strip())
    first = next(lines, b";")
    return b"\t" in first or b";" not in first


def read_list(file: Path) -> list[tuple[Path, int]]:
    """Reads a file list: (path, percentage of passes that mask whole words) per file. Paths are
    relative to the list or else to the working directory."""
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"file list {file}: not UTF-8 text") from None
    entries = [_listed(file, n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not entries:
        raise UserError(f"file list {file}: names no files")
    return entries


def _listed(file: Path, number: int, line: str) -> tuple[Path, int]:
    name, tab, probability = line.strip().partition("\t")
    if not tab:
        raise UserError(f"file list {file}: line {number}: expected path<TAB>mask_word_prob")
    try:
        value = float(probability)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UserError(
            f"file list {file}: line {number}: mask_word_prob {probability!r} is not a number"
        )
    return _found(file, number, name.strip()), round(100 * min(max(value, 0.0), 1.0))


def _found(file: Path, number: int, name: str) -> Path:
    for path in _candidates(file, name):
        if path.is_file():
            return path
    raise UserError(
        f"file list {file}: line {number}: {name}: no such file next to the list or in the working "
        "directory"
    )


def _candidates(file: Path, name: str) -> Iterator[Path]:
    yield file.parent / name
    yield Path(name)
