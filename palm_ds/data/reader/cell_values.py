"""A row's values as tasks want them: what each role may be, and what must fit together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from palm_ds.corpus.input.records import BadRecordError, check_text, type_name
from palm_ds.data.reader.options import TableSettings
from palm_ds.text.simplified import simplify_in_place

TEXTS = ("text_a", "text_b", "text_b_neg", "question", "context")
Note = Callable[[str], None]  # told what is odd about the row, though it is taken


def parse(
    row: Mapping[str, Any], settings: TableSettings, split: bool, note: Note
) -> dict[str, Any]:
    """The row by role; BadRecordError says why it is none. `split`: text_a and label are cells of
    tokens and tags."""
    if split:
        names = {"text_a": "tokens", "label": "tags"}
        row = {names.get(role, role): value for role, value in row.items()}
    parsers = {role: _PARSERS.get(role, _label) for role in row}  # others are further labels
    values = {role: parsers[role](value, role, settings) for role, value in row.items()}
    for role in TEXTS:
        if role in values and not values[role].strip():
            note(f"empty {role}")
    _check_tags(values, settings, split, note)
    if "spans" in values:
        values["spans"] = _spans(values["spans"], values.get("text_a", ""))
    if settings.simplify:
        values |= _simplified(values)
    if "answers" in values:
        _check_answers(values, settings, note)
    return values


def _simplified(values: Mapping[str, Any]) -> dict[str, Any]:
    """Texts, lists of texts and answers in simplified characters, each as long as before."""
    found: dict[str, Any] = {}
    for role in set(TEXTS) & values.keys():
        found[role] = simplify_in_place(values[role])
    if values.get("label") in values.get("choices", ()):
        found["label"] = simplify_in_place(values["label"])
    for role in {"tokens", "choices"} & values.keys():
        found[role] = [simplify_in_place(text) for text in values[role]]
    return found


def _text(value: Any, role: str, settings: TableSettings) -> str:
    if role in TEXTS and isinstance(value, list) and isinstance(settings.columns.get(role), list):
        return " ".join(filter(None, (_text(x, role, settings) for x in value)))
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or value.strip():
        value = check_text(value, role)
    if settings.strip_spaces and role in ("text_a", "text_b", "text_b_neg", "choices"):
        return value.replace(" ", "")
    return value


def _label(value: Any, role: str, settings: TableSettings) -> str | list[str]:
    """A class or number as text; a list of them is several at once, and may be empty."""
    if isinstance(value, list):
        return [label_text(x, role) for x in value]
    return label_text(value, role)


def label_text(value: Any, role: str = "label") -> str:
    """1 is "1", 1.0 is "1.0", True is "true"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadRecordError(f"{role} is {value}, not a number")
        return repr(value)
    return check_text(value, role, f"{role} is empty").strip()


def _identity(value: Any, role: str, settings: TableSettings) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return check_text(value, role, f"{role} is empty").strip()


def _texts(value: Any, role: str, settings: TableSettings) -> list[str]:
    if isinstance(value, str):
        value = value.split(settings.tag_delimiter)
    if not isinstance(value, list):
        raise BadRecordError(f"{role} is {type_name(value)}, not a list")
    return [_text(x, role, settings) for x in value]


def _tags(value: Any, role: str, settings: TableSettings) -> list[str]:
    if isinstance(value, str):
        value = value.split(settings.tag_delimiter)
    if not isinstance(value, list):
        raise BadRecordError(f"{role} is {type_name(value)}, not a list")
    return [label_text(x, f"tag {number}") for number, x in enumerate(value, 1)]


def _choices(value: Any, role: str, settings: TableSettings) -> list[str]:
    if isinstance(value, Mapping) and "text" in value:  # {"text": [...], "label": [...]}
        value = value["text"]
    texts = _texts(value, role, settings)
    if len(texts) < 2:
        raise BadRecordError(f"{len(texts)} choices, where two are the least")
    return texts


def _flag(value: Any, role: str, settings: TableSettings) -> bool:
    known = {"true": True, "false": False, "1": True, "0": False}
    text = str(value).strip().lower()
    if text not in known:
        raise BadRecordError(f"{role} is {value!r}, not true or false")
    return known[text]


def _as_found(value: Any, role: str, settings: TableSettings) -> Any:
    return value


_PARSERS: Mapping[str, Callable[[Any, str, TableSettings], Any]] = {
    **dict.fromkeys(TEXTS, _text),
    "label": _label,
    "qid": _identity,
    "id": _identity,
    "tokens": _texts,
    "tags": _tags,
    "choices": _choices,
    "impossible": _flag,
    "spans": _as_found,  # checked against the text
    "answers": _as_found,  # checked against the context
}


def _check_tags(
    values: Mapping[str, Any], settings: TableSettings, split: bool, note: Note
) -> None:
    tokens, tags = values.get("tokens"), values.get("tags")
    if tokens is not None and tags is not None and len(tokens) != len(tags):
        why = f" (cells are split at {settings.tag_delimiter!r})" if split else ""
        raise BadRecordError(f"{len(tokens)} tokens and {len(tags)} tags{why}")
    if tokens is not None and not any(token.strip() for token in tokens):
        note("empty tokens")


