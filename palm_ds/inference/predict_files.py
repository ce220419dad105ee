"""Predicts files with one process or several.

    input files ──table──> every process: its chunks of rows ──predictor──> .DIR.parts/part_N
                                                                              │
    DIR, complete or absent: predictions in input order (and scores) <──join── rank 0

A chunk that an interrupted run has finished is not predicted again. Every input row is an output
row for every task, also rows that training would drop for their labels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.atomic import write_folder_atomically
from palm_ds.common.errors import UserError
from palm_ds.common.files import hash_of_text
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import counted, nan_to_null
from palm_ds.common.plugins import source_code
from palm_ds.common.version import __version__
from palm_ds.data.reader import Table, TableSettings, open_table
from palm_ds.data.reader.options import ColumnKey, is_label, without_labels
from palm_ds.data.reader.table import dropped, drops_of
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.interfaces import ScoreReport
from palm_ds.data.tasks.task import TableTask
from palm_ds.inference.parts import OutputParts, model_files
from palm_ds.inference.prediction_files import (
    ABOUT,
    REPORT,
    SCORES,
    FinishedPredictions,
    check_output,
    file_names,
    nth_line,
    write_task,
)
from palm_ds.inference.predictor import EncoderPass, PredictedChunk, Predictor, chunks
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS, ProcessGroup
from palm_ds.train.recipe.custom_metrics import own_scores
from palm_ds.train.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class PredictionJob:
    """Rows to predict, and where to write the predictions."""

    inputs: Sequence[str]
    output: Path
    columns: Mapping[str, ColumnKey] = field(default_factory=dict)
    """{role: column}: overrides the recipe's."""
    format: str = ""
    """Format of the input; empty means as in the recipe."""
    tsv: bool = False
    """Also write TASK.tsv."""


@dataclass(frozen=True, kw_only=True)
class PredictionSummary:
    """Summary of a prediction job."""

    rows: int
    continued: int
    """Rows, of all passes, that an interrupted run had predicted."""
    passes: int
    cut: Mapping[str, int]
    """{task: rows whose texts were truncated}"""
    seconds: float
    scores: Mapping[str, Mapping[str, float]]
    """{task: {metric: value}} for tasks whose labels are in the input."""
    reports: Mapping[str, ScoreReport]
    """{task: scores by class}, as far as tasks have such."""
    notes: Sequence[str]
    """Remarks for the user."""
    files: Sequence[Path]


@dataclass(frozen=True, kw_only=True)
class _InputTable:
    """A table with the labels that can be read."""

    table: Table
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.table)

    @property
    def bare(self) -> Table:
        """The table without labels, so that no prediction can depend on one."""
        return self.table.without([role for role in self.table.columns if is_label(role)])


def predict_files(
    predictor: Predictor,
    job: PredictionJob,
    group: ProcessGroup = SINGLE_PROCESS,
    done: Callable[[int, int], None] = lambda rows, of: None,
) -> PredictionSummary | None:
    """Predict files into a folder; rank 0 returns the summary. All processes call it;
    `done(rows, of)` reports the progress of a process. Raises UserError."""
    check_output(job.output)
    started = time.monotonic()
    opened = open_inputs(predictor, job)
    key = [predictions_key(predictor), [each.bare.fingerprint for each in opened]]
    with OutputParts.opened(job.output, ".jsonl", key, group) as parts:
        continued = sum(group.gather(_write_parts(predictor, opened, parts, group, done)))
        if group.rank:
            return None
        predictions = _stored(parts, predictor, opened)
        scores, reports, notes = _scores(predictor, opened, predictions)
        notes = [*dict.fromkeys(note for each in opened for note in each.notes), *notes]
        by_class = {name: {REPORT: report.record()} for name, report in reports.items()}
        whole = {name: {**metrics, **by_class.get(name, {})} for name, metrics in scores.items()}
        files = _publish(predictor, job, opened, predictions, whole)
        cut = _cut(parts, predictor, opened)
    return PredictionSummary(
        rows=opened[0].rows,
        continued=continued,
        passes=len(predictor.passes),
        cut=cut,
        seconds=time.monotonic() - started,
        scores=scores,
        reports=reports,
        notes=notes,
        files=files,
    )


# ---- reading ----


