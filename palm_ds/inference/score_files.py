"""What predictions are worth, from files alone: no model, no recipe.

    gold        any table (palm_ds/data/reader): the rows with what is right
    predictions TASK.predictions.json and the like (JSON lines with `index` or `id`), one object of
                {id: answer} (SQuAD), index<TAB>prediction, a prediction a line, or CoNLL

Every row of the gold file has one prediction, and there is no other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from palm_ds.common.errors import UserError, suggest
from palm_ds.data.reader import Table, TableSettings, open_table
from palm_ds.inference.prediction_files import ABOUT
from palm_ds.tasks.metrics.answers import cmrc, squad_v1, squad_v2
from palm_ds.tasks.metrics.chunks import chunk_scores, convert, scheme_named
from palm_ds.tasks.metrics.classes import (
    accuracy,
    exact_match,
    f1,
    macro,
    matthews,
    multilabel_macro,
    multilabel_micro,
)
from palm_ds.tasks.metrics.counts import Counts
from palm_ds.tasks.metrics.numbers import mse, pearson_and_spearman
from palm_ds.tasks.metrics.ranking import average_precision, mrr, ndcg, rank
from palm_ds.tasks.shared.labels import split_names
from palm_ds.tasks.shared.tag_schemes import span_counts

KINDS = (
    "classification",
    "multi_label",
    "regression",
    "matching",
    "multiple_choice",
    "tagging",
    "reading",
    "ranking",
)
STYLES = {"squad1": squad_v1, "squad2": squad_v2, "cmrc": cmrc}
NO_SCHEME = "none"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How predictions of a kind are scored."""

    kind: str
    labels: tuple[str, ...] = ()
    """classification, multi_label: all classes, in the task's order; by default, those of the
    task that palm-ds predict asked, else those seen."""
    positive: str = ""
    """classification: the class whose F1 is reported; by default the task's, or of two, the
    second."""
    separator: str = ","
    """multi_label: what stands between the classes of a cell."""
    nothing: str = "none"
    """multi_label: what a cell says that names no class."""
    scheme: str = "BIO"
    """tagging: what chunks are compared in; `none`: tags are no chunks."""
    style: str = "squad1"
    """reading: whose rules."""
    k: int = 10
    """ranking: nDCG looks at so many."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"--kind {self.kind!r}{suggest(self.kind, KINDS)}")
        if self.style not in STYLES:
            raise UserError(f"--style {self.style!r}{suggest(self.style, STYLES)}")
        if self.scheme != NO_SCHEME:
            scheme_named(self.scheme)


class Entry(NamedTuple):
    """A prediction as it stands in a file."""

    place: str
    key: Any
    """Which row: its number or its id; none: by the order."""
    values: Mapping[str, Any]
    """By name; `cell`: the text of a cell."""


def judge(
    gold: Sequence[str], predictions: str, rules: Rules, read: TableSettings
) -> dict[str, float]:
    """{metric: value}, the first one the one that counts. `read`: how the gold files are read.
    Raises UserError."""
    if rules.kind == "tagging" and list(gold) == [predictions]:
        return _tagging(*_beside(predictions), rules)
    table = open_table(list(gold), read)
    entries = matched(list(read_predictions(Path(predictions), rules.kind)), table, predictions)
    return _JUDGES[rules.kind](table, entries, _as_asked(rules, Path(predictions)))


def _as_asked(rules: Rules, predictions: Path) -> Rules:
    """With the classes that palm-ds predict noted beside its files, where none are given."""
    try:
        about = json.loads((predictions.parent / ABOUT).read_text(encoding="utf-8"))
        task = next(name for name, files in about["tasks"].items() if predictions.name in files)
        classes, positive = about["classes"].get(task, ()), about["positive"].get(task, "")
    except (OSError, ValueError, LookupError, AttributeError, TypeError, StopIteration):
        return rules  # not its files
    return replace(
        rules, labels=rules.labels or tuple(classes), positive=rules.positive or positive
    )


# ---- reading ----


def read_predictions(path: Path, kind: str) -> Iterator[Entry]:
    """The predictions of a file, in their order."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from None
    if not text.strip():
        raise UserError(f"{path}: no predictions")
    whole = _object(text)
    if whole is not None:
        yield from (Entry(f"{path}, {key!r}", key, {"text": v}) for key, v in whole.items())
    elif text.lstrip()[0] in "{[" and _is_json(text.splitlines()[0]):
        yield from _json_lines(path, text)
    elif kind == "tagging" and text.split("\n", 1)[0].split() != ["index", "prediction"]:
        yield from _sentences(str(path), -1)
    else:
        yield from _cells(path, text)


