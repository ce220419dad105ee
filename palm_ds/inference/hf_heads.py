"""The tasks of a Hugging Face folder: each classification head of the checkpoint as a task that
predicts.

    ForSequenceClassification    class, labels (by `problem_type`) or number
    ForMultipleChoice            choices
    ForTokenClassification       tokens
    ForQuestionAnswering         answer

The task that `imports` such a head says what settings it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.interfaces import ImportedHead
from palm_ds.data.tasks.task import find, fine_tuning_kinds
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.weights.formats.contents import CheckpointContents, HeadInfo
from palm_ds.weights.formats.huggingface.architecture import NEXT_SENTENCE, QUESTION_ANSWERING


def recipe_of(contents: CheckpointContents) -> Recipe:
    """A recipe to predict with. Raises UserError for a checkpoint without such a head."""
    tasks = {
        name: {"source": "rows", **_task(name, head)}
        for name, head in contents.heads.items()
        if head.kind == "classes" and name != NEXT_SENTENCE
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


def _task(name: str, head: HeadInfo) -> Mapping[str, Any]:
    """The kind and the settings of a head's task."""
    labels = list(head.outputs.labels) or [f"LABEL_{number}" for number in range(head.classes)]
    wanted = _sort(name, head)
    kinds = {kind: find(kind) for kind in fine_tuning_kinds()}
    kind = next(kind for kind, task in kinds.items() if task.imports == wanted)
    return {"kind": kind, **kinds[kind].imported(labels)}


def _sort(name: str, head: HeadInfo) -> ImportedHead:
    outputs = head.outputs
    if name == QUESTION_ANSWERING:
        return "answer"
    if outputs.head_class == "ForMultipleChoice":
        return "choices"
    if not head.pooled:
        return "tokens"
    if outputs.problem_type == "regression" or head.classes == 1:
        return "number"
    return "labels" if outputs.problem_type == "multi_label_classification" else "class"
