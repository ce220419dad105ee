"""Tasks of a recipe that its teachers teach, found before anything is built.

recipe.teacher ──folders opened, heads matched──> DistillationPlan: who teaches which task
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from palm_ds.common.errors import UserError, suggest
from palm_ds.data.tasks.soft_labels import SoftTasks
from palm_ds.data.tasks.task import Task
from palm_ds.model.distillation.settings import (
    LogitsSettings,
    TeacherModelSettings,
    TeacherSettings,
)
from palm_ds.model.distillation.soft_labels import soft_kind
from palm_ds.model.encoder.encoder import Encoder, build_encoder
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.train.plan.work import TeacherSize
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.setup.build import full_config
from palm_ds.train.setup.sources import Data
from palm_ds.train.teachers.stored_scores import StoredScores, open_scores
from palm_ds.weights.formats.contents import CheckpointContents, HeadInfo
from palm_ds.weights.formats.huggingface.architecture import NEXT_SENTENCE

_DEFAULT_TYPES, _MULTI_LABEL = ("", "single_label_classification"), "multi_label_classification"
_OTHERS = ("ForQuestionAnswering", "ForMultipleChoice")
"""Classes of transformers whose scores are not of classes."""


@dataclass(frozen=True, kw_only=True)
class TeacherFolder:
    """A teacher that is not built yet."""

    name: str
    settings: TeacherModelSettings
    contents: CheckpointContents
    head_of: Mapping[str, str]
    """{task of the recipe: its head here}"""

    @property
    def parameters(self) -> int:
        """Those of the encoder, and of the heads that teach."""
        used = ("backbone.", *(f"heads.{name}." for name in self.head_of.values()))
        entries = self.contents.entries.items()
        return sum(math.prod(entry.shape) for name, entry in entries if name.startswith(used))


@dataclass(frozen=True, kw_only=True)
class DistillationPlan:
    """Teachers of a run, and the tasks that learn from them."""

    settings: TeacherSettings | None = None
    folders: tuple[TeacherFolder, ...] = ()
    stored: StoredScores | None = None
    soft_tasks: SoftTasks = field(default_factory=dict)
    """The tasks with soft labels."""

    @property
    def states_of(self) -> int:
        """The number of the teacher whose states are learned."""
        names = [folder.name for folder in self.folders]
        named = self.settings.states_of if self.settings else ""
        return names.index(named) if named else 0

    @property
    def soft(self) -> LogitsSettings:
        """Settings for learning soft labels."""
        return (self.settings.soft_labels if self.settings else None) or LogitsSettings()

    @property
    def weights(self) -> dict[str, float]:
        """{task with soft labels: weight of their loss}."""
        return {task: self.soft.tasks.get(task, self.soft.weight) for task in self.soft_tasks}

    def sizes(self, precision: str) -> tuple[TeacherSize, ...]:
        """For the plan of a run of this precision."""
        if self.settings is None:
            return ()
        how = {"precision": self.settings.precision or precision, "shard": self.settings.shard}
        return tuple(
            TeacherSize(config=folder.contents.config, parameters=folder.parameters, **how)
            for folder in self.folders
        )

    def lines(self) -> list[str]:
        """For the start of a run."""
        if self.settings is None:
            return []
        lines = [
            f"teacher: {folder.contents.path}, {folder.contents.config.num_layers} layers of "
            f"{folder.contents.config.hidden_size}"
            + (f"; teaches {', '.join(folder.head_of)}" if folder.head_of else "")
            for folder in self.folders
        ]
        lines += [
            f"teacher: {note}" for folder in self.folders for note in folder.contents.notes_on_use
        ]
        if self.stored:
            lines.append(f"teacher: {self.stored.line}; teaches {', '.join(self.soft_tasks)}")
        weights = (self.weights | self.settings.weights).items()
        weights = ", ".join(f"{name} {weight:g}" for name, weight in weights)
        return [*lines, f"teacher: weights: {weights}"]


def resolve_teachers(recipe: Recipe, data: Data) -> DistillationPlan:
    """The plan of the teachers of a recipe, whose tasks are resolved; empty if it has none.
    Raises UserError for a teacher that does not fit."""
    settings = recipe.teacher
    if settings is None:
        return DistillationPlan()
    _check_read_alike(recipe)
    wanted = _wanted_tasks(recipe, settings)
    if settings.file:
        stored = open_scores(Path(settings.file), recipe, data, wanted)
        return DistillationPlan(settings=settings, stored=stored, soft_tasks=stored.tasks)
    folders = [
        _folder(name, teacher, recipe, data, wanted)
        for name, teacher in settings.all_models.items()
    ]
    taught = {task for folder in folders for task in folder.head_of}
    _check_taught(settings, wanted, taught, folders)
    soft = {task: None for task in recipe.built_tasks if task in taught}
    return DistillationPlan(settings=settings, folders=tuple(folders), soft_tasks=soft)


def _check_read_alike(recipe: Recipe) -> None:
    """Raises UserError for a task of which the encoder reads other tokens than a teacher would."""
    for name, task in recipe.built_tasks.items():
        if task.changes_encoder or task.pseudo_tokens is not None:
            raise UserError(
                f"teacher: tasks.{name} lets the encoder read n-grams, or tokens that a model "
                "fills in, which a teacher does not see; remove one of the two"
            )


def _wanted_tasks(recipe: Recipe, settings: TeacherSettings) -> Collection[str]:
    """The tasks to teach, as far as a teacher can."""
    tasks, soft = recipe.built_tasks, settings.soft_labels
    named = [*(soft.tasks if soft else ()), *settings.heads]
    for teacher in settings.models.values():
        named += [*teacher.tasks, *teacher.heads]
    for name in named:
        if name not in tasks:
            raise UserError(f"teacher: no task {name!r}{suggest(name, tasks)}")
    if soft is None:
        return ()
    return list(soft.tasks) or list(tasks)


def _folder(
    name: str,
    settings: TeacherModelSettings,
    recipe: Recipe,
    data: Data,
    wanted: Collection[str],
) -> TeacherFolder:
    contents, tokenizer = data.teacher_models[name], data.tokenizer
    _check_vocabulary(contents, tokenizer)
    if (most := contents.config.max_length) < (longest := recipe.stage_plan.longest):
        raise UserError(
            f"teacher: {contents.path} reads up to {most} tokens; rows have up to {longest} "
            "(`length`)"
        )
    with torch.device("meta"):  # heads on it tell what they need, without weights
        encoder = build_encoder(full_config(contents.config, tokenizer.vocabulary))
    heads = {}
    for task in wanted if not settings.tasks else [x for x in settings.tasks if x in wanted]:
        with torch.device("meta"):
            head = _head_for(recipe.built_tasks[task], encoder, contents, settings, recipe)
        if head:
            heads[task] = head
        elif settings.tasks:
            raise UserError(_no_head(task, contents, name))
    return TeacherFolder(name=name, settings=settings, contents=contents, head_of=heads)


def _check_vocabulary(contents: CheckpointContents, tokenizer: Tokenizer) -> None:
    """Raises UserError unless a teacher reads the tokens of the student. One without a tokenizer
    must have as many."""
    instead = (
        "the tokens of student and teacher must be the same; to teach across vocabularies, write "
        "the teacher's scores with `palm-ds teach` and give `teacher: {file: ...}`"
    )
    if contents.tokenizer is not None:
        other = load_tokenizer(contents.tokenizer)
        same = range(tokenizer.size)
        if other.size == tokenizer.size and other.tokens(same) == tokenizer.tokens(same):
            return
        raise UserError(f"teacher: {contents.path} has another vocabulary: {instead}")
    if (contents.config.vocab_size or 0) < tokenizer.size:
        raise UserError(
            f"teacher: {contents.path} has {contents.config.vocab_size} tokens, the student "
            f"{tokenizer.size}: {instead}"
        )


def _head_for(
    task: Task,
    encoder: Encoder,
    contents: CheckpointContents,
    settings: TeacherModelSettings,
    recipe: Recipe,
) -> str:
    """The name of the head for a task: as given (its classes are then in the same order, whatever
    they are called), of the same name, or the only one of its kind and classes. Empty: there is
    none."""
    owner = recipe.built_tasks[task.share] if task.share else task
    heads = contents.heads
    if not soft_kind(owner.head(encoder)):
        return ""

    def fits(stored: HeadInfo) -> bool:
        return _same_form(owner.with_head_like(stored.outputs).head(encoder), stored)

    meaning = replace(owner.head_outputs(), reading=task.head_outputs().reading)
    if given := settings.heads.get(task.name):
        _check_given(given, task, fits, contents)
        chosen = given
    else:
        fitting = [
            name
            for name, stored in heads.items()
            if fits(stored) and _same_meaning(meaning, stored.outputs)
        ]
        named = (contents.head_of.get(task.name, ""), task.name, owner.name)
        others = [name for name in fitting if name != NEXT_SENTENCE]
        only = others[0] if len(others) == 1 else ""
        chosen = next((name for name in named if name in fitting), only)
    if chosen:
        _check_order(owner, heads[chosen].outputs.labels, contents.path)
    return chosen


def _check_given(
    given: str, task: Task, fits: Callable[[HeadInfo], bool], contents: CheckpointContents
) -> None:
    """Raises UserError if a head that the recipe names does not exist or computes something
    else."""
    if given not in contents.heads:
        near = suggest(given, contents.heads)
        raise UserError(f"teacher: {contents.path} has no head {given!r}{near}")
    if not fits(contents.heads[given]):
        raise UserError(
            f"teacher: {contents.path}: its head {given!r} cannot teach {task.name!r}: another kind"
            " of head, or another number of classes"
        )


def _check_order(task: Task, labels: Sequence[str], path: Path) -> None:
    """Raises UserError if a teacher has the classes of a task in another order."""
    ours = task.head_outputs().labels
    if list(ours) != list(labels) and sorted(ours) == sorted(labels):
        raise UserError(
            f"teacher: {path}: has the classes of {task.name!r} in another order; give "
            f"tasks.{task.name}.labels: [{', '.join(labels)}]"
        )


def _same_form(head: nn.Module, stored: HeadInfo) -> bool:
    """Whether a stored head has the weights of a task's head."""
    if isinstance(head, MaskedLMHead):
        return stored.kind == "masked_words"
    out = getattr(head, "out", None)
    return (
        isinstance(out, nn.Linear)
        and stored.kind == "classes"
        and stored.classes == out.out_features
        and stored.outputs.averaged == (averaged := getattr(head, "averaged", False))
        and stored.pooled == (averaged or getattr(head, "pooled", False))
        and stored.transitions == isinstance(head, CRFHead)
    )


