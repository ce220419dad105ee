"""Checks and converts the values of a row: what each role may hold, and what must agree."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sized
from decimal import Decimal
from typing import Any

from palm_ds.common.messages import counted
from palm_ds.common.rows.lines import BadRecordError, check_text, type_name
from palm_ds.data.reader.options import TAG_DELIMITER, TableSettings
from palm_ds.data.reader.regions import parse_image
from palm_ds.text.chinese import simplify_in_place

_GENERATION = ("source", "source_b", "source_c", "target")
TEXTS = ("text_a", "text_b", "text_b_neg", "question", "context", *_GENERATION)
_STRIPPED = (
    *("text_a", "text_b", "text_b_neg", "choices", "query", "positive", "positives", "negatives"),
    "turns",
    *_GENERATION,
)
Note = Callable[[str], None]  # called with what is odd about a row that is kept


def parse(
    row: Mapping[str, Any], settings: TableSettings, split: bool, note: Note
) -> dict[str, Any]:
    """The values of a row by role; BadRecordError says what is wrong. With `split`, the cells of
    text_a and label contain tokens and tags."""
    if split:
        names = {"text_a": "tokens", "label": "tags"}
        row = {names.get(role, role): value for role, value in row.items()}
    parsers = {role: _PARSERS.get(role, _label) for role in row}  # others are further labels
    values = {role: parsers[role](value, role, settings) for role, value in row.items()}
    for role in TEXTS:
        if role in values and not values[role].strip():
            note(f"empty {role}")
    _check_tags(values, settings, split, note)
    if "spans" in values and not _is_missing(values["spans"], settings):
        values["spans"] = _spans(values["spans"], values.get("text_a", ""), note)
    if settings.simplify:
        values |= _simplified(values)
    if "answers" in values:
        _check_answers(values, settings, note)
    return values


def _simplified(values: Mapping[str, Any]) -> dict[str, Any]:
    """Texts, lists of texts and answers in simplified characters, each as long as before."""
    simplified: dict[str, Any] = {}
    for role in set(TEXTS) & values.keys():
        simplified[role] = simplify_in_place(values[role])
    if values.get("label") in values.get("choices", ()):
        simplified["label"] = simplify_in_place(values["label"])
    for role in {"query", "positive", "object_tags"} & values.keys():
        simplified[role] = values[role] and simplify_in_place(values[role])
    for role in {"tokens", "choices", "positives", "negatives", "turns"} & values.keys():
        simplified[role] = [simplify_in_place(text) for text in values[role]]
    return simplified


def _text(value: object, role: str, settings: TableSettings) -> str:
    if role in TEXTS and isinstance(value, list) and isinstance(settings.columns.get(role), list):
        value = " ".join(filter(None, (_text(item, role, settings) for item in value)))
    if isinstance(value, float) and not math.isfinite(value):  # as pandas marks an empty cell
        raise BadRecordError(f"{role} is {value}, not text")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or value.strip():
        value = _without_nul(check_text(value, role), role)
    if settings.strip_spaces and role in _STRIPPED:
        return value.replace(" ", "")
    return value


def _label(
    value: object, role: str, settings: TableSettings
) -> str | list[str] | dict[str, float] | None:
    """A class or number as text; a list has several of them and may be empty; a mapping says what
    each class is worth."""
    if _is_missing(value, settings):
        return None
    if nothing := _no_label(value):
        what, cell = nothing
        raise BadRecordError(
            f"{role} is {what}; `read: {{drop: {{{role}: [{cell}]}}}}` leaves such rows out"
        )
    if isinstance(value, list):
        return [label_text(item, role) for item in value]
    if isinstance(value, Mapping):
        given = {name: worth for name, worth in value.items() if worth is not None}
        return {label_text(name, role): _worth(worth, role) for name, worth in given.items()}
    return label_text(value, role)


def _no_label(value: object) -> tuple[str, str] | None:
    """What a value is that stands for no label, and how `drop` names it; None for any other."""
    if value is None:
        return "null", "null"
    if isinstance(value, float) and math.isnan(value):
        return "nan", ".nan"
    return ("empty", '""') if isinstance(value, str) and not value.strip() else None


def _worth(value: object, role: str) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadRecordError(f"{role}: a class is worth {value!r}; expected a number from 0 to 1")
    return float(value)


def _is_missing(value: object, settings: TableSettings) -> bool:
    """Whether a row is kept without this label."""
    return settings.missing_labels == "keep" and (value is None or value == "")


def label_text(value: object, role: str = "label") -> str:
    """1 is "1", 1.0 is "1.0", True is "true"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | Decimal):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadRecordError(f"{role} is {value}, not a number")
        return repr(value)
    return _without_nul(check_text(value, role, f"{role} is empty"), role).strip()


