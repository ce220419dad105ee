"""Callbacks: objects whose methods a trainer calls during training.

    class StopAtLoss(palm.Callback):
        def on_step_end(self, trainer, event):
            if event.cost < 0.1:
                trainer.stop_training()

    palm.Trainer(task, backbone=backbone, callbacks=[StopAtLoss()])

The methods have the names of transformers' TrainerCallback. They are called on every process.
"""

from __future__ import annotations

from palm_ds.api import events
from palm_ds.api.base_trainer import BaseTrainer


class Callback:
    """The methods that a callback may have; here they do nothing. A callback need not derive from
    this class."""

    def on_train_begin(self, trainer: BaseTrainer, event: events.BeginTraining) -> None:
        """Before the first step, of a resumed run too."""

    def on_epoch_begin(self, trainer: BaseTrainer, event: events.BeginPass) -> None:
        """Before an epoch of the task, or of the reference task."""

    def on_step_begin(self, trainer: BaseTrainer, event: events.BeginIteration) -> None:
        """Before a step."""

    def on_step_end(self, trainer: BaseTrainer, event: events.EndIteration) -> None:
        """After a step, with its losses."""

    def on_log(self, trainer: BaseTrainer, event: events.EndIteration) -> None:
        """After `on_step_end` of every `log_every`-th step."""

    def on_evaluate(self, trainer: BaseTrainer, event: events.Evaluation) -> None:
        """After an evaluation, with its scores."""

    def on_save(self, trainer: BaseTrainer, event: events.Saved) -> None:
        """After a checkpoint was written."""

    def on_epoch_end(self, trainer: BaseTrainer, event: events.EndPass) -> None:
        """After an epoch."""

    def on_train_end(self, trainer: BaseTrainer, event: events.EndTraining) -> None:
        """When training has finished or was interrupted."""
