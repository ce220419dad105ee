"""Checks of a recipe whose encoder reads documents window by window, with memories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from palm_ds.common.errors import UserError
from palm_ds.data.stream.stages import tasks_of
from palm_ds.data.tasks.task import Task

if TYPE_CHECKING:
    from palm_ds.train.recipe.recipe import Recipe


def check_documents(recipe: Recipe) -> None:
    """Raises UserError for what slots of documents cannot have."""
    kind = recipe.backbone_config.kind
    for name, task in recipe.built_tasks.items():
        if task.documents == "no":
            raise UserError(
                f"tasks.{name}: reads texts in packed rows, but backbone.kind: {kind} reads "
                "documents window by window; use segment_reordering, knowledge_masking or "
                "classification, or another encoder"
            )
    if recipe.examples:
        raise UserError(
            f"batch: {recipe.batch}, but each row of a step is a slot with a document of its own; "
            f"write `{recipe.examples} rows`"
        )
    refused = {
        "teacher": recipe.teacher is not None,
        "optimizer.fgm": recipe.optimizer.fgm > 0,
        "evaluate.pairs": bool(recipe.evaluate.pairs),
        "evaluate.probe": recipe.evaluate.probe is not None,
    }
    for key, given in refused.items():
        if given:
            raise UserError(
                f"{key}: is for texts in packed rows; backbone.kind: {kind} reads documents "
                "window by window; remove it"
            )
    _check_stages(recipe)


def _check_stages(recipe: Recipe) -> None:
    """Every stage has one task group over one source of data, and as many slots at every step."""
    for group in recipe.curriculum_spec.task_groups:
        source = recipe.sources[recipe.built_tasks[tasks_of(group)[0]].source]
        if not source.table and len(source.weights) > 1:
            raise UserError(
                f"stages: {group!r} reads a `mix` of corpora, but slots read the documents of one "
                "corpus; prepare one of all texts"
            )
    spec = recipe.curriculum_spec
    stages = {"explicit": len(spec.budgets), "sequential": 1}.get(spec.kind, len(spec.task_groups))
    for number in range(stages):
        groups = spec.groups_of(number)
        if len(groups) > 1:
            named = ", ".join(map(repr, groups))
            raise UserError(
                f"stages.{number}: {named}: a slot reads a document for one task group; join tasks "
                "with +, or give each task group a stage of its own"
            )
    for number, own in enumerate(recipe.stage_plan.written):
        if len(own.rates) > 1 and own.rates[0] != own.rates[-1]:
            raise UserError(
                f"stages.{number}.rate: changes within the stage, but a document is masked as a "
                "whole; give one rate"
            )
    for number, size in recipe.stage_plan.own_sizes.items():
        if size.growth:
            raise UserError(
                f"stages.{number}.batch: grows, but slots keep their documents; give one size"
            )


def check_no_documents(tasks: Mapping[str, Task], kind: str) -> None:
    """Raises UserError for tasks that only an encoder with memories can learn."""
    for name, task in tasks.items():
        if task.documents == "only":
            raise UserError(
                f"tasks.{name}: reads documents window by window, for which backbone.kind: {kind} "
                "has no memories; use kind: ernie_doc"
            )
