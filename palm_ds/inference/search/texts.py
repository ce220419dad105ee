"""Texts of an index, and the rows of files that they are read from.

    {"id": "7", "title": "Paris", "text": "A city.", "lang": "en"}
        -> IndexedText(id="7", title="Paris", text="A city.", metadata={"lang": "en"})

What is embedded, split into words and reranked is the passage: the title and the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.files import fingerprint, hash_of_text
from palm_ds.common.messages import nan_to_null
from palm_ds.data.reader import read_rows

_TEXT = ("text", "text_a", "sentence", "passage", "body")
_ID = ("id", "_id", "idx")
_TITLE = ("title",)
_METADATA = "metadata"
_HASH_DIGITS = 16
_MAX_INTEGER = 1 << 63
_MAX_DEPTH = 16


@dataclass(frozen=True, kw_only=True)
class IndexedText:
    """A text with its id, title and metadata."""

    text: str
    id: str = ""
    """Unique in an index; empty: a hash of title, text and metadata."""
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Values of JSON by name, for filters."""

    @property
    def passage(self) -> str:
        return f"{self.title} {self.text}" if self.title else self.text

    def complete(self, place: str) -> IndexedText:
        """The same with an id. Raises UserError, with its place, for what an index cannot keep."""
        if not self.text.strip():
            raise UserError(f"{place}: the text is empty")
        metadata = _checked(self.metadata, f"{place}: metadata")
        for name, value in (("text", self.text), ("id", self.id), ("title", self.title)):
            check_unicode(value, f"{place}: {name}")
        made = self.id or self._hash(metadata)
        return IndexedText(id=made, text=self.text, title=self.title, metadata=metadata)

    def _hash(self, metadata: Mapping[str, Any]) -> str:
        text = json.dumps([self.title, self.text, fingerprint(metadata)])
        return hash_of_text(text)[:_HASH_DIGITS]


def _checked(value: Any, place: str, depth: int = 0) -> Any:
    """A value that SQLite reads as JSON: without NaN, NUL and numbers that it cannot compare."""
    if depth > _MAX_DEPTH:
        raise UserError(f"{place}: nested too deeply")
    if isinstance(value, Mapping):
        for key in value:
            check_unicode(str(key), place)
        return {
            str(key): _checked(item, f"{place}.{key}", depth + 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_checked(item, place, depth + 1) for item in value]
    if value is None or isinstance(value, bool | float):
        return nan_to_null(value)
    if isinstance(value, int):
        if not -_MAX_INTEGER <= value < _MAX_INTEGER:
            raise UserError(f"{place}: an integer of more than 64 bits")
        return value
    text = str(value)  # dates and the like, as their text
    check_unicode(text, place)
    return text


def check_unicode(text: str, place: str) -> None:
    """Raises UserError, with its place, for a text that SQLite does not keep as it is."""
    if "\0" in text:
        raise UserError(f"{place}: NUL at character {text.index(chr(0)) + 1}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: half a character at {error.start + 1}: not Unicode") from None


# ---- files ----


@dataclass(frozen=True, kw_only=True)
class TextColumns:
    """Columns of files. Empty: one of the usual name, if there is one."""

    text: str = ""
    id: str = ""
    title: str = ""
    metadata: Sequence[str] | None = None
    """None: all others; the entries of a column `metadata` with an object count as columns."""
    format: str = ""


def read_texts(files: Sequence[str], columns: TextColumns) -> Iterator[tuple[str, IndexedText]]:
    """The texts of files, of any format that `palm-ds embed` reads, each with its place. Raises
    UserError."""
    for place, values in read_rows(files, columns.format or "auto"):
        row = {str(name): value for name, value in values.items()}
        text = _pick(row, columns.text, _TEXT, place, "text", needed=True)
        title = _pick(row, columns.title, _TITLE, place, "title")
        identity = _pick(row, columns.id, _ID, place, "id")
        found = IndexedText(
            text=_as_text(row[text], f"{place}: {text}"),
            title=_as_text(row[title], f"{place}: {title}") if title else "",
            id=_as_id(row[identity], f"{place}: {identity}") if identity else "",
            metadata=_metadata(row, columns.metadata, {text, title, identity}, place),
        )
        yield place, found.complete(place)


def _pick(
    row: Mapping[str, Any],
    given: str,
    usual: Sequence[str],
    place: str,
    what: str,
    needed: bool = False,
) -> str:
    """The name of a column; empty if it is not needed and there is none."""
    if given and given not in row:
        raise UserError(f"{place}: no column {given!r} for the {what}{suggest(given, row)}")
    name = given or next((name for name in usual if name in row), "")
    if needed and not name:
        raise UserError(f"{place}: no text column among {', '.join(row)}; name one with --column")
    return name


def _as_text(value: object, place: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place}: expected a text, got {value!r:.60}")
    return value


def _as_id(value: object, place: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise UserError(f"{place}: expected a name or a number, got {value!r:.60}")
    return str(value)


def _metadata(
    row: Mapping[str, Any], names: Sequence[str] | None, used: set[str], place: str
) -> dict[str, Any]:
    rest = {name: value for name, value in row.items() if name not in used}
    if isinstance(inner := rest.get(_METADATA), Mapping):
        del rest[_METADATA]
        rest = {**inner, **rest}
    if names is None:
        return rest
    for name in names:
        if name not in rest:
            raise UserError(f"{place}: no column {name!r} for the metadata{suggest(name, rest)}")
    return {name: rest[name] for name in names}