_BOOLEANS = (("true", "True", "TRUE"), ("false", "False", "FALSE"))
_WHOLE = re.compile(r"(-?\d+)(?:\.0)?")


def spellings(name: str) -> tuple[str, ...]:
    """How formats write a class: JSON `true`, pandas' CSV `True`, that of spreadsheets `TRUE`; `1`,
    and `1.0` where pandas reads a column with empty cells."""
    if number := _WHOLE.fullmatch(name):
        return number[1], f"{number[1]}.0"
    return next((each for each in _BOOLEANS if name in each), (name,))


def _without_nul(text: str, role: str) -> str:
    """Raises BadRecordError for a NUL character, a sign of a damaged file or of UTF-16."""
    if "\0" in text:
        place = text.index("\0") + 1
        raise BadRecordError(f"{role}: NUL at character {place}; the file is damaged, or not UTF-8")
    return text


def _identity(value: object, role: str, settings: TableSettings) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return check_text(value, role, f"{role} is empty").strip()


def json_list(text: str) -> list[Any] | None:
    """The list that a cell holds as JSON; None if it holds something else."""
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


_PRINTED = re.compile(r"""\s*\[\s*['"].*['"]\s*\]\s*""", re.DOTALL)


def printed_list(text: str) -> str:
    """Why a list as Python and NumPy print it (pandas' to_csv) is refused: it may be shortened.
    Empty for any other text."""
    if not _PRINTED.fullmatch(text):
        return ""
    return f'{text[:40]!r}, a list as Python prints it; write JSON (json.dumps): ["a", "b"]'


def _list(value: object, role: str, settings: TableSettings) -> list[Any]:
    """A list as found. In a cell it is JSON, or its elements are joined by `tag_delimiter`."""
    if isinstance(value, str):
        joined = settings.tag_delimiter != TAG_DELIMITER or TAG_DELIMITER in value
        found = None if joined else json_list(value)
        if not joined and found is None and (printed := printed_list(value)):
            raise BadRecordError(f"{role} is {printed}")
        value = value.split(settings.tag_delimiter) if found is None else found
    if not isinstance(value, list):
        raise BadRecordError(f"{role} is {type_name(value)}, not a list")
    return value


def _texts(value: object, role: str, settings: TableSettings) -> list[str]:
    texts = _list(value, role, settings)
    if isinstance(value, str) and texts and all(isinstance(item, int | float) for item in texts):
        texts = [value]  # such as the word [1]
    if any(isinstance(item, Mapping) for item in texts):
        unread = f'`columns: {{{role}: ""}}` leaves the column out'
        raise BadRecordError(f"{role} has objects, not texts; {unread}")
    return [_text(item, role, settings) for item in texts]


def _tags(value: object, role: str, settings: TableSettings) -> list[str] | None:
    if _is_missing(value, settings):
        return None
    tags = _list(value, role, settings)
    if tags == [value] and " " in tags[0].strip():
        raise BadRecordError(
            f"{role} is the text {tags[0][:40]!r}, which is one tag; give a list, or "
            "`tag_delimiter`"
        )
    return [label_text(item, f"tag {number}") for number, item in enumerate(tags, 1)]


def _choices(value: object, role: str, settings: TableSettings) -> list[str]:
    if isinstance(value, Mapping) and "text" in value:  # {"text": [...], "label": [...]}
        value = value["text"]
    texts = _texts(value, role, settings)
    if len(texts) < 2:
        raise BadRecordError(f"{counted(len(texts), 'choice')}; at least two are needed")
    return texts


def _turns(value: object, role: str, settings: TableSettings) -> list[str]:
    if not (texts := _texts(value, role, settings)):
        raise BadRecordError("a dialogue without turns")
    return texts


def _text_or_none(value: object, role: str, settings: TableSettings) -> str | None:
    return None if value is None else _text(value, role, settings)


def _texts_or_none(value: object, role: str, settings: TableSettings) -> list[str]:
    """A text is a list of one, unless it has delimiters."""
    return [] if value is None else _texts(value, role, settings)


