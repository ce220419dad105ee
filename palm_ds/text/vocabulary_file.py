"""Reads the files of a tokenizer: vocab.txt, with one token per line, and any text or bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from palm_ds.common.errors import UserError
from palm_ds.common.files import check_right_file

_SPECIAL, _CAPITAL = re.compile(r"\[.+\]|<.+>"), re.compile("[A-Z]")
LARGEST_FILE = 1 << 27  # bytes; the largest genuine ones have a quarter


def read_bytes(file: Path) -> bytes:
    """The content of a file. Raises UserError."""
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise UserError(f"tokenizer {file}: larger than {LARGEST_FILE:,} bytes; refused")
        check_right_file(file)
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"tokenizer {file}: cannot be read: {error.strerror}") from None


def read_text(file: Path) -> str:
    """The content of a file, which must be UTF-8. Raises UserError."""
    data = read_bytes(file)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"tokenizer {file}: line {line}: not UTF-8 text") from None


def read_vocabulary(file: Path) -> list[str]:
    """Reads one token per line; ERNIE's files add a tab and the id, which must be the line's."""
    lines = read_text(file).replace("\r\n", "\n").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    seen: dict[str, int] = {}
    for number, line in enumerate(lines):
        token, tab, given = line.partition("\t")
        if not token:
            raise UserError(
                f"tokenizer {file}: line {number + 1} is empty; give one token per line"
            )
        if tab and given.strip() != str(number):
            raise UserError(
                f"tokenizer {file}: line {number + 1}: id {given.strip()!r}, expected {number}"
            )
        if token in seen:
            first = seen[token] + 1
            raise UserError(
                f"tokenizer {file}: line {number + 1}: {token!r} is already on line {first}"
            )
        seen[token] = number
    if not seen:
        raise UserError(f"tokenizer {file}: empty; give one token per line")
    return list(seen)


def loses_capitals(tokens: Sequence[str]) -> bool:
    """Whether no token contains a capital letter A to Z."""
    return not any(_CAPITAL.search(t) for t in tokens if not _SPECIAL.fullmatch(t))
