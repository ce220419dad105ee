"""Turns a line, a row or a part of a file into a record: a text, a text pair, or a dialogue.

    record = record_of({"text_a": "...", "text_b": "...", "label": "but"}, place, options)

A record's *parts* are texts. The first `unsplit_parts` of them are one sentence each (a title, the
two texts of a pair, the turns of a dialogue); the others are split into sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from palm_ds.common.rows.lines import BadRecordError, check_text, type_name

if TYPE_CHECKING:
    from palm_ds.corpus.options import InputOptions

JOINT = "\n\n"  # between the parts of a text
MAX_VALUES = 256  # of an annotation, which is uint8
_MAX_LABEL_LENGTH = 100
_TEXTS = ("text", "message", "utterance", "content")  # text fields of a turn
_SPEAKERS = ("speaker", "role")


@dataclass(frozen=True)
class SourceLocation:
    """Location of a record in the input."""

    id: str  # used if the record has no id
    line: int  # from 1 within the span; for tables, the row from 0 within the input
    cost: int  # bytes of input, for progress


@dataclass(frozen=True)
class PretokenizedPair:
    """Two texts given as ids, without special tokens."""

    ids: np.ndarray  # (tokens,) int64, both texts
    word: np.ndarray  # (tokens,) bool: whether a word begins
    second: int  # index of the second text's first token
    special_ids: tuple[int, int, int]  # the ids given for [CLS], [SEP] and [SEP]
    excerpt: str  # of the line


@dataclass(frozen=True)
class Record:
    """A document as given in the input."""

    id: str
    parts: tuple[str, ...]
    line: int
    cost: int
    unsplit_parts: int = 0
    has_title: bool = False  # the first part is a title
    part_values: Mapping[str, Sequence[int]] = field(
        default_factory=dict
    )  # annotation -> a value per part
    label: str | None = None  # the name of the pair's label
    tokens: PretokenizedPair | None = None  # in place of parts

    @property
    def text(self) -> str:
        return JOINT.join(self.parts)

    @property
    def excerpt(self) -> str:
        return self.tokens.excerpt if self.tokens else self.text[:80]


@dataclass(frozen=True)
class Rejection:
    """A line or row that is not a document, and why."""

    reason: str
    excerpt: str
    line: int
    cost: int


RecordOrRejection = Record | Rejection


def required_fields(options: InputOptions) -> list[tuple[str, ...]]:
    """The fields of a record except its id: alternatives, of which the first present is used."""
    if options.structure == "pairs":
        return [(name,) for name in options.pair_fields]
    if options.structure == "dialogues":
        return [(options.turns_field,) if options.turns_field else ("turns", "messages")]
    return [(options.text_field,), *([(options.title_field,)] if options.title_field else [])]


def record_of(row: Mapping[str, Any], place: SourceLocation, options: InputOptions) -> Record:
    """The record of a row with fields. Raises BadRecordError with the reason if it is not one."""
    make = {"pairs": _pair, "dialogues": _dialogue}.get(options.structure, _document)
    return make(row, place, options)


def plain_record(text: str, place: SourceLocation) -> Record:
    """The record of a plain text."""
    return Record(place.id, (check_text(text, "the text"),), place.line, place.cost)


def _document(row: Mapping[str, Any], place: SourceLocation, options: InputOptions) -> Record:
    hint = " (--text_field names another)" if options.text_field == "text" else ""
    text = check_text(_field(row, options.text_field, hint), f"field `{options.text_field}`")
    identity = _identity(row, place, options)
    if options.title_field is None:
        return Record(identity, (text,), place.line, place.cost)
    title = _field(row, options.title_field)
    if title is None or (isinstance(title, str) and not title.strip()):
        return Record(identity, (text,), place.line, place.cost)
    title = " ".join(check_text(title, f"field `{options.title_field}`").split())
    parts = (title, text.strip("\n"))
    return Record(identity, parts, place.line, place.cost, unsplit_parts=1, has_title=True)


def _pair(row: Mapping[str, Any], place: SourceLocation, options: InputOptions) -> Record:
    texts = [
        check_text(_field(row, name), f"field `{name}`", f"field `{name}`: empty text").strip()
        for name in options.pair_fields[:2]
    ]
    label = ""
    if len(options.pair_fields) > 2:
        label = _label(_field(row, options.pair_fields[2], _NO_LABEL), options.pair_fields[2])
    identity = _identity(row, place, options)
    return Record(identity, tuple(texts), place.line, place.cost, unsplit_parts=2, label=label)


_NO_LABEL = " (--no_label if the pairs have none)"


def _label(value: object, name: str) -> str:
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    text = check_text(value, f"the label in field `{name}`", "empty label").strip()
    if "\n" in text or len(text) > _MAX_LABEL_LENGTH:
        raise BadRecordError(
            f"the label in field `{name}` has several lines or over {_MAX_LABEL_LENGTH} characters"
        )
    return text


def _dialogue(row: Mapping[str, Any], place: SourceLocation, options: InputOptions) -> Record:
    names = required_fields(options)[0]
    name = next((name for name in names if name in row), names[0])
    turns = _field(row, name, "" if options.turns_field else " (--turns_field names another)")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise BadRecordError(f"field `{name}` is {type_name(turns)}, not a list of turns")
    if not turns:
        raise BadRecordError(f"field `{name}` has no turns")
    spoken = [_turn(turn, f"turn {number}") for number, turn in enumerate(turns, 1)]
    roles = _roles([speaker for speaker, _ in spoken])
    texts = tuple(text for _, text in spoken)
    return Record(
        _identity(row, place, options),
        texts,
        place.line,
        place.cost,
        unsplit_parts=len(texts),
        part_values={"role": roles},
    )


def _turn(turn: object, what: str) -> tuple[str | int | None, str]:
    """(speaker, text); the speaker is None if the turn names none."""
    speaker, text = None, turn
    if isinstance(turn, Mapping):
        key = next((key for key in _TEXTS if key in turn), None)
        if key is None:
            raise BadRecordError(f"{what} has none of the fields {', '.join(_TEXTS)}")
        text = turn[key]
        speaker = next((turn[key] for key in _SPEAKERS if turn.get(key) is not None), None)
    elif isinstance(turn, Sequence) and not isinstance(turn, str):
        if len(turn) != 2:
            raise BadRecordError(f"{what} is a list of {len(turn)}, not a [speaker, text] pair")
        speaker, text = turn
    if speaker is not None and not isinstance(speaker, str | int):
        raise BadRecordError(f"{what}: the speaker is {type_name(speaker)}, not a name or number")
    return speaker, check_text(text, what, f"{what}: empty text").strip()


def _roles(speakers: Sequence[str | int | None]) -> list[int]:
    """Numbers the speakers in order of first appearance; turns without speakers alternate."""
    unnamed = [number for number, speaker in enumerate(speakers, 1) if speaker is None]
    if len(unnamed) == len(speakers):
        return [i % 2 for i in range(len(speakers))]
    if unnamed:
        raise BadRecordError(f"turn {unnamed[0]} names no speaker, though other turns do")
    numbers = {speaker: i for i, speaker in enumerate(dict.fromkeys(speakers))}
    if len(numbers) > MAX_VALUES:
        raise BadRecordError(f"{len(numbers)} speakers; at most {MAX_VALUES} are supported")
    return [numbers[speaker] for speaker in speakers]


def _field(row: Mapping[str, Any], name: str, hint: str = "") -> Any:
    if name not in row:
        has = ", ".join(f"`{key}`" for key in list(row)[:8]) or "none"
        raise BadRecordError(f"no field `{name}`; it has {has}{hint}")
    return row[name]


def _identity(row: Mapping[str, Any], place: SourceLocation, options: InputOptions) -> str:
    name = options.id_field
    value = row.get(name or "id")
    if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
        return check_text(str(value), "the id")
    if name is None:
        return place.id
    what = "no field" if name not in row else f"{type(value).__name__} in field"
    raise BadRecordError(f"{what} `{name}`, which should be the id")
