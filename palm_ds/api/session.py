"""A trainer's life in Python: define a run, train it, predict and evaluate with it.

    RunDefinition  tasks + backbone + settings -> Recipe, RunSpec       run_definition.py
    TrainingSession    train, train_one_step, save                      training.py
    Session                predict, evaluate                            this file
    Trainer, MultiHeadTrainer  which tasks, which stages                trainer.py

All processes of a run (under `deepspeed` or `torchrun`) make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palm_ds.api.events import Metrics
from palm_ds.api.notebook import TaskPredictions
from palm_ds.api.predictions import predictions_of, scores_of, select_tasks
from palm_ds.api.pretrained import Backbone
from palm_ds.api.training import TrainingSession
from palm_ds.common.arguments import checks_arguments
from palm_ds.common.errors import UserError
from palm_ds.data.sources.row_inputs import COLUMNS, Rows, listed
from palm_ds.inference.batching import batch_tokens_for
from palm_ds.inference.predictor import Predictor
from palm_ds.inference.task_selection import asked_tasks
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.train.train import TrainingRun


class Session(TrainingSession):
    """A run that can be trained and used: during training with its current weights, afterwards
    with its final ones."""

    def __init__(
        self,
        backbone: Backbone | str | Path | None,
        values: Mapping[str, Any],
        callbacks: Sequence[Any] = (),
        metrics: Mapping[str, Any] | None = None,
    ):
        super().__init__(backbone, values, callbacks, metrics or {})
        self._predictor: Predictor | None = None

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
        such rows; `.rows` are those of the only task. Labels are not needed. `format`: of files,
        if not as in training."""
        found = predictions_of(self._current(task), listed(rows), self.processes, columns, format)
        return TaskPredictions(found)

    def predict_one_batch(self, rows: Rows) -> TaskPredictions:
        """`predict` for a few rows, by PaddlePALM's name."""
        return self.predict(rows)

    @checks_arguments()
    def evaluate(self, rows: Rows | None = None, *, task: str = "") -> Metrics:
        """{task: {metric: value}} on the rows of `dev`, or on other rows with labels."""
        found: dict[str, dict[str, float]] = {}
        predictor, given = self._current(task), None if rows is None else listed(rows)
        for name in predictor.tasks:
            source = self.run.recipe.sources[self.run.recipe.built_tasks[name].source]
            labelled = source.validation if given is None else given
            if labelled:
                found[name] = scores_of(predictor, name, labelled, self.processes)
        if not found:
            raise UserError("evaluate: give rows with labels; no task has `dev` rows")
        return found

    def _open(self) -> TrainingRun:
        if self._opened is None:
            self._predictor = None
        return super()._open()

    def _current(self, task: str) -> Predictor:
        """A predictor with the current weights, for one task or for all."""
        names = [task] if task else []
        if self._opened is None:
            if self._predictor is None:
                if not (self.folder / "recipe.yaml").is_file():
                    raise UserError("nothing was trained: call train() first")
                self._predictor = TrainedModel.open(
                    self.folder, device=self.processes.device
                ).predictor()
            return select_tasks(self._predictor, names, self.folder)
        opened = self._opened
        if opened.run.ds_config.stage == 3:
            raise UserError(
                "predict: ZeRO 3 partitions the weights; train to the end, or `save` and load them"
            )
        return Predictor(
            model=opened.model,
            recipe=opened.run.recipe,
            tokenizer=opened.data.tokenizer,
            tasks=asked_tasks(opened.run.recipe, names, self.folder),
            device=opened.loop.engine.device,
            batch_tokens=batch_tokens_for(opened.loop.engine.device),
        )
