"""`palm.Trainer`: one task, or tasks that share one text. `palm.MultiHeadTrainer`: many tasks on
one encoder, a step of each in PaddlePALM's proportions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, Unpack

from palm_ds.api.base_trainer import BaseTrainer
from palm_ds.api.keywords import TrainKeywords
from palm_ds.api.pretrained import Backbone
from palm_ds.api.run_definition import RunDefinition, TaskMixture
from palm_ds.api.train_settings import TrainSettings
from palm_ds.common.arguments import checks_arguments
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.keywords import documents
from palm_ds.common.messages import counted
from palm_ds.data.tasks.task_with_data import TaskWithData
from palm_ds.train.recipe.custom_metrics import Metric

_TASK = "a task with its rows, such as palm.tasks.Classification.on(train=...)"
_BACKBONE = (
    "palm.Backbone.from_pretrained(FOLDER or NAME), or that folder or name (of a model in memory, "
    "what its save_pretrained writes)"
)


class Trainer(BaseTrainer):
    """Trains one task on an encoder.

    trainer = palm.Trainer(task, backbone=backbone, batch=32, epochs=3, lr=5e-5)
    """

    @documents(TrainSettings)
    @checks_arguments(
        task=f"{_TASK}; several are for palm.MultiHeadTrainer",
        backbone=_BACKBONE,
        callbacks="a list of objects with methods of palm.Callback",
        metrics="functions (predictions, labels)",
    )
    def __init__(
        self,
        task: TaskWithData,
        *,
        backbone: Backbone | str | Path | None = None,
        mix_ratio: float | None = None,
        reuse_head_with: str | Trainer = "",
        callbacks: Sequence[object] = (),
        metrics: Metric | Sequence[Metric] = (),
        **settings: Unpack[TrainKeywords],
    ):
        """backbone: a palm.Backbone, or an argument of its `from_pretrained`; may be left out if
            this trainer is passed to a MultiHeadTrainer.
        mix_ratio: steps of the task per step of the reference task of a MultiHeadTrainer.
        reuse_head_with: the name or trainer of a task whose head this task shares.
        callbacks: objects with methods to call during training (palm.Callback).
        metrics: functions of your own, `metric(predictions, labels)`, that return a number or
            {metric: number}; reported next to the task's own."""
        kind, mixture = type(self).__name__, TaskMixture(groups=[[task]])
        definition = RunDefinition(kind, backbone, settings, {task.name: metrics}, mixture)
        super().__init__(definition, callbacks)
        self.task = task
        if mix_ratio is not None:
            self.mix_ratio = mix_ratio
        if reuse_head_with:
            other = reuse_head_with
            task.settings["share"] = other if isinstance(other, str) else other.name

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def mix_ratio(self) -> float:
        """Steps of this task per step of the reference task: see MultiHeadTrainer."""
        return self.task.mix_ratio

    @mix_ratio.setter
    def mix_ratio(self, ratio: float) -> None:
        self.task.mix_ratio = ratio
        self.session.invalidate()

    def set_as_aux(self) -> None:
        """Make the task auxiliary: its scores do not count in `best: mean`."""
        self.task.settings["auxiliary"] = True
        self.session.invalidate()

    @property
    def num_examples(self) -> int:
        return self.definition.examples_of(self.name)

    @property
    def num_epochs(self) -> float:
        return self.settings.epochs

    @property
    def cur_train_epoch(self) -> int:
        """Number of complete epochs so far."""
        if self.run.recipe.examples:
            return int(self.cur_train_step / self.definition.epoch_of(self.name))
        return self.cur_train_step // self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches in an epoch, as in PaddlePALM."""
        return max(int(self.definition.epoch_of(self.name)), 1)

    steps_pur_epoch = steps_per_epoch
    """PaddlePALM's spelling."""


Member: TypeAlias = TaskWithData | Trainer | Sequence[TaskWithData | Trainer]


