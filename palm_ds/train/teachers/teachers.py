"""Teachers: models that are not trained, whose outputs the trained model learns.

    batch ──teacher 1, teacher 2, ...──> the same batch with their mean scores as soft labels, and
                                         the states of one of them

They read the same packed rows, without dropout and without gradients, on the run's device, outside
the engine: they are in no optimizer and no checkpoint. Every process has their weights whole or,
with `shard`, one part of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key
from palm_ds.model.distillation.distillation import Distillation
from palm_ds.model.distillation.settings import TeacherSettings
from palm_ds.model.distillation.soft_labels import scores_of, soft_name, word_scores
from palm_ds.model.distillation.soft_vocabulary_loss import MeanScores, top_scores
from palm_ds.model.encoder.encoder import build_encoder, encoder_class, has_windows
from palm_ds.model.encoder.states import WantedStates, recorded
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.inputs.batch import Batch, EncoderStates, TeacherOutputs, VocabularyScores
from palm_ds.model.kernels import choose_kernels
from palm_ds.model.multi_task_model import Model, prepare_to_predict
from palm_ds.runtime.device.torch_settings import DTYPES
from palm_ds.runtime.processes.processes import Processes
from palm_ds.runtime.zero.sharded_modules import ShardedModules
from palm_ds.train.setup.build import full_config
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import Data
from palm_ds.train.teachers.distillation_plan import DistillationPlan, TeacherFolder
from palm_ds.weights import weights_folder

Scores: TypeAlias = torch.Tensor | VocabularyScores
"""Of a head (n, any), or of the vocabulary."""


def always_whole(module: nn.Module) -> AbstractContextManager[None]:
    """The weights of a module that are not shared out."""
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """One teacher. Its model has a head for each of the tasks that it teaches."""

    model: Model
    weight: float = 1.0
    task_rows: Mapping[int, int] | None = None
    """{row of the student's task embedding: row of its own}; None: it has no task embedding."""
    whole: Callable[[nn.Module], AbstractContextManager[None]] = always_whole
    """A context in which a module has its weights, where they are shared out."""

    def read(self, batch: Batch) -> tuple[EncoderStates, dict[str, Scores]]:
        """Its states, and its scores at the soft labels of its tasks; of a task without labels
        those of a dummy. All processes that share its weights call it."""
        model, tasks = self.model, list(self.model.head_of)
        scores: dict[str, Scores] = {}
        with recorded(model.backbone, model.recorded_states) as states:
            for task, rows, labels in model.head_rows(self._own(batch), tasks):
                head = model.heads[model.head_of[task]]
                with self.whole(head):
                    words = isinstance(head, MaskedLMHead)
                    scores[task] = (
                        word_scores(head, rows) if words else scores_of(head, rows, labels.groups)
                    )
        return states, scores

    def _own(self, batch: Batch) -> Batch:
        """The batch as this model reads it, the positions of soft labels as those of its tasks."""
        types = self.model.backbone.config.token_types
        names = {task: soft_name(task) for task in self.model.head_of}
        own = {task: name for task, name in names.items() if name in batch.labels}
        return replace(
            batch,
            token_type_ids=batch.token_type_ids.clamp(max=types - 1),
            task_ids=self._task_ids(batch.task_ids),
            labels={task: batch.labels[name] for task, name in own.items()},
            groups={t: batch.groups[name] for t, name in own.items() if name in batch.groups},
            dropout_key=None,
        )

    def _task_ids(self, ids: torch.Tensor) -> torch.Tensor:
        numbers = torch.zeros_like(ids)
        for student, own in (self.task_rows or {}).items():
            numbers.masked_fill_(ids == student, own)
        return numbers


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """All teachers of a run; called with a batch and its step."""

    teachers: Sequence[Teacher]
    states_of: int = 0
    """The one whose states are learned."""
    top_k: int = 0
    """For masked words, the number of tokens kept; 0: all."""
    vocabulary: int = 0
    """Tokens of the student's vocabulary."""

    @torch.no_grad()
    def __call__(self, batch: Batch, step: int) -> Batch:
        states = EncoderStates()
        scores: dict[str, list[tuple[float, Scores]]] = {}
        for number, teacher in enumerate(self.teachers):
            own_states, each = teacher.read(batch)
            states = own_states if number == self.states_of else states
            for task, values in each.items():
                scores.setdefault(task, []).append((teacher.weight, values))
        labels, words = dict(batch.labels), {}
        for task, parts in scores.items():
            name = soft_name(task)
            if isinstance(parts[0][1], torch.Tensor):
                if name in labels:
                    labels[name] = labels[name][0], _mean(parts)
            else:
                words[task] = self._words(parts, batch.input_ids.device)
        outputs = TeacherOutputs(states=states, words=words)
        return replace(batch, labels=labels, teacher=outputs)

    def _words(
        self, parts: Sequence[tuple[float, Scores]], device: torch.device
    ) -> VocabularyScores:
        total = sum(weight for weight, _ in parts)
        weighted = [(w / total, x) for w, x in parts if not isinstance(x, torch.Tensor)]
        mean = weighted[0][1] if len(weighted) == 1 else MeanScores(weighted)
        return top_scores(mean, self.top_k, self.vocabulary, device) if self.top_k else mean


def _mean(parts: Sequence[tuple[float, Scores]]) -> torch.Tensor:
    """The weighted mean of scores (n, any), fp32."""
    total = sum(weight for weight, _ in parts)
    weighted = [
        values.float() * (w / total) for w, values in parts if isinstance(values, torch.Tensor)
    ]
    return torch.stack(weighted).sum(0)


_STORED = 64
"""Tokens that are stored for each masked token, unless the recipe says how many."""


def attach_teachers(plan: DistillationPlan, model: Model, *, seed: int) -> None:
    """Let a model learn what its teachers teach."""
    if plan.settings is None:
        return
    torch.manual_seed(derive_key(seed, "distillation") >> 1)
    distillation = None
    if plan.settings.weights:
        config = plan.folders[plan.states_of].contents.config
        distillation = Distillation(plan.settings, model.backbone, config)
    model.learn_from_teacher(plan.soft, plan.weights, distillation)


def build_teachers(
    plan: DistillationPlan, model: Model, run: RunSpec, data: Data, processes: Processes
) -> Callable[[Batch, int], Batch] | None:
    """Function that adds the teachers' outputs to the batches of a model that learns from them;
    None: it has no teacher."""
    if plan.settings is None:
        return None
    if plan.stored:
        return plan.stored.add_to
    wanted = model.distillation.teacher if model.distillation else WantedStates()
    return _teachers(plan, run, data, processes, wanted)


def teachers_of_scores(
    plan: DistillationPlan, run: RunSpec, data: Data, processes: Processes
) -> Teachers:
    """The teachers whose scores are stored: of the vocabulary the best tokens alone."""
    teachers = _teachers(plan, run, data, processes, WantedStates())
    if plan.settings and not plan.settings.shard:
        dtype = DTYPES[plan.settings.precision or run.ds_config.precision]
        for teacher in teachers.teachers:
            prepare_to_predict(teacher.model, processes.device, dtype)
    return replace(teachers, top_k=teachers.top_k or min(_STORED, teachers.vocabulary))


def _teachers(
    plan: DistillationPlan, run: RunSpec, data: Data, processes: Processes, wanted: WantedStates
) -> Teachers:
    assert plan.settings is not None
    builder = _Builder(run, data, processes, plan.settings)
    teachers = [
        builder.teacher(folder, wanted if number == plan.states_of else WantedStates())
        for number, folder in enumerate(plan.folders)
    ]
    tokens = full_config(run.recipe.backbone_config, data.vocabulary).vocab_size or 0
    return Teachers(
        teachers=teachers,
        states_of=plan.states_of,
        top_k=min(plan.soft.top_k, tokens),
        vocabulary=tokens,
    )


class _Builder:
    """Builds one teacher after another."""

    def __init__(self, run: RunSpec, data: Data, processes: Processes, settings: TeacherSettings):
        self.recipe, self.vocabulary, self.processes = run.recipe, data.vocabulary, processes
        self.shard = settings.shard
        self.dtype = DTYPES[settings.precision or run.ds_config.precision]

    def teacher(self, folder: TeacherFolder, wanted: WantedStates) -> Teacher:
        """`wanted`: the states that are learned."""
        model = self._model(folder)
        wanted.check(model.backbone, f"teacher: {folder.contents.path}")
        if wanted.embeddings and model.backbone.word.embedding_dim != model.backbone.hidden_size:
            raise UserError(
                f"teacher: {folder.contents.path}: its embeddings and its layers differ in width, "
                "which teacher.embeddings does not learn"
            )
        model.recorded_states = wanted
        model = model.to(dtype=self.dtype).eval().requires_grad_(False)
        whole = always_whole
        if self.shard:
            whole = ShardedModules(model, self.processes).whole
        else:
            model.to(self.processes.device)
        return Teacher(
            model=model,
            weight=folder.settings.weight,
            task_rows=self._task_rows(folder),
            whole=whole,
        )

    def _model(self, folder: TeacherFolder) -> Model:
        """With its weights, on the host."""
        tasks = self.recipe.built_tasks
        config = full_config(folder.contents.config, self.vocabulary)
        kernels, _ = choose_kernels(
            {},
            device=self.processes.device,
            dtype=self.dtype,
            config=config,
            fixed_shapes=False,
            partial_tasks=[name for name, task in tasks.items() if task.attends_partially],
            windows=has_windows(config),
            score_biases=encoder_class(config).adds_to_scores(config),
            memories=encoder_class(config).memory_length(config) > 0,
        )
        backbone = build_encoder(config, kernels)
        owners = {name: tasks[task].share or task for task, name in folder.head_of.items()}
        stored = {name: folder.contents.heads[name].outputs for name in owners}
        heads = {
            name: tasks[owner].with_head_like(stored[name]).head(backbone)
            for name, owner in owners.items()
        }
        model = Model(backbone, heads, folder.head_of)  # one head may teach several tasks
        same = {name: name for name in heads}
        loaded = weights_folder.load_weights(folder.contents, model, renamed_heads=same)
        unused = () if model.pooled else ("backbone.pooler.",)
        missing = [name for name in loaded.newly_initialized if not name.startswith(unused)]
        if missing:
            raise UserError(f"teacher: {folder.contents.path}: incomplete: {missing[0]} is missing")
        self._check_scales(folder)
        return model

    def _check_scales(self, folder: TeacherFolder) -> None:
        """Raises UserError if a number means something else than the student's."""
        for task, stored in folder.head_of.items():
            teacher = folder.contents.heads[stored].outputs
            owner = self.recipe.built_tasks[task].share or task
            student = self.recipe.built_tasks[owner].head_outputs()
            if (teacher.mean, teacher.deviation) != (student.mean, student.deviation):
                raise UserError(
                    f"teacher: {folder.contents.path}: its numbers for {task!r} have the mean "
                    f"{teacher.mean:g} and the deviation {teacher.deviation:g}, those of the "
                    f"training rows here {student.mean:g} and {student.deviation:g}; train both "
                    "on the same rows, or both with `scale: false`"
                )

    def _task_rows(self, folder: TeacherFolder) -> Mapping[int, int] | None:
        """{row of the student's task embedding: the teacher's row for the same task}; the tasks
        that it teaches come first. Raises UserError if two of them need different rows."""
        contents, ids = folder.contents, self.recipe.task_ids
        if not contents.config.task_types:
            return None
        rows: dict[int, int] = {}
        for task in dict.fromkeys([*folder.head_of, *ids]):
            row = _row_of(task, folder)
            if rows.setdefault(ids[task], row) != row and task in folder.head_of:
                raise UserError(
                    f"teacher: {contents.path}: reads the texts of {task!r} and of another task "
                    "with different task embeddings, which are the same here; give them different "
                    "`task_id`s, or name the folder once for each in teacher.models"
                )
        return rows


def _row_of(task: str, folder: TeacherFolder) -> int:
    """The row of a teacher's task embedding for the texts of a task."""
    contents, head = folder.contents, folder.head_of.get(task, "")
    known = contents.heads[head].task_id if head else None
    usual = contents.task_ids.get(contents.export_task, 0)
    return contents.task_ids.get(task, usual) if known is None else known
