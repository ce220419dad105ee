"""The tasks that a model predicts: those of its recipe; of a Hugging Face folder, which has none,
each classification head of the checkpoint as a task.

    ForSequenceClassification    class, labels (by `problem_type`) or number
    ForMultipleChoice            choices
    ForTokenClassification       tokens
    ForQuestionAnswering         answer
    CrossEncoder                 class, labels or number, of the means of tokens

The task that `imports` such a head says what settings it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError, suggest
from palm_ds.data.stream.stages import tasks_of
from palm_ds.data.tasks.interfaces import ImportedHead
from palm_ds.data.tasks.task import TableTask, find, fine_tuning_kinds
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.weights.formats.contents import CheckpointContents, HeadInfo
from palm_ds.weights.formats.huggingface.architecture import PAIR_HEADS, QUESTION_ANSWERING


def input_task_of(recipe: Recipe, name: str) -> TableTask:
    """The task that builds the input of a task: itself or, if it only shared the texts of other
    tasks in training, the first task of the first such task group."""
    tasks = recipe.built_tasks
    task_groups = [tasks_of(task_group) for task_group in recipe.curriculum_spec.task_groups]
    firsts = [
        task_group[0]
        for task_group in task_groups
        if name in task_group and tasks[task_group[0]].reads == "table"
    ]
    task = tasks[name if name in firsts or not firsts else firsts[0]]
    assert isinstance(task, TableTask)
    return task


def asked_tasks(recipe: Recipe, names: Sequence[str], where: Path) -> dict[str, TableTask]:
    """The named tasks in the recipe's order. By default all that can predict; auxiliary tasks and
    those that mask tokens only if there are no others."""
    tasks = recipe.built_tasks
    able = {
        name: task for name, task in tasks.items() if isinstance(task, TableTask) and task.predicts
    }
    for name in names:
        if name not in tasks:
            raise UserError(f"{where}: no task {name!r}{suggest(name, list(able))}")
        if name not in able:
            raise UserError(
                f"{where}: {name!r} predicts nothing for rows of a table; choose{_or(list(able))}"
            )
    usual = [x for x in able if not (tasks[x].auxiliary or tasks[x].edits_text)]
    wanted = names or usual or list(able)
    if not wanted:
        raise UserError(
            f"{where}: none of its tasks ({', '.join(tasks)}) predicts anything for rows of a table"
        )
    return {name: task for name, task in able.items() if name in wanted}


def _or(names: Sequence[str]) -> str:
    return f" {' or '.join(names)}" if names else " another model: none of its tasks does"


def recipe_of(contents: CheckpointContents) -> Recipe:
    """A recipe to predict with. Raises UserError for a checkpoint without such a head."""
    tasks = {
        name: {"source": "rows", **_task(name, head)}
        for name, head in contents.heads.items()
        if head.kind == "classes" and name not in PAIR_HEADS
    }
    if not tasks:
        raise UserError(
            f"{contents.path}: is {contents.format}, which has no head that predicts; `palm-ds "
            "embed` and palm.Backbone give its vectors, and palm.Trainer trains a head on it"
        )
    values = {
        "backbone": asdict(contents.config),
        "length": contents.config.max_length,
        "batch": "1 examples",
        "sources": {"rows": {"table": "rows", "tokenizer": str(contents.tokenizer or "")}},
        "tasks": tasks,
        "stages": [dict.fromkeys(tasks, "1 steps")],
    }
    return make_recipe(values, str(contents.path))


def check_numbers(contents: CheckpointContents) -> None:
    """Raises UserError for a head that predicts several numbers, which no task here does."""
    for name, head in contents.heads.items():
        if head.outputs.problem_type == "regression" and head.classes > 1:
            raise UserError(
                f"{contents.path}: its head {name!r} predicts {head.classes} numbers (problem_type "
                "regression), but tasks here predict one; for classes, problem_type is "
                "single_label_classification or multi_label_classification"
            )


def _task(name: str, head: HeadInfo) -> Mapping[str, Any]:
    """The kind and the settings of a head's task."""
    labels = list(head.outputs.labels) or [f"LABEL_{number}" for number in range(head.classes)]
    wanted = _sort(name, head)
    kinds = {kind: find(kind) for kind in fine_tuning_kinds()}
    kind = next(kind for kind, task in kinds.items() if task.imports == wanted)
    pooling = {"pooling": "mean"} if head.outputs.averaged else {}
    return {"kind": kind, **kinds[kind].imported(labels), **pooling}


def _sort(name: str, head: HeadInfo) -> ImportedHead:
    outputs = head.outputs
    if name == QUESTION_ANSWERING:
        return "answer"
    if outputs.head_class == "ForMultipleChoice":
        return "choices"
    if not head.pooled:
        return "tokens"
    if outputs.problem_type == "multi_label_classification":
        return "labels"
    return "number" if outputs.problem_type == "regression" or head.classes == 1 else "class"