def open_inputs(predictor: Predictor, job: PredictionJob) -> list[_InputTable]:
    """The table of each pass, checked for prediction."""
    tables: dict[str, _InputTable] = {}
    for each in predictor.passes:
        if repr(each.read) not in tables:
            alike = [other for other in predictor.passes if repr(other.read) == repr(each.read)]
            with wanted_by([task for other in alike for task in other.tasks], predictor):
                tables[repr(each.read)] = open_input(job, each.read, predictor.tasks.values())
    if len(counts := {table.rows for table in tables.values()}) > 1:
        raise UserError(
            f"{', '.join(job.inputs)}: read as {' or '.join(map(str, sorted(counts)))} rows: the "
            "tasks' sources differ in `read`; predict them one at a time (--tasks)"
        )
    opened = [tables[repr(encoder_pass.read)] for encoder_pass in predictor.passes]
    for each, sources in zip(predictor.passes, opened, strict=True):
        source = predictor.source(sources.bare)
        with wanted_by(each.tasks, predictor):
            for task in (each.input_task, *each.tasks):
                task.check(source, labeled=False)
    return opened


@contextmanager
def wanted_by(tasks: Collection[TableTask], predictor: Predictor) -> Iterator[None]:
    """Adds to an error which tasks needed the input."""
    try:
        yield
    except UserError as error:
        if len(tasks) == len(predictor.tasks):
            raise
        names = ", ".join(task.name for task in tasks)
        raise UserError(f"{error} (needed for {names}; --tasks A,B predicts only some)") from error


