"""Rows to predictions and scores, with a model that is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.data.table_source import TableSource
from palm_ds.data.task_with_data import Listed, open_rows
from palm_ds.inference.predict_files import without_labels
from palm_ds.inference.predictor import EncoderPass, Predictor, asked_tasks
from palm_ds.runtime.processes import Processes


def select_tasks(predictor: Predictor, names: Sequence[str], where: Path) -> Predictor:
    """The same model, asked for these tasks; for all, without any."""
    return replace(predictor, tasks=asked_tasks(predictor.recipe, names, where))


def predictions_of(
    predictor: Predictor,
    rows: Listed,
    processes: Processes,
    columns: Mapping[str, Any] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """{task: a prediction for every row, in order}, on every process. Tasks that cannot read such
    rows are left out; UserError where none can."""
    found: dict[str, list[dict[str, Any]]] = {}
    why = ""
    for each in predictor.passes:
        chosen = {**each.read.columns, **(columns or {})}
        read = replace(each.read, columns=chosen, drop={}, bad_rows="stop", split="")
        try:
            source = predictor.source(open_rows(rows, without_labels(read), "rows"))
            for task in (each.arranger, *each.tasks):
                task.check(source, labelled=False)
        except UserError as error:
            why = why or str(error)
            continue
        found |= _pass(predictor, each, source, processes)
    if not found:
        raise UserError(why)
    return found


def scores_of(
    predictor: Predictor, name: str, rows: Listed, processes: Processes
) -> dict[str, float]:
    """{metric: value} of a task on rows with labels, read as its training rows were; on every
    process."""
    predictor = select_tasks(predictor, [name], Path())
    (each,) = predictor.passes
    task = predictor.tasks[name]
    source = predictor.source(open_rows(rows, each.read, "rows"))
    task.check(source, labelled=True)
    made = _pass(predictor, each, source, processes)[name]
    return task.metrics(dict(enumerate(made)), source)


def _pass(
    predictor: Predictor, each: EncoderPass, source: TableSource, processes: Processes
) -> dict[str, list[dict[str, Any]]]:
    names = [task.name for task in each.tasks]
    found: dict[str, list[dict[str, Any]]] = {name: [{}] * len(source) for name in names}
    with _reading(predictor):
        rank, world = processes.rank, processes.world
        mine = list(predictor.predict(each, source, rank=rank, world=world))
    for chunk in [chunk for theirs in processes.gather(mine) for chunk in theirs]:
        for name in names:
            for row, made in zip(chunk.rows, chunk.predictions[name], strict=True):
                found[name][int(row)] = made
    return found


@contextmanager
def _reading(predictor: Predictor) -> Iterator[None]:
    """Without dropout; as it was, afterwards."""
    training = predictor.model.training
    predictor.model.eval()
    try:
        yield
    finally:
        predictor.model.train(training)
