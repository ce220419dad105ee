"""Checks of a recipe whose encoder reads documents window by window, with memories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palm_ds.common.errors import UserError
from palm_ds.data.stream.stages import tasks_of
from palm_ds.data.stream.windows import DocumentSettings
from palm_ds.data.tasks.task import Task
from palm_ds.model.encoder.encoder import memory_shape
from palm_ds.train.recipe.checks import TaskChecks
from palm_ds.train.recipe.stage_settings import StagePlan


def check_documents(
    checks: TaskChecks,
    plan: StagePlan,
    documents: DocumentSettings | None,
    packed_only: Mapping[str, bool],
) -> None:
    """Raises UserError for documents without memories, and memories without documents.
    `packed_only`: {key: whether it is given} of what is for texts in packed rows."""
    kind = checks.encoder.kind
    if memory_shape(checks.encoder)[1]:
        _check_slots(checks, packed_only)
        _check_stages(checks, plan)
    elif documents:
        raise UserError(f"documents: {kind} has no memories; use kind: ernie_doc, or remove it")
    else:
        _check_no_documents(checks.tasks, kind)


def _check_slots(checks: TaskChecks, packed_only: Mapping[str, bool]) -> None:
    """Raises UserError for what slots of documents cannot have."""
    kind = checks.encoder.kind
    for name, task in checks.tasks.items():
        if task.documents == "no":
            raise UserError(
                f"tasks.{name}: reads texts in packed rows, but backbone.kind: {kind} reads "
                "documents window by window; use segment_reordering, knowledge_masking, "
                "classification, reading or ranking, or another encoder"
            )
        for key in task.settings().keys() & set(task.packed_settings):
            raise UserError(
                f"tasks.{name}.{key}: {getattr(task, key)}, but windows of documents are as long "
                "as `length` says, and begin where `documents.stride` says; remove it"
            )
    if checks.batch.unit == "examples":
        number = checks.batch.number
        raise UserError(
            f"batch: {number} examples, but each row of a step is a slot with a document of its "
            f"own; write `{number} rows`"
        )
    for key, given in packed_only.items():
        if given:
            raise UserError(
                f"{key}: is for texts in packed rows; backbone.kind: {kind} reads documents "
                "window by window; remove it"
            )


def _check_stages(checks: TaskChecks, plan: StagePlan) -> None:
    """Every stage has one task group over one source of data, and as many slots at every step."""
    spec = checks.spec
    for group in spec.task_groups:
        _check_windows(checks.tasks, tasks_of(group))
        source = checks.sources[checks.tasks[tasks_of(group)[0]].source]
        if source.reader:
            raise UserError(
                f"stages: {group!r} reads a reader without an end, but windows of documents need "
                "all of them; give a `table`"
            )
        if not source.table and len(source.weights) > 1:
            raise UserError(
                f"stages: {group!r} reads a `mix` of corpora, but slots read the documents of one "
                "corpus; prepare one of all texts"
            )
    stages = {"explicit": len(spec.budgets), "sequential": 1}.get(spec.kind, len(spec.task_groups))
    for number in range(stages):
        groups = spec.groups_of(number)
        if len(groups) > 1:
            named = ", ".join(map(repr, groups))
            raise UserError(
                f"stages.{number}: {named}: a slot reads a document for one task group; join tasks "
                "with +, or give each task group a stage of its own"
            )
    for number, own in enumerate(plan.written):
        if len(own.rates) > 1 and own.rates[0] != own.rates[-1]:
            raise UserError(
                f"stages.{number}.rate: changes within the stage, but a document is masked as a "
                "whole; give one rate"
            )
    for number, size in plan.own_sizes.items():
        if size.growth:
            raise UserError(
                f"stages.{number}.batch: grows, but slots keep their documents; give one size"
            )


def _check_windows(tasks: Mapping[str, Task], group: Sequence[str]) -> None:
    """Raises UserError for a task that needs its question in every window, unless it builds them
    (or another such task)."""
    if tasks[group[0]].repeats:
        return
    for name in group[1:]:
        if tasks[name].repeats:
            raise UserError(
                f"stages: {' + '.join(group)}: {group[0]} builds windows of one text, but {name} "
                f"has its question in each; name {name} first"
            )


def _check_no_documents(tasks: Mapping[str, Task], kind: str) -> None:
    """Raises UserError for tasks that only an encoder with memories can learn."""
    for name, task in tasks.items():
        if task.documents == "only":
            raise UserError(
                f"tasks.{name}: reads documents window by window, for which backbone.kind: {kind} "
                "has no memories; use kind: ernie_doc"
            )
