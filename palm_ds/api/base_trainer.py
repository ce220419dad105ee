"""A trainer's life in Python: define a run, train it, predict, evaluate and save with it.

    BaseTrainer, with a TrainingSession of a RunDefinition              this file
        RunDefinition    tasks + backbone + settings -> Recipe, RunSpec     run_definition.py
        TrainingSession  train, train_one_step, its weights of now          training.py
    Trainer, MultiHeadTrainer: which tasks, in which proportions        trainer.py

All processes of a run (under `deepspeed` or `torchrun`) make the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palm_ds.api.event_dispatcher import caller, check_callbacks
from palm_ds.api.events import EventHandler, Metrics
from palm_ds.api.notebook import Report, TaskPredictions
from palm_ds.api.predictions import listed_for, predictions_of, scores_of
from palm_ds.api.pretrained import Backbone
from palm_ds.api.run_definition import RunDefinition
from palm_ds.api.save_model import copy_model, push_saved, save_current
from palm_ds.api.train_settings import TrainSettings
from palm_ds.api.training import TrainingSession
from palm_ds.common.arguments import checks_arguments
from palm_ds.common.errors import UserError
from palm_ds.common.summary import Summary
from palm_ds.data.sources.row_inputs import COLUMNS, Rows
from palm_ds.data.tasks.task_with_data import TaskWithData
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.inputs.batch import Batch
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import Data


class BaseTrainer(Summary, ABC):
    """A run that can be trained and used: during training with its current weights, afterwards
    with its final ones."""

    def __init__(self, definition: RunDefinition, callbacks: Sequence[object]):
        """`callbacks`: objects with methods of palm.Callback."""
        self.callbacks = check_callbacks(callbacks)
        self.definition = definition
        self.session = TrainingSession(definition)

    def facts(self) -> dict[str, object]:
        given = self.settings
        return {
            "tasks": ", ".join(self.tasks),
            "backbone": self.backbone,
            "batch": given.batch,
            "epochs": f"{given.epochs:g}",
            "lr": f"{given.lr:g}",
            "folder": given.folder or "temporary",
        }

    # ---- the run ----

    @property
    def backbone(self) -> Backbone | None:
        return self.definition.backbone

    @property
    def settings(self) -> TrainSettings:
        return self.definition.settings

    @property
    def tasks(self) -> dict[str, TaskWithData]:
        """{name: task}."""
        return self.definition.tasks

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.definition.folder

    @property
    def recipe(self) -> Recipe:
        """The recipe that `palm-ds finetune` would need for the same run."""
        return self.definition.recipe

    @property
    def run(self) -> RunSpec:
        """The run, with all settings that depend on the rows filled in."""
        return self.definition.run

    @property
    def data(self) -> Data:
        """The opened rows."""
        return self.definition.data

    @property
    def steps(self) -> int:
        """Number of steps of the whole training."""
        return self.definition.steps

    @property
    def first_process(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.definition.first_process

    @property
    @abstractmethod
    def num_examples(self) -> int | dict[str, int]:
        """Number of training rows; {task: number} if there are several tasks."""

    # ---- training ----

    @property
    def scores(self) -> Metrics:
        """{task: {metric: value}} of the last evaluation during training."""
        return self.session.scores

    @property
    def cur_train_step(self) -> int:
        """Number of completed steps."""
        return self.session.step

    @property
    def finished(self) -> bool:
        """Whether this trainer has trained to the end: the last step, early stopping or
        `stop_training`."""
        return self.session.finished

    @checks_arguments(event_handler="a function of one event")
    def train(self, event_handler: EventHandler | None = None) -> Metrics:
        """Train to the end; returns the scores of the last evaluation.

        `event_handler` is called with the events of palm.event. When interrupted (Ctrl-C, the stop
        button of a notebook), training saves and raises KeyboardInterrupt; after SIGTERM it saves
        and exits with code 75. Called again, or in another process with the same `folder`, `train`
        resumes from there; once finished, it returns the scores again. Raises UserError."""
        given = [event_handler] if event_handler else []
        return self.session.train([*self._callback_handlers(), *given])

    @checks_arguments()
    def get_one_batch(self) -> list[Batch]:
        """This process's micro-batches of the next step; each call advances by one step. Raises
        UserError after the last step."""
        return self.session.next_batch()

    @checks_arguments(batch="what get_one_batch returns")
    def train_one_step(self, batch: list[Batch] | None = None) -> dict[str, float]:
        """Train the next step, on a batch of `get_one_batch` if given; returns {task: loss}. After
        the last step the weights are written. Raises UserError once training has finished."""
        return self.session.train_step(batch, self._callback_handlers())

    def stop_training(self) -> None:
        """End the training after this step, from a callback or an event handler. The weights are
        written as after the last step."""
        self.session.stop()

    def close(self) -> None:
        """Release the engine before training has finished. With a `folder`, another trainer can
        resume from its last checkpoint."""
        self.session.close()

    def report(self) -> Report:
        """The curves and scores of the finished training, which a notebook shows inline. Raises
        UserError if training has not finished."""
        path = self.folder / "report.html"
        if not path.is_file():
            raise UserError(
                "report: there is none before training has finished; call train() first"
            )
        return Report(path)

    def _callback_handlers(self) -> list[EventHandler]:
        log_every = self.recipe.log.every
        return [caller(self.callbacks, self, log_every)] if self.callbacks else []

    # ---- predicting ----

    @checks_arguments(columns=COLUMNS)
    def predict(
        self,
        rows: Rows,
        *,
        task: str = "",
        columns: Mapping[str, Any] | None = None,
        format: str = "",
    ) -> TaskPredictions:
        """{task: a prediction for each row, in order}, for one task or for all tasks that can read
        such rows; `.rows` has the predictions of the only task. Labels are not needed. `columns`:
        {role: column}. `format`: that of files, if it differs from training. Raises UserError."""
        predictor, processes = self.session.predictor(task), self.definition.processes
        given = listed_for(predictor, rows)
        with self.session.evaluated_weights():
            return TaskPredictions(predictions_of(predictor, given, processes, columns, format))

    def predict_one_batch(self, rows: Rows) -> TaskPredictions:
        """`predict` for a few rows, under PaddlePALM's name."""
        return self.predict(rows)

    @checks_arguments()
    def evaluate(self, rows: Rows | None = None, *, task: str = "") -> Metrics:
        """{task: {metric: value}} on the rows of `dev`, or on other rows with labels. Raises
        UserError."""
        scores: dict[str, dict[str, float]] = {}
        predictor = self.session.predictor(task)
        given = None if rows is None else listed_for(predictor, rows)
        for name in predictor.tasks:
            source = self.run.recipe.sources[self.run.recipe.built_tasks[name].source]
            labeled = source.validation if given is None else given
            if labeled:
                with self.session.evaluated_weights():
                    scores[name] = scores_of(predictor, name, labeled, self.definition.processes)
        if not scores:
            raise UserError("evaluate: give rows with labels; no task has `dev` rows")
        return scores

    # ---- saving ----

    @checks_arguments()
    def save(self, folder: str | Path, *, huggingface: bool = False) -> Path:
        """Write the weights and everything needed to read them, for `palm.load`,
        `palm.Backbone.from_pretrained`, palm-ds predict and `init_from`. `huggingface`: write a
        folder for transformers instead."""
        folder = Path(folder)
        config = self.recipe.backbone_config
        if huggingface and not encoder_class(config).hf:
            raise UserError(
                f"save: Hugging Face has no encoder like {config.kind}; leave out huggingface=True"
            )
        if self.session.opened is not None:
            save_current(self.session.opened, folder, self.cur_train_step, huggingface=huggingface)
            return folder
        written = self.folder / ("hf" if huggingface else "weights")
        if not written.is_dir():
            raise UserError("save: nothing was trained; call train() first")
        if self.first_process:
            copy_model(written, folder)
        return folder

    @checks_arguments()
    def save_pretrained(self, folder: str | Path) -> Path:
        """Write a folder for transformers' Auto classes and `pipeline`, with the head of the only
        task: `save(folder, huggingface=True)`."""
        return self.save(folder, huggingface=True)

    @checks_arguments()
    def push_to_hub(
        self, name: str, *, private: bool = False, token: str | None = None, revision: str = ""
    ) -> str:
        """`save_pretrained` to the repository `name` of the Hugging Face hub; returns its URL. All
        processes call it. Raises UserError, or TemporaryError if trying again may help."""
        return push_saved(
            self.save_pretrained,
            name,
            private=private,
            token=token,
            revision=revision,
            first_process=self.first_process,
        )
