"""JSON rows as annotation tools export them, as plain columns.

Prodigy          text, spans or accept, answer   label is accept; none if the answer is another
Label Studio     data, annotations [{result}]    the fields of data with spans or label
Restaurants-8k   userInput {text}, labels        text_a and spans
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palm_ds.common.messages import counted
from palm_ds.common.rows.lines import BadRecordError

_LABELS = ("label", "spans", "accept")
_PRODIGY = {"answer", "_task_hash"}
_SPAN_VIEWS = ("ner", "spans")


def unfold(row: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A row as plain columns, and a note if the tool says that it has no label: nobody annotated
    it, or not in a way that was accepted. Any other row unchanged. Raises BadRecordError."""
    if row.keys() >= _PRODIGY:
        return _prodigy(row)
    if isinstance(row.get("data"), dict) and isinstance(row.get("annotations"), list):
        return _label_studio(row)
    user = row.get("userInput")
    if not isinstance(user, dict) or "text" not in user:
        return row, ""
    rest = {
        key: value for key, value in row.items() if key not in ("userInput", "context", "labels")
    }
    return {"text_a": user["text"], "spans": row.get("labels", []), **rest}, ""


def _prodigy(row: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Without its tokens and options, which are objects."""
    values = {key: value for key, value in row.items() if not _are_objects(key, value)}
    if str(row.get("_view_id", "")).startswith(_SPAN_VIEWS):
        values.setdefault("spans", [])
    if "accept" in row:
        config = row.get("config")
        several = isinstance(config, Mapping) and config.get("choice_style") == "multiple"
        values["label"] = row["accept"] if several else _only(row["accept"])
    if row["answer"] == "accept":
        return values, ""
    values |= dict.fromkeys(_LABELS & values.keys())
    return values, f"row whose `answer` is {row['answer']}, left out"


def _are_objects(key: str, value: object) -> bool:
    if key not in ("tokens", "options") or not isinstance(value, list):
        return False
    return all(isinstance(item, Mapping) for item in value)


def _only(names: object) -> Any:
    """The name in a list of one, None of an empty list."""
    if not isinstance(names, list) or len(names) > 1:
        return names
    return names[0] if names else None


def _label_studio(row: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The data of a task with its only annotation: `label` if classes were chosen, else `spans`."""
    values = {**row["data"], "id": row.get("id", row["data"].get("id"))}
    done = [each for each in row["annotations"] if _is_done(each)]
    if len(done) > 1:
        raise BadRecordError(f"{counted(len(done), 'annotation')} of one text; leave one of them")
    if not done:
        return {**values, "spans": None}, "text without an annotation, left out"
    results = [each.get("value") for each in done[0]["result"] if isinstance(each, Mapping)]
    given = [value for value in results if isinstance(value, Mapping)]
    chosen = [name for value in given for name in _listed(value.get("choices"))]
    spans = [value for value in given if "start" in value and "end" in value]
    labels: dict[str, Any] = {"label": _only(chosen)} if chosen else {}
    return {**values, **labels, **({"spans": spans} if spans or not chosen else {})}, ""


def _is_done(annotation: object) -> bool:
    if not isinstance(annotation, Mapping) or not isinstance(annotation.get("result"), list):
        return False
    return not annotation.get("was_cancelled")


def _listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []
