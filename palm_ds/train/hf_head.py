"""The head that a fine-tuned model takes along to Hugging Face: that of its only task.

Which class of transformers computes what a task's head does, the task says (`Task.hf_export`). A
run of several tasks exports the encoder alone: a Hugging Face folder holds one head.
palm-ds convert writes any one of them (--head NAME).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from palm_ds.train.recipe import Recipe
from palm_ds.weights.formats.huggingface.target import HeadTaken

_PARTS = {"out.weight", "out.bias"}  # the parameters of a head that transformers has too


def head_taken(recipe: Recipe, parameters: Collection[str]) -> HeadTaken | None:
    """The head of the recipe's only task over a table, not counting auxiliary tasks and those that
    hide words. None if there are several, or if transformers has no such head. `parameters`: the
    names in the model."""
    tasks = recipe.built_tasks.values()
    tasks = [x for x in tasks if x.reads == "table" and not (x.auxiliary or x.edits_text)]
    head = tasks[0].hf_export() if len(tasks) == 1 else None
    if head is None:
        return None
    prefix = f"heads.{head.name}."
    parts = {x.removeprefix(prefix) for x in parameters if x.startswith(prefix)}
    return replace(head, task_id=recipe.task_ids[tasks[0].name]) if parts == _PARTS else None
