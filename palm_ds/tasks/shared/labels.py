"""Reads label columns: one class, several classes, or a number per row.

Each function returns one value per row. A missing or unknown label gives -1 or NaN, as files to
predict on may contain anything; with `strict` it raises a UserError that names the row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted
from palm_ds.data.reader.cell_values import json_list, printed_list, spellings
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.tasks.metrics.class_report import ClassReport, calibration_bins, class_report
from palm_ds.tasks.metrics.classes import auc, precision_at_threshold, recall_at_precision
from palm_ds.tasks.metrics.probabilities import whole_share
from palm_ds.tasks.shared.label_notes import class_numbers
from palm_ds.tasks.shared.text_task import ClassesTask, PositiveClassTask, TextTask

_LARGEST = 1e18
_YES_OR_NO = {"0", "1", "0.0", "1.0", "false", "true"}
"""What transformers' models of several labels learn from, one for each class."""


def classes(task: ClassesTask, source: TableSource, *, strict: bool = False) -> np.ndarray:
    """(rows,) int64: index of the class of each row in `task.labels`."""
    number = class_numbers(task.labels)
    numbers = np.full(len(source), -1, np.int64)
    for item, value in enumerate(_column(task, source, strict)):
        if strict:
            one_value(value, task, source, item)
            if str(value) not in number:
                raise task.unknown_label(str(value), source, item)
        numbers[item] = number.get(str(value), -1)
    return numbers


def class_sets(
    task: ClassesTask, source: TableSource, separator: str, nothing: str, *, strict: bool = False
) -> np.ndarray:
    """(rows, classes) float32: 1 for the classes of a row, or what they are worth, else 0; all NaN
    if its label is missing or unknown."""
    number = class_numbers(task.labels)
    sets = np.full((len(source), len(task.labels)), np.nan, np.float32)
    for item, value in enumerate(_column(task, source, strict, several=True)):
        if strict and value is None:
            one_value(value, task, source, item)
        if strict and isinstance(value, str) and (printed := printed_list(value)):
            raise UserError(f"{source.where(item)}: {task.label_column} is {printed}")
        names = split_names(value, separator, nothing)
        if strict:
            _check_names(names, number, task, source, item)
        if value is not None and all(name in number for name in names):
            sets[item] = 0
            worth = list(value.values()) if isinstance(value, Mapping) else 1
            sets[item, [number[name] for name in names]] = worth
    return sets


def _check_names(
    names: list[str], known: Container[str], task: ClassesTask, source: TableSource, item: int
) -> None:
    """Raises UserError for the classes of a row that are unknown, or a number for each class."""
    if {*names} <= _YES_OR_NO and len({*names}) < len(names):
        raise UserError(
            f"{source.where(item)}: {task.label_column}: {', '.join(names[:8])}: a 0 or 1 for each "
            f"class; {task.where} expects the names of those that apply"
        )
    for name in names:
        if name not in known:
            raise task.unknown_label(name, source, item)


def positive_scores(
    task: PositiveClassTask,
    predictions: Mapping[int, Mapping[str, Any]],
    targets: np.ndarray,
    positive: int,
) -> dict[str, float]:
    """The scores of the class `positive` by its probability, over the rows with a label: its AUC,
    and those that the task asks for; empty if a prediction has no probabilities (a submission
    file) or nobody knows their order, or without rows of both kinds. `targets`: (rows,) classes,
    -1 where there is none. Raises UserError for those asked for if nobody knows the order."""
    probs = class_probs(predictions, len(task.labels))
    if probs is None:
        return {}
    if not all(found.get("ordered", True) for found in predictions.values()):
        _check_asked(task)
        return {}
    actual = targets[list(predictions)]
    probs, actual = probs[actual >= 0], actual[actual >= 0]
    scores = whole_share(probs, positive)
    found = {"auc": auc(scores, actual, positive)}
    if math.isnan(found["auc"]):
        return {}
    if level := task.recall_at_precision:
        found["recall_at_precision"] = recall_at_precision(scores, actual, level, positive)
    if level := task.precision_at_threshold:
        found["precision_at_threshold"] = precision_at_threshold(scores, actual, level, positive)
    return found


def _check_asked(task: PositiveClassTask) -> None:
    """Raises UserError if the task asks for a score that needs the order of the classes."""
    if task.scored_at:
        raise UserError(
            f"{task.where}.{task.scored_at}: nothing names the classes that `probs` are of; give "
            f"them in their order, such as labels={list(task.labels[:8])}"
        )


