"""Training with the scores that a teacher wrote before (palm_ds/data/tasks/score_file.py)."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from palm_ds.common.errors import UserError
from palm_ds.common.files import fingerprint
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.score_file import ScoreFileInfo, ids_column, read_info, read_lists, reading
from palm_ds.data.tasks.soft_labels import RowScores, SoftTasks
from palm_ds.model.distillation.soft_labels import soft_name
from palm_ds.model.distillation.soft_vocabulary_loss import TopScores
from palm_ds.model.inputs.batch import Batch, TeacherOutputs
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.setup.run_folder import data_fingerprints
from palm_ds.train.setup.sources import Data

if TYPE_CHECKING:
    import pyarrow as pa

_STREAM = ("seed", "length", "batch", "sources", "held_out", "stages")
_IGNORED_KEYS = (
    *("weight", "head_lr", "freeze", "trains", "optimizer"),
    *("new_head", "dropout", "smoothing", "auxiliary"),
)
"""Settings of tasks that do not change which rows a step has."""
EXTENDED = "an extended run reads on where the other one stopped, which scores of steps do not know"


def stream_fingerprint(recipe: Recipe, data: Data) -> str:
    """A hash of what determines the rows of every step, and their labels."""
    resolved = recipe.resolved()
    values: dict[str, Any] = {key: resolved[key] for key in _STREAM}
    values["tasks"] = {
        name: {key: value for key, value in task.items() if key not in _IGNORED_KEYS}
        for name, task in resolved["tasks"].items()
    }
    read = data_fingerprints(recipe, replace(data, teachers={}))
    values["data"] = [read, data.tokenizer.fingerprint]
    return fingerprint(values, default=str)


@dataclass(frozen=True)
class _TaskScores:
    """A task's stored scores for the rows of some steps."""

    starts: np.ndarray  # (rows + 1,) the first value of each row
    values: np.ndarray  # float32
    ids: np.ndarray | None  # of the same shape: the token of each value
    top_k: int

    def of(self, entries: slice, labels: int) -> torch.Tensor | TopScores | None:
        """The scores of consecutive rows with this number of labels; None if there are others."""
        inside = slice(self.starts[entries.start], self.starts[entries.stop])
        values = torch.from_numpy(self.values[inside].copy())
        if not len(values) or len(values) % labels:
            return None
        if self.ids is None:
            return values.view(labels, -1)
        ids = torch.from_numpy(self.ids[inside].astype(np.int64))
        if len(values) != labels * self.top_k:
            return None
        return TopScores(ids.view(labels, -1), values.view(labels, -1))


@dataclass(frozen=True)
class _Steps:
    """Scores stored for the rows of some steps."""

    keys: np.ndarray  # (rows,) ascending: step and row in one number
    tasks: Mapping[str, _TaskScores]

    def entries(self, batch: Batch, step: int) -> slice:
        """The places of the rows of a batch."""
        first = step * _MAX_ROWS + batch.first_row
        ends = np.searchsorted(self.keys, [first, first + batch.input_ids.shape[0]])
        return slice(*ends.tolist())


_MAX_ROWS = 1 << 32  # of a step


class StepScores:
    """The scores of the rows of steps, of which one row group of the file is in memory."""

    def __init__(self, path: Path, tasks: Sequence[str], top_k: int):
        import pyarrow.parquet as pq

        self._path, self._tasks, self._top_k = path, tasks, top_k
        self._file = pq.ParquetFile(path, page_checksum_verification=True)
        about = self._file.metadata
        column = self._file.schema_arrow.get_field_index("step")
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        self._firsts = [group.column(column).statistics.min for group in groups]
        self._held: tuple[int, _Steps] | None = None

    def __len__(self) -> int:
        return self._file.metadata.num_rows

    def at(self, step: int) -> _Steps:
        """Scores stored for some steps, this one among them. Raises UserError."""
        number = max(bisect(self._firsts, step) - 1, 0)
        if self._held is None or self._held[0] != number:
            self._held = None  # its memory is free before there is another
            self._held = number, self._read(number)
        return self._held[1]

    def _read(self, number: int) -> _Steps:
        with reading(self._path):
            table = self._file.read_row_group(number)
        steps, rows = (table.column(name).to_numpy() for name in ("step", "row"))
        scores = {task: self._scores(table, task) for task in self._tasks}
        return _Steps(steps * _MAX_ROWS + rows, scores)

    def _scores(self, table: pa.Table, task: str) -> _TaskScores:
        values, starts = read_lists(table, task)
        has_ids = ids_column(task) in table.column_names
        ids = read_lists(table, ids_column(task))[0] if has_ids else None
        return _TaskScores(starts, values, ids, self._top_k)


