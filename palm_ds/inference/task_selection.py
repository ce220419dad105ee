"""Tasks of a recipe that are predicted, and the task that builds the input of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from palm_ds.common.errors import UserError, suggest
from palm_ds.data.stream.stages import tasks_of
from palm_ds.data.tasks.task import TableTask
from palm_ds.train.recipe.recipe import Recipe


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
        raise UserError(f"{where}: none of its tasks ({', '.join(tasks)}) reads rows of a table")
    return {name: task for name, task in able.items() if name in wanted}


def _or(names: Sequence[str]) -> str:
    return f" {' or '.join(names)}" if names else " another model: none of its tasks does"