def _object(text: str) -> dict[str, Any] | None:
    """{id: answer}, where that is what the whole text is."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    one = isinstance(value, dict) and "index" not in value
    return value if one and all(isinstance(x, str) for x in value.values()) else None


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict | list)
    except ValueError:
        return False


def _json_lines(path: Path, text: str) -> Iterator[Entry]:
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{place}: not JSON: {error}") from None
        if isinstance(value, list):  # PaddlePALM's tags
            value = {"tags": value}
        if not isinstance(value, dict):
            raise UserError(f'{place}: expected an object such as {{"index": 0, ...}}')
        yield Entry(place, value.get("index", value.get("id")), value)


def _cells(path: Path, text: str) -> Iterator[Entry]:
    lines = text.removesuffix("\n").split("\n")
    names = [name.strip().lower() for name in lines[0].rstrip("\r").split("\t")]
    titled = {"prediction", "index", "id"} & set(names)
    if len(names) > 1 and not {"prediction", "index"} <= set(names):
        raise UserError(
            f"{path}:1: {len(names)} columns; give two under the names index and prediction, or "
            "one prediction a line"
        )
    for number, line in enumerate(lines, 1):
        if number == 1 and titled:
            continue
        cells, place = line.rstrip("\r").split("\t"), f"{path}:{number}"
        if len(cells) != len(names):
            raise UserError(f"{place}: {len(cells)} columns, where there are {len(names)}")
        row = dict(zip(names if titled else ["prediction"], cells, strict=True))
        yield Entry(place, row.get("index"), {"cell": row["prediction"].strip()})


def _sentences(path: str, column: int) -> Iterator[Entry]:
    """The tags in one column of a CoNLL file."""
    read = TableSettings(format="conll", columns={"tokens": 0, "tags": column})
    table = open_table(path, read)
    for i in range(len(table)):
        yield Entry(table.where(i), None, table[i])


def _beside(path: str) -> tuple[list[list[str]], list[list[str]]]:
    """Predicted and right tags of one CoNLL file: its last column, and the one before it."""
    return tuple([x.values["tags"] for x in _sentences(path, at)] for at in (-1, -2))  # type: ignore


# ---- rows and their predictions ----


def matched(entries: Sequence[Entry], gold: Table, path: str) -> list[Entry]:
    """One for each row of the gold table, in its order. Raises UserError where a row has none or
    two, or a prediction no row."""
    keys = _keys(entries, gold, path)
    ids = [str(x) for x in gold.column("id")] if "id" in gold.columns else []
    place_of = {name: i for i, name in enumerate(ids)} if keys == "id" else {}
    found: dict[int, Entry] = {}
    for order, entry in enumerate(entries):
        row = order if keys == "order" else _row(entry, place_of, keys)
        if not 0 <= row < len(gold):
            raise UserError(f"{entry.place}: {_beyond(entry, gold, keys)}")
        if row in found:
            raise UserError(
                f"{entry.place}: a second prediction of {gold.where(row)}; the first: "
                f"{found[row].place}"
            )
        found[row] = entry
    if lacking := [row for row in range(len(gold)) if row not in found]:
        raise UserError(
            f"{path}: no prediction of {gold.where(lacking[0])} ({len(found)} predictions, "
            f"{len(gold)} rows)"
        )
    return [found[row] for row in range(len(gold))]


def _keys(entries: Sequence[Entry], gold: Table, path: str) -> str:
    """What predictions are known by: index, id, or their order."""
    given = [entry for entry in entries if entry.key is not None]
    if not given:
        return "order"
    if len(given) < len(entries):
        without = next(entry for entry in entries if entry.key is None)
        raise UserError(f"{without.place}: no index, and others have one")
    if "index" in given[0].values or "cell" in given[0].values:
        return "index"
    if "id" not in gold.columns:
        raise UserError(f"{path}: its predictions are known by id, but {gold.names[0]} has none")
    return "id"


def _row(entry: Entry, place_of: Mapping[str, int], keys: str) -> int:
    if keys == "id":
        return place_of.get(str(entry.key), -1)
    try:
        return int(str(entry.key))
    except ValueError:
        raise UserError(f"{entry.place}: index: {entry.key!r} is no number of a row") from None


def _beyond(entry: Entry, gold: Table, keys: str) -> str:
    named = f"id {entry.key!r}" if keys == "id" else f"index {entry.key}"
    what = "one prediction more than rows" if keys == "order" else f"no row has the {named}"
    return f"{what}; {', '.join(gold.names)}: {len(gold)} rows"


# ---- what an entry says ----


def _value(entry: Entry, *names: str) -> Any:
    for name in (*names, "cell"):
        if name in entry.values:
            return entry.values[name]
    has = ", ".join(map(str, entry.values))
    raise UserError(f"{entry.place}: no {' or '.join(names)}; it has {has}")


def _number(value: Any, place: str, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{place}: {what}: {value!r} is not a number")
    return number


def _gold(table: Table, role: str) -> list[Any]:
    values = table.column(role)
    for row, value in enumerate(values):
        if value is None:
            raise UserError(f"{table.where(row)}: {role} is empty")
    return values


# ---- the kinds ----


def _classification(table: Table, entries: Sequence[Entry], rules: Rules) -> dict[str, float]:
    right = [str(x) for x in _gold(table, "label")]
    found = [str(_value(entry, "label")) for entry in entries]
    labels = _classes(rules, right, found)
    if len(set(right)) > 1 and not set(right) & set(found):
        raise UserError(
            f"{entries[0].place}: no row is given a class that is right for any row: predicted are "
            f"{_some(found)}, right are {_some(right)}"
        )
    positive = rules.positive or (labels[-1] if len(labels) == 2 else "")
    if positive and positive not in labels:
        raise UserError(f"--positive {positive!r}: no such label{suggest(positive, labels)}")
    scores = {"accuracy": accuracy(found, right)}
    if positive:
        scores["f1"] = f1(found, right, positive=positive)
    if len(labels) != 2:
        scores["macro_f1"] = macro(found, right, labels).f1
    return scores | {"matthews": matthews(found, right)}


def _classes(rules: Rules, *seen: Collection[str]) -> Sequence[str]:
    """All that there are: those that are known, in their order, then others that are seen."""
    others = set().union(*seen) - set(rules.labels)
    return [*rules.labels, *sorted(others, key=_order)]


def _some(names: Sequence[str]) -> str:
    several = sorted(set(names), key=_order)
    return ", ".join(several[:5]) + (", ..." if len(several) > 5 else "")


def _multi_label(table: Table, entries: Sequence[Entry], rules: Rules) -> dict[str, float]:
    def split(value: Any) -> set[str]:
        return set(split_names(value, rules.separator, rules.nothing))

    right = [split(x) for x in _gold(table, "label")]
    found = [split(_value(entry, "labels")) for entry in entries]
    labels = _classes(rules, *right, *found)
    cells = [np.array([[x in row for x in labels] for row in rows]) for rows in (found, right)]
    total = multilabel_micro(*cells)
    return {
        "micro_f1": total.f1,
        "macro_f1": multilabel_macro(*cells).f1,
        "exact_match": exact_match(*cells),
        "precision": total.precision,
        "recall": total.recall,
    }


def _regression(table: Table, entries: Sequence[Entry], rules: Rules) -> dict[str, float]:
    right = [_number(x, table.where(row), "label") for row, x in enumerate(_gold(table, "label"))]
    found = [_number(_value(entry, "value"), entry.place, "value") for entry in entries]
    return pearson_and_spearman(found, right) | {"mse": mse(found, right)}


def _tags(table: Table, entries: Sequence[Entry], rules: Rules) -> dict[str, float]:
    if "spans" in table.columns and "tags" not in table.columns:
        given = [spans or [] for spans in table.column("spans")]
        return _chunk_scores(span_counts(zip(map(_spans, entries), given, strict=True)))
    right, found = _gold(table, "tags"), []
    for row, entry in enumerate(entries):
        tags = _value(entry, "tags")
        tags = tags.split() if isinstance(tags, str) else [str(tag) for tag in tags]
        if len(tags) != len(right[row]):
            raise UserError(
                f"{entry.place}: {len(tags)} tags, but {table.where(row)} has {len(right[row])}"
            )
        found.append(tags)
    return _tagging(found, right, rules)


def _tagging(
    found: Sequence[Sequence[str]], right: Sequence[Sequence[str]], rules: Rules
) -> dict[str, float]:
    if rules.scheme == NO_SCHEME:
        both = [[tag for row in rows for tag in row] for rows in (found, right)]
        return {"accuracy": accuracy(*both)}
    scores = chunk_scores(
        [convert(row, rules.scheme) for row in found], [convert(row, rules.scheme) for row in right]
    )
    same = [a == b for x, y in zip(found, right, strict=True) for a, b in zip(x, y, strict=True)]
    return _chunk_scores(scores.types, accuracy=float(np.mean(same)))


def _spans(entry: Entry) -> list[Mapping[str, Any]]:
    """A prediction's spans of characters, as palm-ds predict writes them."""
    spans = _value(entry, "spans")
    for span in spans if isinstance(spans, list) else [spans]:
        if not _is_span(span):
            raise UserError(
                f'{entry.place}: spans: expected [{{"type": "x", "start": 0, "end": 3}}, ...], '
                f"got {json.dumps(span, ensure_ascii=False)}"
            )
    return spans


