"""Metrics of the user's own: functions of a task's predictions and of the labels of the same rows.

    def kappa(predictions, labels):            # [{"label": "yes", ...}, ...], ["no", ...]
        return cohen_kappa_score(labels, [each["label"] for each in predictions])

A recipe names them `module.function` (`evaluate.metrics`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.plugins import import_function
from palm_ds.data.table_source import TableSource
from palm_ds.data.task import Task
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
        if not isinstance(tasks[name], TextTask):
            raise UserError(f"evaluate.metrics: {name!r} has no predictions to score")
    return {
        task: [import_function(name, f"evaluate.metrics.{task}") for name in found]
        for task, found in names.items()
    }


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
    found: dict[str, float] = {}
    for metric in metrics if rows else ():
        made, right = [predictions[row] for row in rows], [labels[row] for row in rows]
        found |= _named(metric, metric(made, right))
    return found


def _named(metric: Metric, value: object) -> dict[str, float]:
    """{metric: number} of what a function returned. Raises UserError for anything else."""
    name = getattr(metric, "__name__", type(metric).__name__)
    values: Mapping[Any, Any] = value if isinstance(value, Mapping) else {name: value}
    return {str(key): _number(each, f"metrics: {name}: {key}") for key, each in values.items()}


def _number(value: Any, where: str) -> float:
    try:
        return float(value)  # NumPy's and torch's numbers too; NaN where there is no score
    except (TypeError, ValueError):
        raise UserError(f"{where}: expected a number, got {value!r:.60}") from None
