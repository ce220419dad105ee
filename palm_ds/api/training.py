"""Trains a RunDefinition from Python: to the end or step by step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from palm_ds.api.callbacks import (
    EventDispatcher,
    as_metrics,
    caller,
    check_callbacks,
    stored_metrics,
)
from palm_ds.api.events import Event, EventHandler, Metrics
from palm_ds.api.notebook import NotebookProgress, Report, in_notebook
from palm_ds.api.pretrained import Backbone
from palm_ds.api.run_definition import RunDefinition
from palm_ds.api.save_model import copy_model, push_saved
from palm_ds.common import errors
from palm_ds.common.arguments import checks_arguments
from palm_ds.common.errors import UserError
from palm_ds.common.messages import plain_messages
from palm_ds.inference import trained_model
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.processes.processes import leave_at_exit
from palm_ds.runtime.processes.signals import StopFlag, stop_signals
from palm_ds.train.export import FinalWeights, info_of, write_hf, write_onnx, write_weights
from palm_ds.train.train import TrainingRun, setup_run

log = logging.getLogger(__name__)


class TrainingSession(RunDefinition):
    """A run that can be trained and saved."""

    def __init__(
        self,
        backbone: Backbone | str | Path | None,
        values: Mapping[str, Any],
        callbacks: Sequence[Any],
        metrics: Mapping[str, Any],
    ):
        """`callbacks`: objects with methods of palm.Callback. The rest as in RunDefinition."""
        super().__init__(backbone, values, metrics)
        self.callbacks = check_callbacks(callbacks)
        self.scores: Metrics = {}
        """Of the last evaluation during training: {task: {metric: value}}."""
        self.cur_train_step = 0
        """Completed steps."""
        self._opened: TrainingRun | None = None
        self._batches: Iterator[list[Batch]] | None = None
        self._started = self._finished = self._closed = self._stops = False

    def invalidate(self) -> None:
        """Discard the recipe after a change to a task. Raises UserError once training has
        started."""
        if self._opened or self._finished or self._closed:
            raise UserError("cannot be changed after training has started")
        super().invalidate()

    @checks_arguments(event_handler="a function of one event")
    def train(self, event_handler: EventHandler | None = None) -> Metrics:
        """Train to the end; returns the scores of the last evaluation.

        `event_handler` is called with the events of palm.event. If interrupted (Ctrl-C, the stop
        button of a notebook), it saves and raises KeyboardInterrupt; stopped by SIGTERM, it saves
        and exits with code 75. Called again, or in another process with the same `folder`, it
        resumes from there; once finished, it returns the scores again."""
        if self._finished:
            return self.scores
        opened = self._open()
        dispatcher = self._dispatcher(opened, event_handler)
        opened.next_step, self._batches = self.cur_train_step, None
        with stop_signals() as flag:
            code = opened.run_to_end(flag)
        self.cur_train_step = dispatcher.done
        self._finished = opened.loop.done
        scores = as_metrics(opened.loop.scores) or self.scores
        self.scores = scores or stored_metrics(self.folder)
        dispatcher.end()
        self._close()
        if code == errors.NONFINITE:
            raise UserError(opened.loop.recovery.reason)
        if code == errors.STOPPED:
            self._raise_stopped(flag)
        return self.scores

    def _raise_stopped(self, flag: StopFlag) -> NoReturn:
        """End the program, or the cell, after a stop that was asked for from outside."""
        if not flag.interrupted:
            raise SystemExit(errors.STOPPED)
        where = f" with folder={str(self.folder)!r}" if self.settings.folder else ""
        raise KeyboardInterrupt(
            f"step {self.cur_train_step:,} of {self.steps:,} is saved; train(){where} resumes"
        )

    def report(self) -> Report:
        """The curves and scores of the finished training, which a notebook shows inline. Raises
        UserError."""
        path = self.folder / "report.html"
        if not path.is_file():
            raise UserError("report: nothing was trained to its end; call train() first")
        return Report(path)

    def stop_training(self) -> None:
        """For callbacks and event handlers: end the training after this step. The weights are
        written as at its end."""
        self._stops = True

    def _dispatcher(
        self, opened: TrainingRun, handler: EventHandler | None, *, read_losses: bool = False
    ) -> EventDispatcher:
        reference = self.reference or next(iter(self.tasks))
        given = [caller(self.callbacks, self)] if self.callbacks else []
        handlers = [*given, *([handler] if handler else [])]
        dispatcher = EventDispatcher(
            opened.loop,
            reference,
            _each(handlers) if handlers else None,
            read_losses=read_losses,
            stops=lambda: self._stops,
        )
        dispatcher.done = self.cur_train_step
        opened.loop.on_event = dispatcher
        return dispatcher

    @checks_arguments()
    def get_one_batch(self) -> list[Batch]:
        """This process's micro-batches of the next step; each call advances by one step."""
        opened = self._open()
        if self._batches is None:
            self._batches = opened.loop.batches(range(self.cur_train_step, self.steps))
        try:
            return next(self._batches)
        except StopIteration:
            raise UserError(f"get_one_batch: there are only {self.steps} steps") from None

    @checks_arguments(batch="what get_one_batch returns")
    def train_one_step(self, batch: list[Batch] | None = None) -> dict[str, float]:
        """Train the next step (on a batch of `get_one_batch`); returns {task: loss}. After the last
        step the weights are written."""
        opened = self._open()
        batch = self.get_one_batch() if batch is None else batch
        dispatcher = self._dispatcher(opened, None, read_losses=True)
        if not self._started:
            opened.loop.begin(self.cur_train_step)
        self._started = True
        if opened.loop.train_step(self.cur_train_step, batch) == errors.NONFINITE:
            raise UserError(opened.loop.recovery.reason)
        self.cur_train_step = dispatcher.done
        self.scores = as_metrics(opened.loop.scores) or self.scores
        if self.cur_train_step == self.steps or opened.loop.done:
            opened.finish()
            self._finished = True
            self._close()
        return dispatcher.losses

    def _open(self) -> TrainingRun:
        """The run on its engine, resumed if its folder has a checkpoint."""
        if self._finished:
            raise UserError(f"training has finished after {self.cur_train_step} steps")
        if self._closed:
            raise UserError("closed; another trainer with this folder= resumes the training")
        if self._opened is None:
            leave_at_exit()
            quiet = in_notebook()  # a display shows what the lines say
            console = Console(width=140, force_terminal=False, force_jupyter=False, quiet=quiet)
            with plain_messages(logging.WARNING if quiet else logging.INFO):
                opened = setup_run(
                    self.run, console=console, data=self.data, examples=trained_model.examples
                )
            assert opened is not None
            weakref.finalize(self, opened.leave_folder)
            if quiet and opened.loop.log:
                opened.loop.log.listener = NotebookProgress(self.steps).record
            self._opened, self.cur_train_step = opened, opened.next_step
        return self._opened

    def close(self) -> None:
        """Release the engine before training has finished. With a `folder`, another trainer can
        resume from its last checkpoint."""
        self._close()
        self._closed = True

    def _close(self) -> None:
        if self._opened:
            self._opened.close()
        self._opened = self._batches = None

    @checks_arguments()
    def save_pretrained(self, folder: str | Path) -> Path:
        """Write a folder for transformers' Auto classes and `pipeline`, with the head of the only
        task: `save(folder, huggingface=True)`."""
        return self.save(folder, huggingface=True)

    @checks_arguments()
    def push_to_hub(
        self, name: str, *, private: bool = False, token: str | None = None, revision: str = ""
    ) -> str:
        """`save_pretrained` to the repository `name` of the Hugging Face hub; returns its
        address. All processes call it. Raises UserError or TemporaryError."""
        return push_saved(
            self.save_pretrained,
            name,
            private=private,
            token=token,
            revision=revision,
            first_process=self.first_process,
        )

    @checks_arguments()
    def save(self, folder: str | Path, *, huggingface: bool = False) -> Path:
        """Write the weights and everything needed to read them: for
        `palm.Backbone.from_pretrained`, palm-ds predict and `init_from`; or the encoder for
        Hugging Face."""
        folder = Path(folder)
        config = self.recipe.backbone_config
        if huggingface and not encoder_class(config).hf:
            raise UserError(
                f"save: Hugging Face has no encoder like {config.kind}; leave out huggingface=True"
            )
        if self._opened is None:
            written = self.folder / ("hf" if huggingface else "weights")
            if not written.is_dir():
                raise UserError("save: nothing was trained; call train() first")
            if self.first_process:
                copy_model(written, folder)
        else:
            self._save_current(self._opened, folder, huggingface)
        return folder

    def _save_current(self, opened: TrainingRun, folder: Path, huggingface: bool) -> None:
        """Write the current weights. Collective."""
        state = opened.loop.engine.full_state_dict()
        if not self.first_process:
            return
        recipe, steps = opened.run.recipe, self.cur_train_step
        final = FinalWeights.of(state, recipe, steps)
        if huggingface:
            info = info_of(recipe, opened.model, steps=steps)
            write_hf(folder, recipe, info, final.state, opened.data, steps=steps)
            for line in write_onnx(folder, recipe):
                log.info("%s", line)
        else:
            write_weights(folder, recipe, opened.model, final, opened.data)


def _each(handlers: Sequence[EventHandler]) -> EventHandler:
    def handle(event: Event) -> None:
        for handler in handlers:
            handler(event)

    return handle