def _numbers(value: object, role: str, settings: TableSettings) -> list[float]:
    if isinstance(value, str) and (found := json_list(value)) is not None:
        value = found
    values: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    try:
        numbers = [float(x) for x in values]
    except (TypeError, ValueError):
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise BadRecordError(f"{role} is {value!r}, not a list of numbers")
    return numbers


def _flag(value: object, role: str, settings: TableSettings) -> bool:
    known = {"true": True, "false": False, "1": True, "0": False}
    text = str(value).strip().lower()
    if text not in known:
        raise BadRecordError(f"{role} is {value!r}, not true or false")
    return known[text]


def _image(value: object, role: str, settings: TableSettings) -> Any:
    return parse_image(value)


def _box(value: object, role: str, settings: TableSettings) -> list[float] | None:
    """x1 y1 x2 y2, a list or a text with spaces or commas; None where there is none."""
    if value is None or value == "":
        return None
    box = _numbers(
        value.replace(",", " ").split() if isinstance(value, str) else value, role, settings
    )
    if len(box) != 4 or box[0] >= box[2] or box[1] >= box[3]:
        raise BadRecordError(f"{role}: {box}; expected x1 y1 x2 y2 with x1 < x2 and y1 < y2")
    return box


def _structure(value: object, role: str, settings: TableSettings) -> Any:
    """A list or an object, as found; in a cell of text (tsv, csv) it is JSON."""
    if not isinstance(value, str) or _is_missing(value, settings):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadRecordError(
            f"{role} is {value[:40]!r}, not JSON (json.dumps writes it; none: [])"
        ) from None


_PARSERS: Mapping[str, Callable[[Any, str, TableSettings], Any]] = {
    **dict.fromkeys(TEXTS, _text),
    "label": _label,
    "qid": _identity,
    "id": _identity,
    "tokens": _texts,
    "tags": _tags,
    "choices": _choices,
    "query": _text_or_none,
    "positive": _text_or_none,
    "negatives": _texts_or_none,
    "positives": _texts_or_none,
    "turns": _turns,
    "teacher_scores": _numbers,
    "impossible": _flag,
    "spans": _structure,  # checked against the text
    "answers": _structure,  # checked against the context
    "object_tags": _text,
    "image": _image,
    "box": _box,
    "scene_graph": _structure,  # checked against the text by its task
}


def _check_tags(
    values: Mapping[str, Any], settings: TableSettings, split: bool, note: Note
) -> None:
    tokens, tags = values.get("tokens"), values.get("tags")
    if tokens is not None and tags is not None and len(tokens) != len(tags):
        why = f" (cells are split at {settings.tag_delimiter!r})" if split else ""
        sizes = f"{counted(len(tokens), 'token')} and {counted(len(tags), 'tag')}"
        raise BadRecordError(f"{sizes}{why}")
    if tokens is not None and not any(token.strip() for token in tokens):
        note("empty tokens")


def _spans(value: object, text: str, note: Note) -> list[dict[str, Any]]:
    """Sorted {start, end, type}, from a list of them or from CLUENER's or Restaurants-8k's."""
    if isinstance(value, Mapping):
        spans = _inclusive(value, text)
    elif isinstance(value, list):
        spans = [_span(item) for item in value]
    else:
        raise BadRecordError(f"spans is {type_name(value)}, not a list")
    for start, end, kind in spans:
        if not (_is_place(start) and _is_place(end)):
            raise BadRecordError(f"span {start!r} to {end!r} of {kind}: expected whole numbers")
        if not 0 <= start < end <= len(text):
            raise BadRecordError(
                f"span {start} to {end} of {kind} does not fit a text of {len(text)} characters"
            )
    for (start, end, _), item in zip(spans, value, strict=False):
        if isinstance(item, Mapping) and item.get("text", text[start:end]) != text[start:end]:
            note("span whose text is not that at its place, which does not include its `end`")
    return [{"start": start, "end": end, "type": kind} for start, end, kind in sorted(spans)]


