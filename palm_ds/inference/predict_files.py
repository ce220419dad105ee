"""Files in, predictions out, by one process or many.

    input files ──table──> every process: its chunks of rows ──predictor──> .DIR.rows/part_N
                                                                              │
    DIR, whole or not at all: predictions in the order of the input <──join── rank 0 (and scores)

A row of the input is a row of the output, for every task: what training leaves out (rows with some
label, rows whose label is unknown) is predicted all the same.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from palm_ds import __version__
from palm_ds.common.atomic import write_folder_atomically
from palm_ds.common.errors import UserError
from palm_ds.common.json_files import nan_to_null, write_json
from palm_ds.data.reader import Table, TableSettings, open_table
from palm_ds.data.reader.options import FURTHER_LABEL
from palm_ds.data.table_source import TableSource
from palm_ds.data.task import Task
from palm_ds.inference.prediction_files import ABOUT, SCORES, check_output, file_names, write_task
from palm_ds.inference.predictor import Predictor
from palm_ds.runtime.checkpoint import ALONE, Group
from palm_ds.train.recipe import Recipe

LABELS = ("label", "tags", "spans", "answers", "impossible")
"""Roles that say what is right; those that begin with `label_` too."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be predicted, and where it goes."""

    inputs: Sequence[str]
    output: Path
    columns: Mapping[str, str | int] = field(default_factory=dict)
    """{role: column}: before those of the recipe."""
    format: str = ""
    """Of the input; empty: as the recipe has it."""
    tsv: bool = False
    """Write TASK.tsv as well."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was done."""

    rows: int
    passes: int
    cut: Mapping[str, int]
    """{task: rows whose texts were too long to be read whole}"""
    seconds: float
    scores: Mapping[str, Mapping[str, float]]
    """{task: {metric: value}} where there are labels."""
    notes: Sequence[str]
    """What a person should know."""
    files: Sequence[Path]


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A table with its labels, as far as they can be read."""

    table: Table
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.table)

    @property
    def bare(self) -> Table:
        """Without any label: so nothing predicted can depend on one."""
        return self.table.without([role for role in self.table.columns if is_label(role)])


def predict_files(
    predictor: Predictor,
    job: Job,
    group: Group = ALONE,
    done: Callable[[int, int], None] = lambda rows, of: None,
) -> Report | None:
    """Predict files into a folder; the report, on rank 0. All processes call it; `done(rows, of)`
    is told how far a process is. Raises UserError."""
    check_output(job.output)
    begun = time.monotonic()
    opened = open_inputs(predictor, job)
    parts = job.output.with_name(f".{job.output.name}.rows")
    if group.rank == 0:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
    group.gather(None)  # nobody writes before what a killed run has left is gone
    cut = group.gather(_write_part(predictor, opened, parts, group, done))
    if group.rank:
        return None
    rows = opened[0].rows
    predictions = _joined(parts, group.world, predictor.tasks, rows)
    scores, notes = _scores(predictor, opened, predictions)
    notes = [*dict.fromkeys(note for each in opened for note in each.notes), *notes]
    files = _publish(predictor, job, opened, predictions, scores)
    shutil.rmtree(parts)
    return Report(
        rows=rows,
        passes=len(predictor.passes),
        cut={task: sum(each[task] for each in cut) for task in predictor.tasks},
        seconds=time.monotonic() - begun,
        scores=scores,
        notes=notes,
        files=files,
    )


# ---- reading ----


def open_inputs(predictor: Predictor, job: Job) -> list[_Opened]:
    """The table of each pass; checked, as far as predicting needs it."""
    tables: dict[str, _Opened] = {}
    for each in predictor.passes:
        if repr(each.read) not in tables:
            alike = [x for x in predictor.passes if repr(x.read) == repr(each.read)]
            with _wanted_by([task for x in alike for task in x.tasks], predictor):
                tables[repr(each.read)] = open_input(job, each.read, predictor.tasks.values())
    if len(counts := {each.rows for each in tables.values()}) > 1:
        raise UserError(
            f"{', '.join(job.inputs)}: read as {' or '.join(map(str, sorted(counts)))} rows, for "
            "the tasks' sources differ in `read`; predict them one by one (--tasks)"
        )
    opened = [tables[repr(each.read)] for each in predictor.passes]
    for each, found in zip(predictor.passes, opened, strict=True):
        source = predictor.source(found.bare)
        with _wanted_by(each.tasks, predictor):
            for task in (each.arranger, *each.tasks):
                task.check(source, labelled=False)
    return opened


@contextmanager
def _wanted_by(tasks: Collection[Task], predictor: Predictor) -> Iterator[None]:
    """What keeps an input from being read for some tasks says for which."""
    try:
        yield
    except UserError as error:
        if len(tasks) == len(predictor.tasks):
            raise
        names = ", ".join(task.name for task in tasks)
        raise UserError(f"{error} (needed for {names}; --tasks A,B asks only some)") from error


def open_input(job: Job, read: TableSettings, tasks: Iterable[Task] = ()) -> _Opened:
    """The rows of a job's files, read as a recipe says. Labels need not be there; of those that the
    tasks want, each that cannot be read is as if it were not."""
    settings = replace(
        read,
        format=job.format or read.format,
        columns={**read.columns, **job.columns},
        drop={},
        bad_rows="stop",
        lost_answers="keep",
    )
    try:
        return _opened(job, settings)
    except UserError as error:
        bare = _opened(job, without_labels(settings))
        kept: list[str] = []
        for role in dict.fromkeys(role for task in tasks for role in task.label_roles()):
            if is_label(role):
                with suppress(UserError):
                    bare = _opened(job, without_labels(settings, [*kept, role]))
                    kept.append(role)
        return replace(bare, notes=(*bare.notes, f"labels that are not read: {error}"))


def _opened(job: Job, settings: TableSettings) -> _Opened:
    table = open_table(list(job.inputs), settings)
    return _Opened(table=table, notes=table.notes)


def without_labels(read: TableSettings, kept: Collection[str] = ()) -> TableSettings:
    """The same, but that columns of labels are not looked for, other than those kept."""
    blank = {role: "" for role in (*LABELS, *read.columns) if is_label(role) and role not in kept}
    return replace(read, columns={**read.columns, **blank})


def is_label(role: str) -> bool:
    return role in LABELS or role.startswith(FURTHER_LABEL)


# ---- every process ----


def _write_part(
    predictor: Predictor,
    opened: Sequence[_Opened],
    parts: Path,
    group: Group,
    done: Callable[[int, int], None],
) -> dict[str, int]:
    """What this process predicts, into its file; {task: rows that were cut}."""
    cut = dict.fromkeys(predictor.tasks, 0)
    all_of_them = -(-sum(each.rows for each in opened) // group.world)
    finished = 0
    with (parts / f"part_{group.rank}").open("w", encoding="utf-8") as file:
        for each, found in zip(predictor.passes, opened, strict=True):
            source = predictor.source(found.bare)
            for chunk in predictor.predict(each, source, rank=group.rank, world=group.world):
                for task, predictions in chunk.predictions.items():
                    cut[task] += chunk.cut
                    for row, prediction in zip(chunk.rows.tolist(), predictions, strict=True):
                        file.write(json.dumps([task, row, prediction]) + "\n")
                finished += len(chunk.rows)
                done(finished, max(all_of_them, finished))
    return cut


# ---- rank 0 ----

Predictions = Mapping[str, Sequence[dict[str, Any]]]


def _joined(parts: Path, world: int, tasks: Mapping[str, Task], rows: int) -> Predictions:
    """{task: a prediction for each row, in order}."""
    found: dict[str, list[dict[str, Any] | None]] = {task: [None] * rows for task in tasks}
    for rank in range(world):
        with (parts / f"part_{rank}").open(encoding="utf-8") as file:
            for line in file:
                task, row, prediction = json.loads(line)
                found[task][row] = prediction
    for task, predictions in found.items():
        assert None not in predictions, f"{task}: a row was not predicted"
    return found  # type: ignore[return-value]


def _scores(
    predictor: Predictor, opened: Sequence[_Opened], predictions: Predictions
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """{task: its metrics} where the input has labels; and what kept others from being scored."""
    scores: dict[str, dict[str, float]] = {}
    notes: list[str] = []
    for each, found in zip(predictor.passes, opened, strict=True):
        source = predictor.source(found.table)
        for task in each.tasks:
            made = {i: dict(x) for i, x in enumerate(predictions[task.name]) if x}
            if lacking := found.rows - len(made):
                notes.append(f"{task.name}: {lacking} rows of which it says nothing")
            try:
                _check_labels(task, source)
                metrics = task.metrics(made, source) if made else {}
            except UserError as error:
                notes.append(f"{task.name}: not scored: {error}")
                continue
            if metrics:
                scores[task.name] = {name: float(value) for name, value in metrics.items()}
    return scores, notes


def _check_labels(task: Task, source: TableSource) -> None:
    """Raises UserError where the labels that there are cannot be scored. Rows that were left out of
    training (`drop`) may have any."""
    if any(role in source.columns for role in task.label_roles()):
        task.check(source, labelled=True)


def _publish(
    predictor: Predictor,
    job: Job,
    opened: Sequence[_Opened],
    predictions: Predictions,
    scores: Mapping[str, Mapping[str, float]],
) -> list[Path]:
    """The folder of predictions, whole or not at all; its files."""
    tasks = predictor.tasks
    names = file_names(tasks)
    listed: dict[str, list[str]] = {}
    tables = {
        task.name: found.table
        for each, found in zip(predictor.passes, opened, strict=True)
        for task in each.tasks
    }

    def write(folder: Path) -> None:
        for name, task in tasks.items():
            source = predictor.source(tables[name])
            found = predictions[name]
            listed[name] = write_task(folder, names[name], task, found, source, tsv=job.tsv)
        about = {
            "made_by": f"palm_ds {__version__}",
            "recipe": predictor.recipe.fingerprint,
            "inputs": list(map(str, job.inputs)),
            "rows": len(next(iter(tables.values()))),
            "tasks": listed,
            "settings": {name: _settings(predictor.recipe, name) for name in tasks},
        }
        write_json(folder / ABOUT, about)
        if scores:
            write_json(folder / SCORES, nan_to_null(scores))

    write_folder_atomically(job.output, write)
    ends = [name for files in listed.values() for name in files]
    return [job.output / name for name in [*ends, *([SCORES] if scores else [])]]


def _settings(recipe: Recipe, task: str) -> dict[str, Any]:
    """What palm-ds evaluate has to know of a task to score its predictions."""
    kind = recipe.tasks[task].get("kind", task)
    settings = asdict(recipe.built_tasks[task])
    return {"kind": kind, **{k: v for k, v in settings.items() if k not in ("name", "source")}}
