"""Checks a tokenizer.json before the `tokenizers` library sees it.

The library trusts the file: ten kilobytes can take any amount of memory, through the largest id,
replacements that lengthen a text repeatedly, or a character table with a wrong size in its header.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from palm_ds.common.config import shorten
from palm_ds.common.errors import UserError, first_line
from palm_ds.common.messages import printable

_MAX_GROWTH = 1_000  # times that a normalizer may lengthen a text
_MAX_PARTS = 1_000
_STDERR = 2
_PANIC = re.compile(
    rb"(?:(?<=\n)\n|\A\n)?thread '.*' (\(\d+\) )?panicked at .*\n.*\n"
    rb"(note: .*\n|stack backtrace:\n( +.*\n)*(note: .*\n)?)?"
)
_LETTER_IN_WORDS = re.compile(
    r"\w\(\?:(?:\(\?<?=[\w\[\]\U000f0000-\U000ffffd]*\)|\|)*\)"  # those of exported_tokenizer.py
)
"""A regular expression that matches one letter, beside others that it names."""
_OF_STDERR = threading.Lock()
_SPARE_IDS = 100_000  # beyond four times as many as there are tokens


def check_tokenizer_state(state: Mapping[str, Any], where: str) -> None:
    """Raises UserError for a tokenizer.json that would take excessive memory or give random ids."""
    model = state.get("model")
    if not isinstance(model, Mapping):
        raise UserError(f"{where}: model: expected keys and values, got {_shown(model)}")
    _check_ids(model, state.get("added_tokens"), where)
    if model.get("dropout"):
        raise UserError(f"{where}: model.dropout: {_shown(model['dropout'])} makes ids random")
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        growth = 1.0
        for count, part in enumerate(_parts(state.get(name)), 1):
            growth *= _growth(part)
            _check_table(part, f"{where}: {name}")
            if growth > _MAX_GROWTH or count > _MAX_PARTS:
                raise UserError(
                    f"{where}: {name}: could make a text {_MAX_GROWTH:,} times as long; refused"
                )


def _check_ids(model: Mapping[str, Any], added: object, where: str) -> None:
    known = model.get("vocab")
    ids = known if isinstance(known, Mapping) else {}
    count = len(ids) + (len(added) if isinstance(added, list) else 0)
    for token, number in ids.items():
        if isinstance(number, int) and number > 4 * count + _SPARE_IDS:
            raise UserError(
                f"{where}: model.vocab: {printable(token[:40])!r} has the id {_shown(number)}, but "
                f"there are {count:,} tokens"
            )
        if "\n" in token and model.get("type") == "WordPiece":
            raise UserError(f"{where}: model.vocab: token {number} has a line break in it")
    numbers = [number for number in ids.values() if isinstance(number, int)]
    if len(set(numbers)) < len(numbers):
        twice, _ = Counter(numbers).most_common(1)[0]
        one, other = [printable(token[:40]) for token, number in ids.items() if number == twice][:2]
        raise UserError(f"{where}: model.vocab: {one!r} and {other!r} have one id, {twice}")


def _parts(value: object) -> Iterator[Mapping[str, Any]]:
    """All nested normalizers (pre-tokenizers, decoders)."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, Mapping):
            yield part
            waiting += [x for x in part.values() if isinstance(x, list | Mapping)]


def _growth(part: Mapping[str, Any]) -> float:
    """The largest factor by which it can lengthen a text."""
    content, pattern = part.get("content"), part.get("pattern")
    if part.get("type") != "Replace" or not isinstance(content, str):
        return 1.0
    plain = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(plain, str) and plain:
        return max(1.0, len(content) / len(plain))
    if isinstance(pattern, Mapping) and _LETTER_IN_WORDS.fullmatch(str(pattern.get("Regex"))):
        return max(1.0, len(content))
    return 1.0 + len(content)  # a pattern may match the empty text before each character


def _check_table(part: Mapping[str, Any], where: str) -> None:
    """Raises UserError if the table of a Precompiled normalizer (SentencePiece's: size, bytes) is
    damaged."""
    if part.get("type") == "FixedLength" and not part.get("length"):
        raise UserError(f"{where}: length: expected at least 1, got {_shown(part.get('length'))}")
    if part.get("type") != "Precompiled":
        return
    try:
        table = base64.b64decode(str(part.get("precompiled_charsmap")), validate=True)
    except (binascii.Error, ValueError):
        table = b""
    check_charsmap(table, f"{where}: precompiled_charsmap")


def check_charsmap(table: bytes, where: str) -> None:
    """Raises UserError for a character table that is shorter than its header says."""
    size = int.from_bytes(table[:4], "little")
    if len(table) < 8 or size % 4 or not 0 < size <= len(table) - 4:
        raise UserError(f"{where}: is not SentencePiece's table of characters")


@contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Turns anything that the library raises, including panics, into a UserError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, UserError):
            raise
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{where}: {printable(first_line(error))[:300]}") from None
        raise


def may_run_away(backend: Tokenizer) -> bool:
    """Whether the normalizer or pre-tokenizer has a regular expression with two quantifiers, which
    can take too long on some text: the library then panics."""
    used = [part for part in (backend.normalizer, backend.pre_tokenizer) if part is not None]
    states = [json.loads(part.__getstate__()) for part in used]  # pyright: ignore
    patterns = [part.get("pattern") for part in _parts(states)]
    regular = [
        pattern["Regex"] for pattern in patterns if isinstance(pattern, dict) and "Regex" in pattern
    ]
    return any(
        len(re.findall(r"[*+?}]", pattern)) > 1
        for pattern in regular
        if not _LETTER_IN_WORDS.fullmatch(pattern)
    )


@contextmanager
def without_panics(*, applies: bool = True) -> Iterator[None]:
    """Keeps what Rust writes to stderr about a panic off the terminal: a regular expression that
    takes too long ends in one. Whatever else is written there meanwhile follows at the end. One
    thread at a time: stderr belongs to the process."""
    if not applies:
        yield
        return
    with _OF_STDERR, tempfile.TemporaryFile() as kept:
        stderr = os.dup(_STDERR)
        os.dup2(kept.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(stderr, _STDERR)
            os.close(stderr)
            kept.seek(0)
            os.write(_STDERR, _PANIC.sub(b"", kept.read()))


@contextmanager
def errors_in_texts(texts: Sequence[str], where: str) -> Iterator[None]:
    """Likewise; names the text if it is one that has no UTF-8."""
    try:
        with library_errors(where):
            yield
    except UserError:
        for number, text in enumerate(texts):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                place = f"lone surrogate at character {error.start + 1}"
                raise UserError(f"text {number}: {place}") from None
        raise


def _shown(value: object) -> str:
    return printable(shorten(value))