def _same_meaning(student: HeadOutputs, teacher: HeadOutputs) -> bool:
    """Whether scores are of the same classes and read in the same way, as far as a checkpoint
    says."""
    if student.reading != teacher.reading:
        return False
    named = bool(teacher.labels) and not _is_numbered(teacher.labels)
    if named and set(student.labels) != set(teacher.labels):
        return False
    if student.problem_type == _MULTI_LABEL != teacher.problem_type:
        return False
    alike = teacher.problem_type in (*_DEFAULT_TYPES, student.problem_type)
    return alike and (teacher.head_class not in _OTHERS or teacher.head_class == student.head_class)


def _is_numbered(labels: Sequence[str]) -> bool:
    """Whether these are the names that transformers gives to classes without one."""
    return list(labels) == [f"LABEL_{number}" for number in range(len(labels))]


def _no_head(task: str, contents: CheckpointContents, name: str) -> str:
    where = "teacher.heads" if name == "teacher" else f"teacher.models.{name}.heads"
    known = ", ".join(contents.heads) or "none"
    return (
        f"teacher: {contents.path} has no head for the task {task!r}; its heads: {known}; name one "
        f"with `{where}: {{{task}: HEAD}}`"
    )


def _check_taught(
    settings: TeacherSettings,
    wanted: Collection[str],
    taught: Collection[str],
    folders: list[TeacherFolder],
) -> None:
    """Raises UserError for a task that nobody teaches though the recipe names it, or if there are
    none at all."""
    soft = settings.soft_labels
    for task in soft.tasks if soft else ():
        if task not in taught:
            raise UserError(_no_head(task, folders[0].contents, folders[0].name))
    if wanted and not taught:
        raise UserError(_no_head(next(iter(wanted)), folders[0].contents, folders[0].name))