def _is_span(value: Any) -> bool:
    whole = isinstance(value, dict) and isinstance(value.get("type"), str)
    return whole and all(type(value.get(key)) is int for key in ("start", "end"))


def _chunk_scores(types: Mapping[str, Counts], **further: float) -> dict[str, float]:
    every = sum(types.values(), Counts())
    scores = {"f1": every.f1, "precision": every.precision, "recall": every.recall} | further
    return scores | {f"f1 {kind}": counts.f1 for kind, counts in types.items()}


def _reading(table: Table, entries: Sequence[Entry], rules: Rules) -> dict[str, float]:
    answers = {
        str(i): [x["text"] for x in found] for i, found in enumerate(_gold(table, "answers"))
    }
    texts = {str(i): str(_value(entry, "text")) for i, entry in enumerate(entries)}
    found = STYLES[rules.style](texts, answers)
    return {name: x for name, x in found.items() if not name.endswith(("total", "skipped"))}


def _ranking(table: Table, entries: Sequence[Entry], rules: Rules) -> dict[str, float]:
    grades = [_number(x, table.where(row), "label") for row, x in enumerate(_gold(table, "label"))]
    groups = [str(x) for x in _gold(table, "qid" if "qid" in table.columns else "text_a")]
    scores = [_score(entry) for entry in entries]
    relevant = [grade >= 1 for grade in grades]
    ranking = rank(groups, scores, relevant)
    found = {
        "mrr": mrr(ranking),
        "map": average_precision(ranking),
        f"ndcg@{rules.k}": ndcg(rank(groups, scores, grades), rules.k),
    }
    if all("label" in entry.values for entry in entries):
        guesses = [int(_number(entry.values["label"], entry.place, "label")) for entry in entries]
        found["f1"] = f1(guesses, [int(each) for each in relevant])
    return found


def _score(entry: Entry) -> float:
    """By which candidates are ordered: `score`, else the last of the probabilities."""
    value = entry.values.get("score")
    if value is None:
        value = _value(entry, "probs")
        value = value[-1] if isinstance(value, list) and value else value
    return _number(value, entry.place, "score")


def _order(name: str) -> tuple[int, float, str]:
    """Numbers by size, then names by letter, as the labels of tasks are."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


_JUDGES: Mapping[str, Callable[[Table, Sequence[Entry], Rules], dict[str, float]]] = {
    "classification": _classification,
    "multi_label": _multi_label,
    "regression": _regression,
    "matching": _classification,
    "multiple_choice": _classification,
    "tagging": _tags,
    "reading": _reading,
    "ranking": _ranking,
}
