"""Metrics of the user's own: functions of a task's predictions and of the labels of the same rows.

    def kappa(predictions, labels):            # [{"label": "yes", ...}, ...], ["no", ...]
        return cohen_kappa_score(labels, [each["label"] for each in predictions])

A function of (y_true, y_pred), as scikit-learn's are, gets labels and predicted values instead. A
recipe names them `module.function` (`evaluate.metrics`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, SupportsFloat, TypeAlias

from palm_ds.common.errors import UserError, first_line, suggest
from palm_ds.common.plugins import import_function
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.task import Task
from palm_ds.tasks.shared.text_task import TextTask

Metric: TypeAlias = Callable[[list[dict[str, Any]], list[Any]], "float | Mapping[str, float]"]
"""(predictions, labels) -> a number, named as the function, or {metric: number}."""
OwnMetrics: TypeAlias = Mapping[str, Sequence[Metric]]
"""{task: its metrics}."""


def import_metrics(names: Mapping[str, Sequence[str]], tasks: Mapping[str, Task]) -> OwnMetrics:
    """The functions of `evaluate.metrics`. Raises UserError."""
    for name in names:
        if name not in tasks:
            raise UserError(f"evaluate.metrics: no task {name!r}{suggest(name, tasks)}")
        if not isinstance(task := tasks[name], TextTask) or not task.predicts:
            raise UserError(f"evaluate.metrics: {name!r} has no predictions to score")
        if not task.label_roles():
            raise UserError(f"evaluate.metrics: {name!r} has no labels, which metrics get")
    imported = {
        task: [import_function(name, f"evaluate.metrics.{task}") for name in functions]
        for task, functions in names.items()
    }
    for metric in chain.from_iterable(imported.values()):
        check_metric(metric)
    return imported


def own_scores(
    metrics: Sequence[Metric],
    task: Task,
    predictions: Mapping[int, dict[str, Any]],
    source: TableSource,
) -> dict[str, float]:
    """{metric: value} over the rows that have a prediction and a label; empty if there are none."""
    if not metrics:
        return {}
    assert isinstance(task, TextTask)  # checked on import
    labels = task.true_labels(source)
    rows = [row for row in predictions if predictions[row] and labels[row] is not None]
    scores: dict[str, float] = {}
    for metric in dict.fromkeys(metrics) if rows else ():
        made, right = [predictions[row] for row in rows], [labels[row] for row in rows]
        found = _named(metric, _value(metric, made, right, task.prediction_key))
        if both := sorted(set(scores) & set(found)):
            raise UserError(
                f"metrics: {_name(metric)}: another function of this task has {both[0]!r}; "
                "give one of them another name"
            )
        scores |= found
    return scores


def check_metric(metric: Callable[..., Any]) -> None:
    """Raises UserError for a function that cannot be called with two lists."""
    try:
        inspect.signature(metric).bind([], [])
    except TypeError as error:
        raise UserError(
            f"metrics: {_name(metric)}: takes other arguments than (predictions, labels): {error}"
        ) from None


def _value(metric: Metric, made: list[dict[str, Any]], right: list[Any], key: str) -> object:
    """Value that a function returns. Raises UserError if one of (y_true, y_pred) does not suit the
    task."""
    if list(inspect.signature(metric).parameters)[:2] != ["y_true", "y_pred"]:
        return metric(made, right)
    other: Callable[..., object] = metric
    try:
        return other(right, [each.get(key) for each in made])
    except (TypeError, ValueError) as error:
        why = first_line(error)
        raise UserError(
            f"metrics: {_name(metric)}: {why} (it got the labels and each prediction's {key!r}; "
            "write a function of (predictions, labels) that calls it as needed)"
        ) from None


def _named(metric: Metric, value: object) -> dict[str, float]:
    """{metric: number} of what a function returned. Raises UserError for anything else."""
    name = _name(metric)
    values: Mapping[Any, Any] = value if isinstance(value, Mapping) else {name: value}
    return {str(key): _number(each, f"metrics: {name}: {key}") for key, each in values.items()}


def _name(metric: Callable[..., Any]) -> str:
    return getattr(metric, "__name__", type(metric).__name__)


def _number(value: SupportsFloat | str, where: str) -> float:
    try:
        return float(value)  # NumPy's and torch's numbers too; NaN where there is no score
    except (TypeError, ValueError):
        raise UserError(f"{where}: expected a number, got {value!r:.60}") from None
