"""Writes the scores of a recipe's teachers on its texts, for training without the teachers.

    recipe.teacher ──rows of tables, or rows of every step──> .OUTPUT.parts/part_N.parquet
                                                                          │
    OUTPUT (palm_ds/data/tasks/score_file.py), complete or absent <───────────┘

Tables are read row by row, with the teacher's tokenizer, so that its vocabulary may be another.
Masked words, texts to write and corpora are read step by step, as the training will. A part that an
interrupted run has finished is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from palm_ds.common.atomic import move_into_place
from palm_ds.common.errors import UserError
from palm_ds.common.files import check_not_input, hash_of_text
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.task_group_dataset import (
    TaskGroupDataset,
    build_examples,
    collate_built,
    refs,
)
from palm_ds.data.tasks.score_file import ScoreFileInfo, ids_column, with_info
from palm_ds.data.tasks.task import TableTask
from palm_ds.inference.parts import OutputParts
from palm_ds.model.distillation.soft_labels import soft_name
from palm_ds.model.distillation.soft_vocabulary_loss import TopScores
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.runtime.processes.processes import Processes
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.setup.build import AnyStream, build_stream
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import Data, open_data
from palm_ds.train.teachers.distillation_plan import DistillationPlan, resolve_teachers
from palm_ds.train.teachers.stored_scores import EXTENDED, stream_fingerprint
from palm_ds.train.teachers.teachers import Teachers, teachers_of_scores

_ROWS = 1024  # of a part of a table
_STEPS = 32  # of a part of a stream
_BATCH = 64  # rows of a table that the teacher reads together


@dataclass(frozen=True, kw_only=True)
class TeachSummary:
    """Summary of the scores written."""

    rows: int
    by: str
    """`rows of tables` or `rows of steps`"""
    parts: int
    continued: int
    """Parts that an interrupted run had finished."""


@dataclass(frozen=True, kw_only=True)
class _TeachWork:
    """Recipe, data and models that a part is computed from."""

    recipe: Recipe
    data: Data
    plan: DistillationPlan
    teachers: Teachers
    device: torch.device
    by_rows: bool
    """Row by row of a table, or step by step."""


def teach(
    recipe: Recipe,
    output: Path,
    *,
    ds_config: DSConfig,
    processes: Processes,
) -> TeachSummary:
    """Write the scores of a recipe's teachers to a file. Raises UserError."""
    if recipe.teacher is None or recipe.teacher.file and not recipe.teacher.all_models:
        raise UserError("teacher: names no model to write the scores of; give it a `path`")
    if processes.world > 1:
        raise UserError("palm-ds teach: runs in one process; start it without a launcher")
    recipe = replace(recipe, teacher=replace(recipe.teacher, file=""))
    work = _open_work(recipe, RunSpec(recipe=recipe, ds_config=ds_config, folder=output), processes)
    info = _info(work)
    makers = _row_parts(work) if work.by_rows else _step_parts(work)
    if output.is_dir():
        raise UserError(f"{output}: is a folder; name a file")
    for table in work.data.tables.values():
        check_not_input(output, table.names)
    continued = rows = 0
    key = _key(work, info, ds_config.precision)
    with OutputParts.opened(output, ".parquet", key) as parts:
        for number, make in enumerate(makers):
            if parts.path(number).exists():
                continued += 1
            else:
                parts.write(number, partial(pq.write_table, make()))
            rows += pq.read_metadata(parts.path(number)).num_rows
        _join(parts, len(makers), output, info)
    return TeachSummary(
        rows=rows,
        by="rows of tables" if work.by_rows else "rows of steps",
        parts=len(makers),
        continued=continued,
    )


def _open_work(recipe: Recipe, run: RunSpec, processes: Processes) -> _TeachWork:
    """The data and the teachers of a recipe."""
    data = open_data(recipe)
    recipe = resolve(recipe, data)
    by_rows = _reads_rows(recipe, data)
    if by_rows:
        data = _with_teachers_tokenizer(data)
        _check_rows(recipe, data)
    elif recipe.extend:
        raise UserError(f"extend: {EXTENDED}")
    plan = resolve_teachers(recipe, data)
    if not plan.soft_tasks:
        raise UserError("teacher: no task has soft labels, and only those are written")
    teachers = teachers_of_scores(plan, replace(run, recipe=recipe), data, processes)
    return _TeachWork(
        recipe=recipe,
        data=data,
        plan=plan,
        teachers=teachers,
        device=processes.device,
        by_rows=by_rows,
    )