class MultiHeadTrainer(BaseTrainer):
    """Trains several tasks on one encoder. Tasks in a tuple share their texts: all of them label
    the same rows.

    trainer = palm.MultiHeadTrainer([match, mask], backbone=backbone, mix_ratio={"mask": 0.5})
    """

    @documents(TrainSettings)
    @checks_arguments(
        tasks=f"a list, each {_TASK}",
        backbone=_BACKBONE,
        mix_ratio="{task: number}, or a number for each task",
        callbacks="a list of objects with methods of palm.Callback",
        metrics="{task: functions (predictions, labels)}",
    )
    def __init__(
        self,
        tasks: Sequence[Member],
        *,
        backbone: Backbone | str | Path | None = None,
        mix_ratio: Mapping[str, float] | Sequence[float] | None = None,
        reference: str | TaskWithData | Trainer = "",
        mix: Literal["step", "turns", "batch"] = "step",
        callbacks: Sequence[object] = (),
        metrics: Mapping[str, Metric | Sequence[Metric]] | None = None,
        **settings: Unpack[TrainKeywords],
    ):
        """As in PaddlePALM, a task gets int(epochs * mix_ratio * N) steps, where N is the steps of
        an epoch of the `reference` task (default: the first).

        mix: each step trains one task, in a seeded order, or as written ("turns"); with "batch",
            all tasks in proportion.
        callbacks: objects with methods to call during training (palm.Callback).
        metrics: {task: functions of your own}, as for palm.Trainer.

        Of a trainer among the tasks, its task, callbacks and metrics count; settings are those that
        are given here."""
        members = [_members(task) for task in tasks]
        if not members or not all(members):
            raise UserError("tasks: empty; name at least one")
        trainers = [m for task_group in members for m in task_group if isinstance(m, Trainer)]
        backbone = backbone or next((t.backbone for t in trainers if t.backbone), None)
        mixture = TaskMixture(
            groups=[[_task(member) for member in task_group] for task_group in members],
            reference=reference if isinstance(reference, str) else reference.name,
            mix=mix,
        )
        own = {name: each for t in trainers for name, each in t.definition.metrics.items()}
        own, kind = {**own, **(metrics or {})}, type(self).__name__
        super().__init__(RunDefinition(kind, backbone, settings, own, mixture), callbacks)
        self.callbacks = (*(each for t in trainers for each in t.callbacks), *self.callbacks)
        _set_ratios(mixture, {} if mix_ratio is None else mix_ratio)
        names = list(self.tasks)
        if mixture.reference and mixture.reference not in names:
            raise UserError(
                f"reference: no task {mixture.reference!r}{suggest(mixture.reference, names)}"
            )

    @property
    def reference(self) -> str:
        """The task whose epochs are counted; empty: the first."""
        return self.definition.mixture.reference

    @property
    def mix_ratio(self) -> dict[str, float]:
        return {
            task_group[0].name: task_group[0].mix_ratio
            for task_group in self.definition.mixture.groups
        }

    @property
    def num_examples(self) -> dict[str, int]:
        return {name: self.definition.examples_of(name) for name in self.tasks}

    @property
    def steps_per_epoch(self) -> dict[str, int]:
        return {name: max(int(self.definition.epoch_of(name)), 1) for name in self.tasks}

    @property
    def expected_steps(self) -> dict[str, int]:
        """{task: number of its steps in the whole training}."""
        curriculum = self.run.recipe.curriculum
        return {
            name: sum(
                curriculum.total_of(b) for b in curriculum.task_groups if name in b.split(" + ")
            )
            for name in self.tasks
        }


def _members(given: Member) -> Sequence[TaskWithData | Trainer]:
    return [given] if isinstance(given, TaskWithData | Trainer) else given


def _task(member: TaskWithData | Trainer) -> TaskWithData:
    return member.task if isinstance(member, Trainer) else member


def _set_ratios(mixture: TaskMixture, ratios: Mapping[str, float] | Sequence[float]) -> None:
    """Set the `mix_ratio` of tasks. Raises UserError."""
    groups, tasks = mixture.groups, {task.name: task for task in mixture.tasks}
    if isinstance(ratios, Sequence):
        if len(ratios) != len(groups):
            raise UserError(
                f"mix_ratio: {counted(len(ratios), 'number')} for {counted(len(groups), 'task')}; "
                "give one each"
            )
        ratios = {b[0].name: r for b, r in zip(groups, ratios, strict=True)}
    for name, ratio in ratios.items():
        if name not in tasks:
            raise UserError(f"mix_ratio: no task {name!r}{suggest(name, tasks)}")
        tasks[name].mix_ratio = ratio
    for first, *others in groups:
        for other in others:
            if other.mix_ratio not in (1.0, first.mix_ratio):
                raise UserError(
                    f"mix_ratio: {other.mix_ratio:g} for {other.name!r}, which trains in the steps "
                    f"of {first.name!r}; give the ratio to that task"
                )