def _is_place(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _span(value: object) -> tuple[Any, Any, str]:
    """A span as annotation tools write it: as an object, or as [start, end, type]."""
    if isinstance(value, list) and len(value) == 3:
        return value[0], value[1], label_text(value[2], "type")
    if not isinstance(value, Mapping):
        raise BadRecordError(f"a span is {type_name(value)}, not an object")
    inner = value.get("valueSpan")
    if isinstance(inner, Mapping):  # Restaurants-8k, where a start of 0 is not written
        return inner.get("startIndex", 0), inner.get("endIndex"), label_text(value.get("slot"))
    start, end = (value.get(key, value.get(f"{key}_offset")) for key in ("start", "end"))
    kind = next((value[key] for key in ("type", "label", "labels") if key in value), None)
    if isinstance(kind, list) and len(kind) == 1:  # Label Studio
        kind = kind[0]
    if kind is None or start is None or end is None:
        raise BadRecordError("a span without start, end or type")
    return start, end, label_text(kind, "type")


def _inclusive(value: Mapping[str, Any], text: str) -> list[tuple[Any, Any, str]]:
    """Spans in CLUENER's form {type: {words: [[first, last]]}}, last character included."""
    spans = []
    for kind, surfaces in value.items():
        if not isinstance(surfaces, Mapping):
            raise BadRecordError(
                f"label {kind}: expected an object with places, got {type_name(surfaces)}; "
                f"`columns: {{label: label.{kind}}}` reads it as a class"
            )
        for surface, places in surfaces.items():
            for first, last in _pairs(places, surface):
                if text[first : last + 1] != surface:
                    raise BadRecordError(
                        f"label {kind}: the text at {first} to {last} is not {surface!r}"
                    )
                spans.append((first, last + 1, kind))
    return spans


def _pairs(places: object, surface: str) -> list[tuple[int, int]]:
    if not isinstance(places, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_is_place, pair)) for pair in places
    ):
        raise BadRecordError(f"the places of {surface!r} are not [[first, last], ...]")
    return [(pair[0], pair[1]) for pair in places]


def _check_answers(values: dict[str, Any], settings: TableSettings, note: Note) -> None:
    """Locates the answers in the context, and decides whether there is one."""
    if not isinstance(values.get("context"), str):
        raise BadRecordError("answers, but no context")
    context = values["context"]
    answers = []
    for text, start in _answers(values["answers"]):
        text = _as_in(context, text, start) if settings.simplify else text
        place = nearest(text, context, start)
        if place < 0 and settings.lost_answers == "stop":
            raise BadRecordError(
                f"answer {text[:40]!r} is not in the context (`lost_answers: keep` or `drop` "
                "allows that)"
            )
        if place < 0:
            what = "kept for scoring" if settings.lost_answers == "keep" else "left out"
            note(f"answer not in its context, {what}")
        elif place != start:
            note("answer not at its answer_start, moved to the nearest occurrence")
        if place >= 0 or settings.lost_answers == "keep":
            answers.append({"text": text, "start": place})
    if not answers and values["answers"] and _count(values["answers"]):
        raise BadRecordError("none of its answers is in the context")
    if bool(answers) == values.setdefault("impossible", not answers):
        what = "impossible, but with an answer" if answers else "no answer, but not impossible"
        raise BadRecordError(what)
    values["answers"] = answers


def _as_in(context: str, text: str, start: int) -> str:
    """An answer in simplified characters: those of the simplified context, if it occurs
    there (a character alone may be converted differently than within its word)."""
    simple = simplify_in_place(text)
    there = context[start : start + len(text)] if start >= 0 else ""
    return there if simplify_in_place(there) == simple else simple


def _count(value: Sized) -> int:
    return len(value["text"]) if isinstance(value, Mapping) else len(value)


def _answers(value: object) -> list[tuple[str, int]]:
    """(text, start) pairs from a list of objects, or from an object of lists (`datasets`)."""
    if isinstance(value, Mapping):
        texts, starts = value.get("text"), value.get("answer_start", value.get("start"))
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise BadRecordError("answers need as many `text` as `answer_start`")
        pairs = list(zip(texts, starts, strict=True))
    elif isinstance(value, list):
        if not all(isinstance(item, Mapping) for item in value):
            raise BadRecordError("an answer is not an object")
        pairs = [(item.get("text"), item.get("answer_start", item.get("start"))) for item in value]
    else:
        raise BadRecordError(f"answers is {type_name(value)}, not a list")
    for text, start in pairs:
        check_text(text, "an answer's text", "an answer's text is empty")
        if not _is_place(start):
            raise BadRecordError(
                f"answer {text[:40]!r}: answer_start is {type_name(start)}, not an integer"
            )
    return pairs


def nearest(text: str, context: str, start: int) -> int:
    """The occurrence of the text in the context nearest to `start`; -1 if there is none."""
    if start >= 0 and context.startswith(text, start):
        return start
    start = min(max(start, 0), len(context))
    after = context.find(text, start)
    before = context.rfind(text, 0, start + len(text))
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - start), default=-1)
