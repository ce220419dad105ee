"""Scores prediction files without a model or a recipe.

    gold         any table (palm_ds/data/reader): rows with their labels
    predictions  TASK.predictions.json and similar files (JSON lines with `index` or `id`), an
                 object {id: answer} (SQuAD), a table with index or id and prediction, a prediction
                 per line, or CoNLL

Each gold row must have exactly one prediction; those of rows without a label are not scored. The
task scores them with the settings that palm-ds predict wrote with its files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from palm_ds.common.config import parse_override
from palm_ds.common.errors import UserError, suggest, suggest_path
from palm_ds.common.messages import counted
from palm_ds.data.reader import Table, TableSettings, open_table
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.interfaces import ScoreReport, StoredPrediction
from palm_ds.data.tasks.task import TableTask, build, find, fine_tuning_kinds
from palm_ds.inference.prediction_files import ABOUT, REPORT, conll_column, read_predictions

_TASK = "task"  # its name in messages: tasks.task


class FileScores(NamedTuple):
    """Scores of a file of predictions."""

    metrics: dict[str, float]
    """The main one first."""
    report: ScoreReport | None
    """Scores by class, if the task has such."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""

    def record(self) -> dict[str, Any]:
        """As a file has them."""
        return {**self.metrics, **({REPORT: self.report.record()} if self.report else {})}


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """Task that scores the predictions, and its settings."""

    kind: str = ""
    """classification, tagging, ... or `module.Class`; empty: the task that made the predictions."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The task's keys, as in a recipe (`positive: good`, `scheme: IOB1`, `score: squad2`). They
    override those that palm-ds predict wrote."""


def score_files(
    gold: Sequence[str], predictions: str, options: ScoringOptions, read: TableSettings
) -> FileScores:
    """Scores of the rows of gold files; `read`: how these are read. Raises UserError."""
    task, file = _task(options, Path(predictions)), Path(predictions)
    main = task.prediction_key
    if main == "tags" and list(gold) == [predictions]:
        # The last column is predicted, the one before it is gold.
        read = TableSettings(format="conll", columns={"tokens": 0, "tags": -2})
        stored = list(conll_column(file, -1))
    else:
        stored = list(read_predictions(file, main))
    table = open_table(list(gold), replace(read, missing_labels="keep"))
    source = TableSource.of_labels(table)
    found = matched(stored, table, predictions)
    scored, notes = scored_rows(task, source), ()
    if left_out := len(source) - len(scored):
        notes = (f"not scored: {counted(left_out, 'row')} without a label",)
        source, found = replace(source, numbers=scored), [found[row] for row in scored]
    task, made = task.prepared(source, found)
    scores = FileScores(task.metrics(made, source), task.report(made, source), notes)
    if not scores.metrics:
        raise UserError(
            f"{predictions}: nothing to score in predictions of this task; the evaluation of a run "
            "has its scores"
        )
    return scores


def scored_rows(task: TableTask, source: TableSource) -> np.ndarray:
    """(scored rows,) those with a label; all of a table without such a column. Raises UserError if
    there are none."""
    if not any(role in source.columns for role in task.label_roles()):
        return np.arange(len(source))
    scored = np.flatnonzero(task.labeled(source))
    if not len(scored):
        raise UserError(f"{source.name}: no row has a label")
    return scored


def settings_of(texts: Sequence[str], option: str = "--task") -> dict[str, Any]:
    """{key: value} from the `key=value` arguments of an option; values are YAML."""
    for text in texts:
        if "=" not in text:
            example = "relevant_from=2" if option == "--task" else "beams=5"
            raise UserError(f"{option} {text!r}: expected KEY=VALUE, such as {example}")
    return dict(parse_override(text) for text in texts)