def _spans(value: Any, text: str) -> list[dict[str, Any]]:
    """{start, end, type} in order, from a list of them or from CLUENER's or Restaurants-8k's."""
    if isinstance(value, Mapping):
        found = _inclusive(value, text)
    elif isinstance(value, list):
        found = [_span(x) for x in value]
    else:
        raise BadRecordError(f"spans is {type_name(value)}, not a list")
    for start, end, kind in found:
        if not (_is_place(start) and _is_place(end) and 0 <= start < end <= len(text)):
            raise BadRecordError(
                f"span {start} to {end} of {kind}, in a text of {len(text)} characters"
            )
    return [{"start": start, "end": end, "type": kind} for start, end, kind in sorted(found)]


def _is_place(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _span(value: Any) -> tuple[Any, Any, str]:
    if not isinstance(value, Mapping):
        raise BadRecordError(f"a span is {type_name(value)}, not an object")
    inner = value.get("valueSpan")
    if isinstance(inner, Mapping):  # Restaurants-8k, where a start of 0 is not written
        return inner.get("startIndex", 0), inner.get("endIndex"), label_text(value.get("slot"))
    kind = next((value[key] for key in ("type", "label") if key in value), None)
    if kind is None or "start" not in value or "end" not in value:
        raise BadRecordError("a span without start, end or type")
    return value["start"], value["end"], label_text(kind, "type")


def _inclusive(value: Mapping[str, Any], text: str) -> list[tuple[Any, Any, str]]:
    """CLUENER's {type: {words: [[first, last]]}}, where the last character is of the span."""
    found = []
    for kind, surfaces in value.items():
        if not isinstance(surfaces, Mapping):
            raise BadRecordError(f"label {kind}: {type_name(surfaces)} where an object is due")
        for surface, places in surfaces.items():
            for first, last in _pairs(places, surface):
                if text[first : last + 1] != surface:
                    raise BadRecordError(
                        f"label {kind}: {surface!r} does not stand at {first} to {last}"
                    )
                found.append((first, last + 1, kind))
    return found


def _pairs(places: Any, surface: str) -> list[tuple[int, int]]:
    if not isinstance(places, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_is_place, pair)) for pair in places
    ):
        raise BadRecordError(f"the places of {surface!r} are no [[first, last], ...]")
    return [(pair[0], pair[1]) for pair in places]


def _check_answers(values: dict[str, Any], settings: TableSettings, note: Note) -> None:
    """Puts answers where they stand in the context, and settles whether there is one."""
    if not isinstance(values.get("context"), str):
        raise BadRecordError("answers, but no context")
    context = values["context"]
    found = []
    for text, start in _answers(values["answers"]):
        text = _as_in(context, text, start) if settings.simplify else text
        place = nearest(text, context, start)
        if place < 0 and settings.lost_answers == "stop":
            raise BadRecordError(
                f"answer {text[:40]!r} stands nowhere in the context (lost_answers: keep or drop)"
            )
        if place < 0:
            what = "kept for scoring" if settings.lost_answers == "keep" else "left out"
            note(f"answer that stands nowhere in its context, {what}")
        elif place != start:
            note("answer that does not stand where it should, moved to the nearest place")
        if place >= 0 or settings.lost_answers == "keep":
            found.append({"text": text, "start": place})
    if not found and values["answers"] and _count(values["answers"]):
        raise BadRecordError("no answer is left")
    if bool(found) == values.setdefault("impossible", not found):
        raise BadRecordError("impossible, but with an answer" if found else "no answer")
    values["answers"] = found


def _as_in(context: str, text: str, start: int) -> str:
    """An answer in simplified characters: those of the simplified context, where it stands there
    (a character by itself may become another than within its word)."""
    simple = simplify_in_place(text)
    there = context[start : start + len(text)] if start >= 0 else ""
    return there if simplify_in_place(there) == simple else simple


def _count(value: Any) -> int:
    return len(value["text"]) if isinstance(value, Mapping) else len(value)


def _answers(value: Any) -> list[tuple[str, int]]:
    """(text, start) from a list of objects, or from an object of lists as `datasets` has it."""
    if isinstance(value, Mapping):
        texts, starts = value.get("text"), value.get("answer_start", value.get("start"))
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise BadRecordError("answers without `text` and `answer_start` of the same number")
        pairs = list(zip(texts, starts, strict=True))
    elif isinstance(value, list):
        if not all(isinstance(x, Mapping) for x in value):
            raise BadRecordError("an answer is no object")
        pairs = [(x.get("text"), x.get("answer_start", x.get("start"))) for x in value]
    else:
        raise BadRecordError(f"answers is {type_name(value)}, not a list")
    for text, start in pairs:
        check_text(text, "an answer's text", "an answer's text is empty")
        if not _is_place(start):
            raise BadRecordError(f"answer {text[:40]!r}: answer_start is {type_name(start)}")
    return pairs


def nearest(text: str, context: str, start: int) -> int:
    """Where the text stands in the context, nearest to `start`; -1 where it does not."""
    if start >= 0 and context.startswith(text, start):
        return start
    start = min(max(start, 0), len(context))
    after = context.find(text, start)
    before = context.rfind(text, 0, start + len(text))
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - start), default=-1)