def _reads_rows(recipe: Recipe, data: Data) -> bool:
    """Whether all tasks read a table row by row: one example of each row, whatever the step. Texts
    to write have other noise in each step, and tokens to store."""
    for task in recipe.built_tasks.values():
        if not isinstance(task, TableTask) or task.edits_text or task.predicts == "texts":
            return False
        for _, source, _ in data.train[task.source]:
            if len(task.items(source, recipe.length)) != len(source):
                return False
    return True


def _check_rows(recipe: Recipe, data: Data) -> None:
    """Raises UserError if rows are split with the teacher's tokenizer alone."""
    if not _reads_rows(recipe, data):
        raise UserError(
            "teacher: with its tokenizer, rows are longer than `length` and are split; raise "
            "`length` or the task's `max_length`"
        )


def _with_teachers_tokenizer(data: Data) -> Data:
    """The data as the teacher reads them."""
    places = [contents.tokenizer for contents in data.teacher_models.values()]
    tokenizers = [load_tokenizer(place) if place else data.tokenizer for place in places]
    if len({each.fingerprint for each in tokenizers}) > 1:
        raise UserError("teacher.models: scores of models with different tokenizers have no mean")
    tokenizer = tokenizers[0]
    train = {
        name: [(part, replace(source, tokenizer=tokenizer), w) for part, source, w in parts]
        for name, parts in data.train.items()
    }
    return replace(data, tokenizer=tokenizer, train=train)


def _info(work: _TeachWork) -> ScoreFileInfo:
    """Teachers, tasks and data that the scores in the file belong to."""
    tasks = work.recipe.built_tasks
    labels = {name: list(tasks[name].head_outputs().labels) for name in work.plan.soft_tasks}
    about: dict[str, Any] = {"teacher": dict(work.data.teachers), "labels": labels}
    outputs = {name: tasks[name].head_outputs() for name in labels}
    about["scales"] = {
        name: (output.mean, output.deviation) for name, output in outputs.items() if output.scaled
    }
    if not work.by_rows:
        stream = stream_fingerprint(work.recipe, work.data)
        return ScoreFileInfo(**about, stream=stream, top_k=work.teachers.top_k)
    used = {tasks[name].source for name in labels}
    tables = {name: work.data.train[name][0][1].table.fingerprint for name in used}
    return ScoreFileInfo(**about, tables=tables)


# ---- rows of tables ----


def _row_parts(work: _TeachWork) -> list[Callable[[], pa.Table]]:
    """One maker for each part."""
    makers = []
    tasks = work.recipe.built_tasks
    for name in dict.fromkeys(tasks[task].source for task in work.plan.soft_tasks):
        (_, source, _), *_ = work.data.train[name]
        if source.endless:
            raise UserError(
                f"{source.endless.where}: has no end; let the teacher label its rows during "
                "training (`teacher: {path: ...}`)"
            )
        for first in range(0, len(source), _ROWS):
            part = replace(source, numbers=source.numbers[first : first + _ROWS])
            makers.append(partial(_row_part, work, name, part))
    return makers


def _row_part(work: _TeachWork, name: str, source: TableSource) -> pa.Table:
    """The scores of some rows, for all tasks that read them."""
    columns: dict[str, Any] = {
        "source": [name] * len(source),
        "row": source.numbers.astype(np.int64),
    }
    for task in work.plan.soft_tasks:
        mine = work.recipe.built_tasks[task].source == name
        scores = _scores_of_rows(work, task, source) if mine else [None] * len(source)
        columns[task] = pa.array(scores, pa.list_(pa.float32()))
    return pa.table(columns)