def _task(options: ScoringOptions, predictions: Path) -> TableTask:
    """The task that scores, with its settings."""
    if predictions.is_dir():
        files = sorted(file.name for file in predictions.glob("*.predictions.json"))
        some = f", such as {predictions / files[0]}" if files else ""
        raise UserError(f"--predictions {predictions}: is a folder; name a file in it{some}")
    if not predictions.exists():
        raise UserError(f"--predictions {predictions}: no such file{suggest_path(predictions)}")
    noted = _noted(predictions)
    kind = options.kind or str(noted.get("kind", ""))
    if not kind:
        raise UserError(
            f"{predictions}: no {ABOUT} of palm-ds predict next to it names the task; give "
            f"--kind: one of {', '.join(fine_tuning_kinds())}, or module.Class"
        )
    if not options.kind and kind not in fine_tuning_kinds():
        raise UserError(f"{predictions}: made by a custom task; confirm with --kind {kind}")
    if "." not in kind and kind not in fine_tuning_kinds():
        raise UserError(f"--kind {kind!r}{suggest(kind, fine_tuning_kinds())}")
    if not issubclass(find(kind), TableTask):
        known = ", ".join(fine_tuning_kinds())
        raise UserError(f"--kind {kind!r}: does not score rows of a table; choose one of {known}")
    known = {k: v for k, v in noted.items() if k != "kind"} if noted.get("kind") == kind else {}
    values = {"kind": kind, "source": "gold", **known, **options.settings}
    task = build(_TASK, values)
    assert isinstance(task, TableTask)
    return task


def _noted(predictions: Path) -> dict[str, Any]:
    """The kind and settings that palm-ds predict wrote with its files; empty for other files."""
    try:
        about = json.loads((predictions.parent / ABOUT).read_text(encoding="utf-8"))
        task = next(name for name, files in about["tasks"].items() if predictions.name in files)
        return dict(about["settings"][task])
    except (OSError, ValueError, LookupError, AttributeError, TypeError, StopIteration):
        return {}


# ---- rows and their predictions ----


def matched(entries: Sequence[StoredPrediction], gold: Table, path: str) -> list[StoredPrediction]:
    """One prediction for each row of the gold table, in row order. Raises UserError if a row has
    no prediction or two, or a prediction no row."""
    keys = _keys(entries, gold, path)
    ids = [str(value) for value in gold.column("id")] if "id" in gold.columns else []
    place_of = _places(ids, gold) if keys == "id" else {}
    stored: dict[int, StoredPrediction] = {}
    for order, entry in enumerate(entries):
        row = order if keys == "order" else _row(entry, place_of, keys)
        if not 0 <= row < len(gold):
            raise UserError(f"{entry.place}: {_beyond(entry, gold, keys)}")
        if row in stored:
            raise UserError(
                f"{entry.place}: a second prediction for {gold.where(row)}; the first is "
                f"{stored[row].place}"
            )
        stored[row] = entry
    if lacking := [row for row in range(len(gold)) if row not in stored]:
        raise UserError(
            f"{path}: no prediction for {gold.where(lacking[0])} "
            f"({counted(len(stored), 'prediction')}, {counted(len(gold), 'row')})"
        )
    return [stored[row] for row in range(len(gold))]


def _places(ids: Sequence[str], gold: Table) -> dict[str, int]:
    """{id: row}. Raises UserError for an id of two rows."""
    places: dict[str, int] = {}
    for row, name in enumerate(ids):
        if places.setdefault(name, row) != row:
            raise UserError(
                f"{gold.where(row)}: has the id {name!r} of {gold.where(places[name])}, but "
                "predictions by id need different ones; `index` (rows from 0) does without"
            )
    return places


def _keys(entries: Sequence[StoredPrediction], gold: Table, path: str) -> str:
    """Key that matches predictions with rows: index, id or order."""
    given = [entry for entry in entries if entry.key is not None]
    if not given:
        return "order"
    if len(given) < len(entries):
        without = next(entry for entry in entries if entry.key is None)
        raise UserError(f"{without.place}: has no `index`, but other predictions do")
    if "index" in given[0].values:
        return "index"
    if "id" not in gold.columns:
        raise UserError(f"{path}: its predictions have ids, but {gold.names[0]} has no column `id`")
    return "id"


def _row(entry: StoredPrediction, place_of: Mapping[str, int], keys: str) -> int:
    if keys == "id":
        return place_of.get(str(entry.key), -1)
    try:
        return int(str(entry.key))
    except ValueError:
        raise UserError(f"{entry.place}: index: {entry.key!r} is not a row number") from None


def _beyond(entry: StoredPrediction, gold: Table, keys: str) -> str:
    named = f"id {entry.key!r}" if keys == "id" else f"index {entry.key}"
    what = "more predictions than rows" if keys == "order" else f"no row has {named}"
    return f"{what}; {', '.join(gold.names)}: {counted(len(gold), 'row')}"
