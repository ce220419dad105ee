"""Predictions and scores for rows, with a loaded model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted
from palm_ds.data.reader.options import without_labels
from palm_ds.data.sources.row_inputs import (
    TUPLE_ROLES,
    Listed,
    Pairs,
    Rows,
    columns_for,
    listed,
    open_rows,
)
from palm_ds.data.sources.table import TableSource
from palm_ds.inference.model_tasks import asked_tasks
from palm_ds.inference.predictor import EncoderPass, Predictor, chunks
from palm_ds.inference.score_files import scored_rows
from palm_ds.runtime.processes.process_group import ProcessGroup
from palm_ds.train.recipe.custom_metrics import Metric, own_scores

log = logging.getLogger(__name__)


def select_tasks(predictor: Predictor, names: Sequence[str], where: Path) -> Predictor:
    """The predictor restricted to the named tasks; all tasks if `names` is empty."""
    return replace(predictor, tasks=asked_tasks(predictor.recipe, names, where))


def listed_for(predictor: Predictor, rows: Rows) -> Listed:
    """Files or rows as its tasks read them: tuples as in training, if all have the same roles."""
    roles = {tuple(each.input_task.tuple_roles) for each in predictor.passes}
    return listed(rows, tuple_roles=roles.pop() if len(roles) == 1 else TUPLE_ROLES)


def predictions_of(
    predictor: Predictor,
    rows: Listed,
    processes: ProcessGroup,
    columns: Mapping[str, Any] | None = None,
    format: str = "",
) -> dict[str, list[dict[str, Any]]]:
    """{task: a prediction for every row, in order}, on every process. Skips tasks that cannot read
    such rows; raises UserError if none can, or for a `format` of rows that are not files."""
    if format and isinstance(rows, tuple):
        raise UserError(f"format: {format!r} is for files, but these rows are in memory; remove it")
    if not isinstance(rows, str) and not rows:
        return {name: [] for name in predictor.tasks}
    predictions: dict[str, list[dict[str, Any]]] = {}
    why = ""
    for encoder_pass in predictor.passes:
        try:
            own = _columns(encoder_pass, rows)
            read = replace(encoder_pass.read, columns={**own, **(columns or {})}, drop={}, split="")
            read = replace(read, bad_rows="stop", format=format or read.format)
            source = predictor.source(open_rows(rows, without_labels(read), "rows"))
            for task in (encoder_pass.input_task, *encoder_pass.tasks):
                task.check(source, labeled=False)
        except UserError as error:
            why = why or str(error)
            continue
        predictions |= _pass(predictor, encoder_pass, source, processes)
    if not predictions:
        raise UserError(why)
    return predictions


def scores_of(
    predictor: Predictor, name: str, rows: Listed, processes: ProcessGroup
) -> dict[str, float]:
    """{metric: value} of a task on rows read like its training rows; those without a label are not
    scored. The same on every process. Raises UserError, also if no row has a label."""
    predictor = select_tasks(predictor, [name], Path())
    (each,) = predictor.passes
    task = predictor.tasks[name]
    read = replace(each.read, columns=_columns(each, rows), missing_labels="keep")
    source = predictor.source(open_rows(rows, read, "rows"))
    scored = scored_rows(task, source)
    if left_out := len(source) - len(scored):
        log.warning("%s: not scored: %s without a label", name, counted(left_out, "row"))
    task.check(replace(source, numbers=source.numbers[scored]), labeled=True)
    made = _pass(predictor, each, source, processes, whole=True)[name]
    predictions = {
        row: made[row] for row in scored.tolist() if made[row]
    }  # {}: cannot be predicted
    if not predictions:
        return {}
    own = _own_metrics(predictor, name)
    return task.metrics(predictions, source) | own_scores(own, task, predictions, source)


def _own_metrics(predictor: Predictor, name: str) -> Sequence[Metric]:
    """Without those of a notebook, or of code that is not here: a model can be scored anywhere."""
    try:
        return predictor.recipe.own_metrics.get(name, ())
    except UserError as error:
        log.warning("%s: not scored by metrics of your own: %s", name, error)
        return ()


def _columns(each: EncoderPass, rows: Listed) -> dict[str, Any]:
    """{role: column} to read these rows by. Raises UserError for pairs of texts if the task reads
    only one."""
    if not isinstance(rows, tuple):
        return dict(each.read.columns)
    texts = each.input_task.source_roles
    if tuple(each.input_task.tuple_roles) != TUPLE_ROLES:
        texts = texts or tuple(each.input_task.tuple_roles[:2])
    if isinstance(rows, Pairs) and len(texts) == 1:
        raise UserError(f"rows: pairs, but {each.input_task.name} reads one text, {texts[0]}")
    return columns_for(rows, each.read.columns, texts)


def _pass(
    predictor: Predictor,
    each: EncoderPass,
    source: TableSource,
    processes: ProcessGroup,
    *,
    whole: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """`whole`: with what only metrics read."""
    names = [task.name for task in each.tasks]
    predictions: dict[str, list[dict[str, Any]]] = {name: [{}] * len(source) for name in names}
    with _eval_mode(predictor):
        some = chunks(source)[processes.rank :: processes.world]
        own = list(predictor.predict(each, source, some=some, whole=whole))
    for chunk in [chunk for every in processes.gather(own) for chunk in every]:
        for name in names:
            for row, made in zip(chunk.rows, chunk.predictions[name], strict=True):
                predictions[name][int(row)] = made
    return predictions


@contextmanager
def _eval_mode(predictor: Predictor) -> Iterator[None]:
    """The model without dropout; its mode is restored afterwards."""
    training = predictor.model.training
    if not training:  # setting it again would take longer than a short text
        yield
        return
    predictor.model.eval()
    try:
        yield
    finally:
        predictor.model.train(training)