def open_input(
    job: PredictionJob, read: TableSettings, tasks: Iterable[TableTask] = ()
) -> _InputTable:
    """The rows of a job's files, read as in the recipe. Labels are optional: a label column that
    cannot be read is ignored, with a note."""
    settings = replace(
        read,
        format=job.format or read.format,
        columns={**read.columns, **job.columns},
        drop={},
        bad_rows="stop",
        lost_answers="keep",
        missing_labels="keep",
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
        return replace(bare, notes=(*bare.notes, f"labels ignored: {error}"))


def _opened(job: PredictionJob, settings: TableSettings) -> _InputTable:
    table = open_table(list(job.inputs), settings)
    return _InputTable(table=table, notes=table.notes)


# ---- parts ----


def predictions_key(predictor: Predictor) -> list[Any]:
    """All that predictions depend on but their rows, as JSON."""
    dtype = next(predictor.model.parameters()).dtype
    how = [str(dtype), predictor.device.type, predictor.batch_tokens, __version__]
    tasks = [task for each in predictor.passes for task in each.tasks]
    code = [source_code(type(x)) for x in (*tasks, predictor.model.backbone)]
    given = [repr(each.tasks) for each in predictor.passes]
    settings = [predictor.recipe.fingerprint, given, hash_of_text("".join(code))]
    return [model_files(predictor.folder), how, settings]


def _write_parts(
    predictor: Predictor,
    opened: Sequence[_InputTable],
    parts: OutputParts,
    group: ProcessGroup,
    done: Callable[[int, int], None],
) -> int:
    """Predict this process's chunks; returns the rows that were there already."""
    expected = -(-sum(each.rows for each in opened) // group.world)
    finished = there = 0
    for each, sources, numbers in _numbered_passes(predictor, opened):
        source = predictor.source(sources.bare)
        mine = dict(zip(numbers, chunks(source), strict=True))
        mine = dict([*mine.items()][group.rank :: group.world])
        missing = {number: rows for number, rows in mine.items() if not parts.path(number).exists()}
        before = sum(map(len, mine.values())) - sum(map(len, missing.values()))
        there, finished = there + before, finished + before
        made = predictor.predict(each, source, some=list(missing.values()))
        for number, chunk in zip(missing, made, strict=True):
            parts.write(number, partial(_write_part, chunk, each))
            finished += len(chunk.rows)
            done(finished, max(expected, finished))
    return there


def _numbered_passes(
    predictor: Predictor, opened: Sequence[_InputTable]
) -> Iterator[tuple[EncoderPass, _InputTable, range]]:
    """Each pass with its table and the numbers of its parts, one for each chunk of rows."""
    first = 0
    for each, table in zip(predictor.passes, opened, strict=True):
        numbers = range(first, first + len(chunks(predictor.source(table.bare))))
        yield each, table, numbers
        first = numbers.stop


def _write_part(chunk: PredictedChunk, each: EncoderPass, path: Path) -> None:
    """The number of truncated rows, and a line for each task."""
    lines = [chunk.cut, *(chunk.predictions[task.name] for task in each.tasks)]
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


# ---- rank 0 ----

Predictions = Mapping[str, FinishedPredictions]


def _stored(parts: OutputParts, predictor: Predictor, opened: Sequence[_InputTable]) -> Predictions:
    return {
        task.name: FinishedPredictions([parts.path(number) for number in numbers], line)
        for each, _, numbers in _numbered_passes(predictor, opened)
        for line, task in enumerate(each.tasks, 1)
    }


def _cut(parts: OutputParts, predictor: Predictor, opened: Sequence[_InputTable]) -> dict[str, int]:
    """{task: rows whose texts were truncated}"""
    cut: dict[str, int] = {}
    for each, _, numbers in _numbered_passes(predictor, opened):
        total = sum(int(nth_line(parts.path(number), 0)) for number in numbers)
        cut |= dict.fromkeys((task.name for task in each.tasks), total)
    return cut


def _scores(
    predictor: Predictor, opened: Sequence[_InputTable], predictions: Predictions
) -> tuple[dict[str, dict[str, float]], dict[str, ScoreReport], list[str]]:
    """{task: metrics} for tasks whose labels are in the input, and {task: report}; notes say why
    others have none."""
    scores: dict[str, dict[str, float]] = {}
    reports: dict[str, ScoreReport] = {}
    notes: list[str] = []
    for encoder_pass, sources in zip(predictor.passes, opened, strict=True):
        source = predictor.source(sources.table)
        for task in encoder_pass.tasks:
            predicted = sum(map(bool, predictions[task.name]))
            if lacking := sources.rows - predicted:
                notes.append(f"{task.name}: {counted(lacking, 'row')} without a prediction")
            if not predicted or not _may_score(task, source):
                continue
            made, rows = predictions[task.name].by_row(), source
            scored = _scored(task, source, encoder_pass.read)
            if left_out := int((~scored).sum()):
                notes.append(
                    f"{task.name}: not scored: {counted(left_out, 'row')} without a label, or that "
                    "training drops"
                )
                made = {row: each for row, each in made.items() if scored[row]}
                rows = replace(source, numbers=source.numbers[scored])
            try:
                _check_labels(task, rows)
                metrics = task.metrics(made, source) if made else {}
            except UserError as error:
                notes.append(f"{task.name}: not scored: {error}")
                continue
            try:
                own = predictor.recipe.own_metrics.get(task.name, ())
                metrics = {**metrics, **own_scores(own, task, made, source)}
            except UserError as error:
                notes.append(f"{task.name}: not scored by metrics of your own: {error}")
            if metrics:
                scores[task.name] = {name: float(value) for name, value in metrics.items()}
                if report := task.report(made, source):
                    reports[task.name] = report
    return scores, reports, notes


def _may_score(task: TableTask, source: TableSource) -> bool:
    """False if it needs labels and the input has none of any kind."""
    labels = task.label_roles()
    return not labels or any(is_label(role) or role in labels for role in source.columns)


def _scored(task: TableTask, source: TableSource, read: TableSettings) -> np.ndarray:
    """(rows,) bool: those that evaluation in training would score. Of a task whose columns of
    labels are not there all of them: it has no scores, or needs no labels."""
    if not any(role in source.columns for role in task.label_roles()):
        return np.ones(len(source), bool)
    scored = task.labeled(source)
    if drops := drops_of(read):
        kept = [not dropped(source.row(item), drops) for item in range(len(source))]
        scored = scored & np.array(kept, bool)
    return scored


def _check_labels(task: TableTask, source: TableSource) -> None:
    """Raises UserError if the labels cannot be scored."""
    if any(role in source.columns for role in task.label_roles()):
        task.check(source, labeled=True)


def _publish(
    predictor: Predictor,
    job: PredictionJob,
    opened: Sequence[_InputTable],
    predictions: Predictions,
    scores: Mapping[str, Mapping[str, Any]],
) -> list[Path]:
    """Write the folder of predictions, complete or not at all; returns its files."""
    tasks = predictor.tasks
    names = file_names(tasks)
    listed: dict[str, list[str]] = {}
    tables = {
        task.name: found.table
        for encoder_pass, found in zip(predictor.passes, opened, strict=True)
        for task in encoder_pass.tasks
    }

    def write(folder: Path) -> None:
        for name, task in tasks.items():
            source = predictor.source(tables[name])
            made = predictions[name]
            listed[name] = write_task(folder, names[name], task, made, source, tsv=job.tsv)
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
    """The task settings that palm-ds evaluate needs to score its predictions."""
    kind = recipe.tasks[task].get("kind", task)
    settings = asdict(recipe.built_tasks[task])
    return {"kind": kind, **{k: v for k, v in settings.items() if k not in ("name", "source")}}