def compared(
    task: ClassesTask, predictions: Mapping[int, Mapping[str, Any]], targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true classes, both (n,), of the rows with a label. `targets`: (rows,) classes,
    -1 where there is none."""
    number = class_numbers(task.labels)
    predicted = np.array([number[found["label"]] for found in predictions.values()], np.int64)
    actual = targets[list(predictions)]
    return predicted[actual >= 0], actual[actual >= 0]


def report_of_classes(
    task: ClassesTask, predictions: Mapping[int, Mapping[str, Any]], targets: np.ndarray
) -> ClassReport | None:
    """Scores by class of a task with one class per row, and the calibration of the predicted
    class's probability. `targets` as in `compared`; None without rows with a label."""
    predicted, actual = compared(task, predictions, targets)
    if not len(actual):
        return None
    bins = []
    if (probs := class_probs(predictions, len(task.labels))) is not None:
        known = probs[targets[list(predictions)] >= 0]
        bins = calibration_bins(known.max(1), predicted == actual)
    return class_report(predicted, actual, task.labels, bins)


def class_probs(predictions: Mapping[int, Mapping[str, Any]], classes: int) -> np.ndarray | None:
    """(predictions, classes) float64: their `probs`; None if a prediction has none, or those of
    other classes. Raises UserError if they are no numbers."""
    probs = [prediction.get("probs") for prediction in predictions.values()]
    if not probs or not all(isinstance(each, list) and len(each) == classes for each in probs):
        return None
    try:
        return np.array(probs, np.float64)
    except (TypeError, ValueError):
        raise UserError("probs: expected a number for each class in every prediction") from None


def split_names(value: object, separator: str, nothing: str) -> list[str]:
    """The class names in one cell, which is a list (in a text: JSON), a text with separators or
    {class: worth}. Only a text says `nothing` for no class.

    >>> split_names("sport, politics", ",", "none")
    ['sport', 'politics']
    """
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, str):
        value = value if (found := json_list(value)) is None else found
    listed = isinstance(value, list)
    names = value if listed else str(value).split(separator)
    stripped = [str(name).strip() for name in names]
    return [name for name in stripped if name and (listed or name != nothing)]


def numbers(task: TextTask, source: TableSource, *, strict: bool = False) -> np.ndarray:
    """(rows,) float64: the number of each row."""
    values = np.full(len(source), np.nan)
    for item, value in enumerate(_column(task, source, strict)):
        if strict:
            one_value(value, task, source, item)
        values[item] = _number(value)
        if strict and np.isnan(values[item]):
            raise UserError(
                f"{source.where(item)}: {task.label_column}: {value!r} is not a number; "
                f"{task.where} expects one, such as 3.5"
            )
        if strict and abs(values[item]) > _LARGEST:
            raise UserError(
                f"{source.where(item)}: {task.label_column}: {value} is beyond {_LARGEST:g}, whose "
                "square is not an fp32 number"
            )
    return values


def known_numbers(values: np.ndarray) -> list[float | None]:
    """The numbers (rows,), for metrics of the user's own; None instead of NaN."""
    return [None if math.isnan(number) else number for number in values.tolist()]


def check_overlap(
    task: TextTask, source: TableSource, predictions: Sequence[StoredPrediction]
) -> None:
    """Raises UserError if the rows have several classes and no prediction is one of them: the
    predictions then belong to other data."""
    right = {str(value) for value in _column(task, source, strict=True)}
    predicted = {str(stored.value("label")) for stored in predictions}
    spelled = {each for name in predicted for each in spellings(name)}
    if len(right) > 1 and not right & spelled:
        raise UserError(
            f"{predictions[0].place}: no predicted class occurs among the labels: predicted are "
            f"{_some(predicted)}, the labels are {_some(right)}"
        )


def _some(names: Collection[str]) -> str:
    several = sorted(names)
    return ", ".join(several[:5]) + (", ..." if len(several) > 5 else "")


def one_value(value: object, task: TextTask, source: TableSource, item: int) -> None:
    """Raises UserError unless a row has exactly one label."""
    if value is None or value == "":
        raise UserError(f"{source.where(item)}: {task.label_column} is empty")
    if value == []:
        raise UserError(
            f"{source.where(item)}: {task.label_column} is an empty list; "
            f"""`read: {{drop: {{{task.label_column}: ["[]"]}}}}` leaves such rows out"""
        )
    if isinstance(value, list | Mapping):
        what = "an object" if len(value) == 1 else counted(len(value), "label")
        raise UserError(
            f"{source.where(item)}: {task.label_column}: {what}, but {task.where} expects one; "
            "for several use `kind: multi_label`"
        )


def _column(
    task: TextTask, source: TableSource, strict: bool, *, several: bool = False
) -> list[Any]:
    if strict:
        source.need(task.label_column, task.where)
    if task.label_column not in source.columns:
        return [None] * len(source)
    return (source.column if several else source.single_values)(task.label_column)


def _number(value: SupportsFloat | str) -> float:
    """The value as a number; NaN if it is not a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan


@dataclass(frozen=True, kw_only=True)
class NumberTask(TextTask):
    """A text task with numbers as labels."""

    prediction_key = "value"

    def check_range(self, low: float | None, high: float | None) -> None:
        """Raises UserError unless `low` is below `high`, where both are given."""
        if low is not None and high is not None and not low < high:
            raise UserError(f"{self.where}: low {low} is not below high {high}")

    def check_labels(self, source: TableSource) -> None:
        numbers(self, source, strict=True)

    def targets(self, source: TableSource) -> np.ndarray:
        """(rows,) float64 in the units of the file; NaN if a row has no number."""
        return source.cached(f"numbers {self.name}", lambda: numbers(self, source))

    def true_labels(self, source: TableSource) -> list[float | None]:
        return known_numbers(self.targets(source))

    def pairs(
        self, predictions: Mapping[int, Mapping[str, Any]], source: TableSource
    ) -> tuple[np.ndarray, np.ndarray]:
        """(n,) predicted values and (n,) targets of the rows that have a number."""
        wanted = self.targets(source)[list(predictions)]
        predicted = np.array([prediction["value"] for prediction in predictions.values()])
        known = ~np.isnan(wanted)
        return predicted[known], wanted[known]

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        return {"value": stored.number("value", stored.value("value"))}
