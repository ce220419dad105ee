"""The tasks of a Hugging Face folder: each classification head of the checkpoint as a task that
predicts.

    ForSequenceClassification    classification, multi_label (by `problem_type`) or regression
    ForMultipleChoice            multiple_choice
    ForTokenClassification       tagging
    ForQuestionAnswering         reading
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.tasks.shared.tag_schemes import of_chunks
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.weights.formats.contents import CheckpointContents, HeadInfo
from palm_ds.weights.formats.huggingface.names import NEXT_SENTENCE, QUESTION_ANSWERING


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
    outputs = head.outputs
    labels = list(outputs.labels) or [f"LABEL_{number}" for number in range(head.classes)]
    if name == QUESTION_ANSWERING:
        return {"kind": "reading", "unanswerable": False, "max_answer": 30, "score": "squad1"}
    if outputs.head_class == "ForMultipleChoice":
        return {"kind": "multiple_choice", "answers": "number", "count_from": 0}
    if not head.pooled:
        return {"kind": "tagging", "labels": labels, "scheme": _scheme(labels), "units": "words"}
    if outputs.problem_type == "regression" or head.classes == 1:
        return {"kind": "regression", "scale": False}
    if outputs.problem_type == "multi_label_classification":
        return {"kind": "multi_label", "labels": labels}
    return {"kind": "classification", "labels": labels}


def _scheme(labels: Sequence[str]) -> str:
    if not of_chunks([labels]):
        return "none"
    return "BIOES" if any(label[:2] in ("E-", "S-") for label in labels) else "BIO"
