"""The head that a fine-tuned model takes along to Hugging Face: of one task, its only one.

    classification, matching      AutoModelForSequenceClassification, with the classes' names
    ranking, regression
    multi_label                   the same, of the problem type multi_label_classification
    tagging (without a CRF)       AutoModelForTokenClassification, with the tags' names
    reading                       AutoModelForQuestionAnswering
    multiple_choice               AutoModelForMultipleChoice

A run of several tasks leaves the encoder alone there: a folder of Hugging Face's holds one head.
palm-ds convert writes any one of them (--head NAME).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from palm_ds.data.task import Task
from palm_ds.tasks.masked_words import MaskedWords
from palm_ds.tasks.multi_label import MultiLabel
from palm_ds.tasks.multiple_choice import MultipleChoice
from palm_ds.tasks.reading import Reading
from palm_ds.tasks.regression import Regression
from palm_ds.train.recipe import Recipe

_PARTS = {"out.weight", "out.bias"}  # of a head that transformers has too


@dataclass(frozen=True, kw_only=True)
class HeadTaken:
    """A head on its way into a folder of Hugging Face's."""

    name: str
    task_id: int
    labels: tuple[str, ...] = ()
    """The names of its classes, where they have some."""
    head_class: str = ""
    """ForQuestionAnswering, ...; empty: what fits it."""
    about: dict[str, Any] = field(default_factory=dict)
    """Further entries of config.json."""


def head_taken(recipe: Recipe, parameters: Collection[str]) -> HeadTaken | None:
    """That of the recipe's only task over a table, auxiliary ones not counted; none where there are
    several, or where transformers has no such head. `parameters`: the model's names."""
    tasks = [task for task in recipe.built_tasks.values() if _counts(task)]
    if len(tasks) != 1:
        return None
    task = tasks[0]
    name = task.share or task.name
    prefix = f"heads.{name}."
    parts = {x.removeprefix(prefix) for x in parameters if x.startswith(prefix)}
    if parts != _PARTS or (isinstance(task, Regression) and task.scale):
        return None
    return HeadTaken(
        name=name,
        task_id=recipe.task_ids[task.name],
        labels=tuple(getattr(task, "labels", ())),
        head_class=_class_of(task),
        about={"problem_type": "multi_label_classification"}
        if isinstance(task, MultiLabel)
        else {},
    )


def _counts(task: Task) -> bool:
    return task.reads == "table" and not task.auxiliary and not isinstance(task, MaskedWords)


def _class_of(task: Task) -> str:
    if isinstance(task, Reading):
        return "ForQuestionAnswering"
    return "ForMultipleChoice" if isinstance(task, MultipleChoice) else ""
