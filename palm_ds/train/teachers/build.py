"""Builds the teachers of a run: models in evaluation mode on the run's device, outside the engine.

They are in no optimizer and no checkpoint. Every process has their weights whole or, with `shard`,
one part of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key
from palm_ds.model.distillation.distillation import Distillation
from palm_ds.model.distillation.settings import TeacherSettings
from palm_ds.model.encoder.encoder import build_encoder, encoder_class, has_windows
from palm_ds.model.encoder.states import WantedStates
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import choose_kernels
from palm_ds.model.multi_task_model import Model, prepare_to_predict
from palm_ds.runtime.device.torch_settings import DTYPES
from palm_ds.runtime.processes.processes import Processes
from palm_ds.runtime.zero.sharded_modules import ShardedModules
from palm_ds.train.setup.build import full_config
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import Data
from palm_ds.train.teachers.distillation_plan import DistillationPlan, TeacherFolder
from palm_ds.train.teachers.teachers import Teacher, Teachers, always_whole
from palm_ds.weights import weights_folder

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