def _scores_of_rows(work: _TeachWork, name: str, source: TableSource) -> list[np.ndarray]:
    recipe, task = work.recipe, work.recipe.built_tasks[name]
    dataset: TaskGroupDataset[Any] = TaskGroupDataset(
        name=name,
        tasks=(task,),
        task_id=recipe.task_ids[name],
        source=source,
        seed=0,
        max_length=recipe.length,
        fixed=True,
        segments=recipe.backbone_config.token_types,
        soft={name: None},
    )
    scored: list[np.ndarray] = []
    for first in range(0, len(source), _BATCH):
        numbers = np.arange(first, min(first + _BATCH, len(source)))
        built = build_examples([dataset], [[x] for x in refs(0, numbers, dataset.layouts(numbers))])
        length = max(len(each.example) for row in built for each in row)
        batch = collate_built([dataset], built, length, work.data.vocabulary.pad)
        scores = work.teachers(batch.to(work.device), 0).labels[soft_name(name)][1]
        counts = [len(row[0].example.labels[soft_name(name)][0]) for row in built]
        scored += [x.flatten().numpy() for x in scores.cpu().split(counts)]
    return scored


# ---- rows of steps ----


def _step_parts(work: _TeachWork) -> list[Callable[[], pa.Table]]:
    """One maker for each part."""
    stream = build_stream(work.recipe, work.data, soft=work.plan.soft_tasks)
    steps = work.recipe.curriculum.steps
    starts = range(0, steps, _STEPS)
    ends = (range(first, min(first + _STEPS, steps)) for first in starts)
    return [partial(_step_part, work, stream, some) for some in ends]


def _step_part(work: _TeachWork, stream: AnyStream, steps: range) -> pa.Table:
    """The scores of all rows of some steps."""
    columns: dict[str, list[Any]] = {"step": [], "row": []}
    for step in steps:
        rows = stream.step_rows(step)
        for first in range(0, len(rows), _BATCH):
            some = rows[first : first + _BATCH]
            batch = work.teachers(stream.build(step, some, first).to(work.device), step)
            columns["step"] += [step] * len(some)
            columns["row"] += range(first, first + len(some))
            for task in work.plan.soft_tasks:
                for name, values in _by_row(batch, task).items():
                    columns.setdefault(name, []).extend(values)
    types = {name: pa.list_(_type_of(name)) for name in columns if name not in ("step", "row")}
    return pa.table({x: pa.array(v, types.get(x, pa.int64())) for x, v in columns.items()})


def _type_of(column: str) -> pa.DataType:
    return pa.int32() if column.endswith(ids_column("")) else pa.float32()


def _by_row(batch: Batch, task: str) -> dict[str, list[np.ndarray]]:
    """{column: the values of each row} of a task's soft labels."""
    assert batch.teacher is not None
    rows, length = batch.input_ids.shape
    where, scores = batch.labels.get(soft_name(task), (torch.zeros(0), torch.zeros(0, 1)))
    counts = torch.bincount(where.cpu().long() // length, minlength=rows).tolist()
    words = batch.teacher.words.get(task)
    if words is None:
        return {task: _split(scores, counts)}
    assert isinstance(words, TopScores)
    ids, values = words.ids[: sum(counts)], words.values[: sum(counts)]
    return {ids_column(task): _split(ids.int(), counts), task: _split(values, counts)}


def _split(values: torch.Tensor, counts: Sequence[int]) -> list[np.ndarray]:
    """The values (n, any) of each row, one after another."""
    return [each.flatten().numpy() for each in values.cpu().split(list(counts))]


# ---- the output ----


def _key(work: _TeachWork, info: ScoreFileInfo, precision: str) -> list[Any]:
    """Settings that parts follow from."""
    resolved = work.recipe.resolved()
    given = {name: resolved[name] for name in ("length", "tasks", "teacher")}
    rows = {name: _rows_of(work.data, name) for name in info.tables}
    return [asdict(info), given, precision, rows]


def _rows_of(data: Data, name: str) -> str:
    """A hash of which rows of a table are read: not those that are held out."""
    (_, source, _), *_ = data.train[name]
    return hash_of_text(source.numbers.astype(np.int64).tobytes().hex())


def _join(parts: OutputParts, count: int, output: Path, info: ScoreFileInfo) -> None:
    files = [parts.path(number) for number in range(count)]
    schema = with_info(pq.read_schema(files[0]), info)
    temporary = parts.folder / "whole"
    with pq.ParquetWriter(temporary, schema, write_page_checksum=True) as writer:
        for file in files:  # each a row group: training holds one at a time
            part = pq.read_table(file).replace_schema_metadata(schema.metadata)
            writer.write_table(part, row_group_size=len(part))
    move_into_place(temporary, output)