@dataclass(frozen=True, kw_only=True)
class StoredScores:
    """An opened file of scores."""

    path: Path
    line: str
    """For the start of a run."""
    tasks: SoftTasks
    """The tasks that it has scores for; those over rows of tables with them."""
    steps: StepScores | None = None
    """Those of the rows of steps."""

    def add_to(self, batch: Batch, step: int) -> Batch:
        """The batch with its soft labels. Those of tables are there already."""
        if self.steps is None:
            return replace(batch, teacher=TeacherOutputs())
        labels, words = dict(batch.labels), {}
        stored = self.steps.at(step)
        entries = stored.entries(batch, step)
        for task, scores in stored.tasks.items():
            name = soft_name(task)
            if name not in labels:
                continue
            soft = scores.of(entries, len(labels[name][0]))
            if soft is None:
                raise UserError(
                    f"{self.path}: has other masked tokens for step {step + 1} than this run; "
                    "write it again with `palm-ds teach` and this recipe"
                )
            if isinstance(soft, torch.Tensor):
                labels[name] = labels[name][0], soft.to(batch.input_ids.device)
            else:
                words[task] = soft.to(batch.input_ids.device)
        return replace(batch, labels=labels, teacher=TeacherOutputs(words=words))


def open_scores(path: Path, recipe: Recipe, data: Data, wanted: Collection[str]) -> StoredScores:
    """Read a file of scores. Raises UserError if it belongs to other data or classes."""
    import pyarrow.parquet as pq

    info = read_info(path)
    tasks = [task for task in recipe.built_tasks if task in info.labels and task in wanted]
    _check(path, info, recipe, tasks)
    by = ", ".join(info.teacher)
    if info.stream:
        _check_stream(path, info, recipe, data)
        steps = StepScores(path, tasks, info.top_k)
        line = f"{path}, {len(steps):,} rows of steps, by {by}"
        return StoredScores(path=path, line=line, tasks=dict.fromkeys(tasks), steps=steps)
    soft = {task: _row_scores(path, task, info, recipe, data) for task in tasks}
    line = f"{path}, {pq.read_metadata(path).num_rows:,} rows, by {by}"
    return StoredScores(path=path, line=line, tasks=soft)


def _check(path: Path, info: ScoreFileInfo, recipe: Recipe, tasks: list[str]) -> None:
    """Raises UserError for a task without scores, or with other classes."""
    soft = recipe.teacher.soft_labels if recipe.teacher else None
    known = ", ".join(info.labels)
    for task in soft.tasks if soft else ():
        if task not in info.labels:
            raise UserError(f"{path}: has no scores for the task {task!r}; it has {known}")
    if not tasks:
        raise UserError(f"{path}: has scores for {known}, which are not tasks of this recipe")
    for task in tasks:
        outputs = recipe.built_tasks[task].head_outputs()
        ours = list(outputs.labels)
        if not np.allclose(info.scales.get(task, (0.0, 1.0)), (outputs.mean, outputs.deviation)):
            raise UserError(
                f"{path}: its numbers for {task!r} have another mean or deviation than those of "
                "the training rows; write it again with this recipe"
            )
        if info.labels[task] != ours:
            raise UserError(
                f"{path}: its scores for {task!r} are of {', '.join(info.labels[task])}; this "
                f"recipe has {', '.join(ours)}: give tasks.{task}.labels in the same order"
            )


def _check_stream(path: Path, info: ScoreFileInfo, recipe: Recipe, data: Data) -> None:
    if recipe.extend:
        raise UserError(f"{path}: {EXTENDED}; use the teacher itself")
    if info.stream != stream_fingerprint(recipe, data):
        raise UserError(
            f"{path}: was written for other steps: seed, length, batch, sources, tasks and stages "
            "must be those that `palm-ds teach` had; write it again with this recipe"
        )


def _row_scores(
    path: Path, task: str, info: ScoreFileInfo, recipe: Recipe, data: Data
) -> RowScores:
    """The scores of the rows of a task's table. Raises UserError if it is another table."""
    import pyarrow.parquet as pq

    name = recipe.built_tasks[task].source
    (_, source, _), *_ = data.train[name]
    assert isinstance(source, TableSource)
    if source.endless or info.tables.get(name) != source.table.fingerprint:
        raise UserError(
            f"{path}: was written for another table than sources.{name}, or for another way to "
            "read it; write it again with `palm-ds teach` and this recipe"
        )
    with reading(path):
        here = pq.read_table(
            path,
            columns=["row", task],
            filters=[("source", "==", name)],
            page_checksum_verification=True,
        )
    rows = here.column("row").to_numpy()
    values, offsets = read_lists(here, task)
    lengths = np.zeros(len(source.table), np.int64)
    lengths[rows] = np.diff(offsets)
    if len(lacking := source.numbers[lengths[source.numbers] == 0]):
        raise UserError(
            f"{path}: has no scores of {len(lacking):,} rows that are trained on here, such as "
            f"{source.table.where(int(lacking[0]))}; write it again with `palm-ds teach` and this "
            "recipe (its held_out and folds)"
        )
    values = values[offsets[0] : offsets[-1]].astype(np.float32)
    return RowScores(values, np.concatenate([[0], np.cumsum(lengths)]), str(path))
