"""Soft labels of examples: where a teacher labels them, and its scores if they were stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import TableTask, Task
from palm_ds.model.distillation.soft_labels import soft_name


@dataclass(frozen=True)
class RowScores:
    """A teacher's stored scores of a task for the rows of a table."""

    values: np.ndarray  # (all scores of all rows,) float32
    starts: np.ndarray  # (rows + 1,) int64: the first score of each row
    file: str

    def of(self, row: int, labels: int) -> np.ndarray:
        """(labels, any) float32: those of a row of the table. Raises UserError if it has no such
        scores."""
        scores = self.values[self.starts[row] : self.starts[row + 1]]
        if not len(scores) or len(scores) % labels:
            raise UserError(
                f"{self.file}: {len(scores)} scores for row {row + 1}, which has {labels} labels; "
                "palm-ds teach must read the same table and recipe as the training"
            )
        return scores.reshape(labels, -1)


SoftTasks: TypeAlias = Mapping[str, RowScores | None]
"""{task: the stored scores; None: the teacher runs with the training}"""


def add_soft_labels(
    example: Example,
    task: Task[Any],
    source: TableSource | CorpusSource,
    scores: RowScores | None,
) -> None:
    """Add the soft labels of a task: at its labels, also if they are not known, which are then
    removed."""
    where, _ = example.labels.get(task.name, (np.zeros(0, np.int64), None))
    if not len(where):
        return
    values = np.zeros((len(where), 1), np.float32)
    if scores is not None:
        assert isinstance(source, TableSource)
        values = scores.of(int(source.numbers[example.item]), len(where))
    example.labels[soft_name(task.name)] = where, values
    if task.name in example.grouped_labels:
        example.grouped_labels.add(soft_name(task.name))
    if not (isinstance(task, TableTask) and isinstance(source, TableSource)):
        return
    if not task.labeled(source)[example.item]:
        del example.labels[task.name]
