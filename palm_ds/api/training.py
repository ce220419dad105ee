"""Trains a RunDefinition from Python, to the end or step by step, and predicts with its weights of
now."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from rich.console import Console

from palm_ds.api.event_dispatcher import EventDispatcher, as_metrics, stored_metrics
from palm_ds.api.events import EventHandler, Metrics
from palm_ds.api.notebook import NotebookProgress, in_notebook
from palm_ds.api.predictions import select_tasks
from palm_ds.api.run_definition import RunDefinition
from palm_ds.common import errors
from palm_ds.common.errors import UserError
from palm_ds.common.messages import LIBRARY, counted, plain_messages
from palm_ds.data.stream.packing import batch_tokens_for
from palm_ds.inference import trained_model
from palm_ds.inference.model_tasks import asked_tasks
from palm_ds.inference.predictor import Predictor
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.processes.processes import leave_at_exit
from palm_ds.runtime.processes.signals import StopFlag, stop_signals
from palm_ds.train.train import TrainingRun, setup_run


class TrainingSession:
    """A run on its engine, which is opened when it is first needed."""

    def __init__(self, definition: RunDefinition):
        self.definition = definition
        self.scores: Metrics = {}
        """Of the last evaluation during training: {task: {metric: value}}."""
        self.opened_at = 0
        """Completed steps when the run was opened."""
        self._events: EventDispatcher | None = None
        """Of the steps since the run was opened."""
        self.opened: TrainingRun | None = None
        """The run while it trains."""
        self._batches: Iterator[list[Batch]] | None = None
        self._by_hand: EventDispatcher | None = None
        """Of steps by hand, of which it knows the epoch."""
        self._predictor: Predictor | None = None
        self.finished = False
        self._started = self._closed = self._stops = False

    @property
    def step(self) -> int:
        """Completed steps; also while a callback runs."""
        return self._events.done if self._events else self.opened_at

    def invalidate(self) -> None:
        """Discard the recipe after a change to a task. Raises UserError once training has
        started."""
        if self.opened or self.finished or self._closed:
            raise UserError("cannot be changed after training has started")
        self.definition.invalidate()

    def train(self, handlers: Sequence[EventHandler]) -> Metrics:
        """Train to the end; returns the scores of the last evaluation."""
        if self.finished:
            return self.scores
        opened = self._open()
        dispatcher = self._dispatcher(opened, handlers)
        opened.next_step, self._batches, self._by_hand = self.step, None, None
        with stop_signals() as flag:
            code = opened.run_to_end(flag)
        self.finished = opened.loop.done
        scores = as_metrics(opened.loop.scores) or self.scores
        self.scores = scores or stored_metrics(self.definition.folder)
        dispatcher.end()
        self._release()
        if code == errors.NONFINITE:
            raise UserError(opened.loop.recovery.reason)
        if code == errors.STOPPED:
            self._raise_stopped(flag)
        return self.scores

    def _raise_stopped(self, flag: StopFlag) -> NoReturn:
        """End the program, or the cell, after a stop that was asked for from outside."""
        if not flag.interrupted:
            raise SystemExit(errors.STOPPED)
        run = self.definition
        raise KeyboardInterrupt(f"step {self.step:,} of {run.steps:,} is saved; {run.call} resumes")

    def stop(self) -> None:
        """End the training after this step."""
        self._stops = True

    def _dispatcher(
        self,
        opened: TrainingRun,
        handlers: Sequence[EventHandler],
        *,
        read_losses: bool = False,
    ) -> EventDispatcher:
        dispatcher = EventDispatcher(
            opened.loop,
            self.definition.mixture.reference or next(iter(self.definition.tasks)),
            handlers,
            read_losses=read_losses,
            stops=lambda: self._stops,
        )
        dispatcher.done = self.step
        opened.loop.on_event = self._events = dispatcher
        return dispatcher

    def next_batch(self) -> list[Batch]:
        """This process's micro-batches of the next step. Raises UserError after the last one."""
        opened, steps = self._open(), self.definition.steps
        if self._batches is None:
            self._batches = opened.loop.batches(range(self.step, steps))
        try:
            return next(self._batches)
        except StopIteration:
            raise UserError(f"get_one_batch: all {counted(steps, 'step')} are taken") from None

    def train_step(
        self, batch: list[Batch] | None, handlers: Sequence[EventHandler]
    ) -> dict[str, float]:
        """Train the next step on a batch, or on the next one; returns {task: loss}. After the last
        step the weights are written."""
        opened = self._open()
        batch = self.next_batch() if batch is None else batch
        dispatcher = self._by_hand or self._dispatcher(opened, handlers, read_losses=True)
        self._by_hand = dispatcher
        if not self._started:
            opened.loop.begin(self.step)
        self._started = True
        code = opened.loop.train_step(self.step, batch)
        if code == errors.NONFINITE:
            raise UserError(opened.loop.recovery.reason)
        self.scores = as_metrics(opened.loop.scores) or self.scores
        if self.step == self.definition.steps or opened.loop.done:
            opened.finish()
            self.finished = True
            dispatcher.end()
            self._release()
        return dispatcher.losses

    def _open(self) -> TrainingRun:
        """The run on its engine, resumed if its folder has a checkpoint."""
        if self.finished:
            raise UserError(f"training has finished after {self.step} steps")
        if self._closed:
            raise UserError("closed; another trainer with this folder= resumes the training")
        if self.opened is None:
            self.opened = opened = self._set_up()
            self.opened_at, self._events, self._predictor = opened.next_step, None, None
        return self.opened

    def _set_up(self) -> TrainingRun:
        leave_at_exit()
        notebook = in_notebook()  # a display shows what the lines say
        quiet = notebook or logging.getLogger(LIBRARY).level > logging.INFO
        console = Console(width=140, force_terminal=False, force_jupyter=False, quiet=quiet)
        run, data = self.definition.run, self.definition.data
        with plain_messages(logging.WARNING if quiet else logging.INFO):
            opened = setup_run(run, console=console, data=data, examples=trained_model.examples)
        assert opened is not None
        weakref.finalize(self, opened.leave_folder)
        if notebook and opened.loop.log:
            opened.loop.log.listener = NotebookProgress(self.definition.steps).record
        return opened

    def close(self) -> None:
        """Release the engine; the session cannot train any more."""
        self._release()
        self._closed = True

    def _release(self) -> None:
        if self.opened:
            self.opened.close()
        self.opened = self._batches = self._by_hand = None

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """A context in which the model holds the weights that evaluation uses: with
        `optimizer.ema` the averaged ones. Collective."""
        return self.opened.loop.engine.ema_weights() if self.opened else nullcontext()

    def predictor(self, task: str) -> Predictor:
        """A predictor with the weights of now, for one task or for all. Raises UserError."""
        names, folder = [task] if task else [], self.definition.folder
        if self.opened is None:
            return select_tasks(self._final_predictor(), names, folder)
        opened = self.opened
        if opened.run.ds_config.stage == 3:
            raise UserError(
                "predict: ZeRO 3 partitions the weights; train to the end, or `save` and load them"
            )
        return Predictor(
            model=opened.model,
            recipe=opened.run.recipe,
            tokenizer=opened.data.tokenizer,
            tasks=asked_tasks(opened.run.recipe, names, folder),
            device=opened.loop.engine.device,
            batch_tokens=batch_tokens_for(opened.loop.engine.device),
            folder=folder,
        )

    def _final_predictor(self) -> Predictor:
        """Of the run folder, opened once."""
        if self._predictor is None:
            run = self.definition
            if not (run.folder / "recipe.yaml").is_file():
                raise UserError("nothing was trained: call train() first")
            opened = TrainedModel.open(run.folder, device=run.processes.device)
            self._predictor = opened.predictor()
        return self._predictor
