"""One training from Python: a recipe made of what was said, run as the commands run theirs.

Trainer and MultiHeadTrainer differ in how they say which steps there are. All processes of a run
(under `deepspeed` or `torchrun`) make the same calls in the same order.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from palm_ds.api.event_relay import EventDispatcher, as_metrics
from palm_ds.api.events import Metrics
from palm_ds.api.predictions import predictions_of, scores_of, select_tasks
from palm_ds.api.pretrained import Backbone
from palm_ds.api.train_settings import merged, read_settings
from palm_ds.common.errors import UserError
from palm_ds.common.messages import plain_messages
from palm_ds.common.plugins import classes_to_names
from palm_ds.data.task_with_data import Rows, TaskWithData, listed
from palm_ds.inference import fill_mask
from palm_ds.inference.predictor import Predictor, asked_tasks, batch_tokens_for, open_predictor
from palm_ds.model.batch import Batch
from palm_ds.runtime.processes import Processes, is_single_process, leave_at_exit, start
from palm_ds.runtime.signals import stop_signals
from palm_ds.train.export import info_of
from palm_ds.train.loop import STOPPED
from palm_ds.train.recipe import Recipe, make_recipe
from palm_ds.train.resolve import resolve
from palm_ds.train.run_folder import RunSpec
from palm_ds.train.sources import Data, open_data
from palm_ds.train.train import TrainingRun, setup_run
from palm_ds.weights import weights_folder as weights

EventHandler = Callable[[Any], None]
_NOT_FINITE = "a loss or gradient was not finite: lower lr, or look at the data"


class Session(ABC):
    """A training, its model, and what is asked of them."""

    def __init__(self, backbone: Backbone | str | Path | None, values: Mapping[str, Any]):
        if isinstance(backbone, str | Path):
            backbone = Backbone.from_pretrained(backbone)
        self.backbone = backbone
        self.settings = read_settings(values, type(self).__name__)
        self.scores: Metrics = {}
        """Of the last evaluation of the training: {task: {metric: value}}."""
        self.cur_train_step = 0
        """Steps that are done."""
        self._opened: TrainingRun | None = None
        self._batches: Iterator[list[Batch]] | None = None
        self._begun = self._ended = False
        self._predictor: Predictor | None = None

    # -- what is learned --

    @abstractmethod
    def blends(self) -> Sequence[Sequence[TaskWithData]]:
        """The tasks; those that share one text stand together."""

    @abstractmethod
    def stages(self) -> Any:
        """A recipe's `stages`."""

    reference = ""
    """The task whose epochs are counted; empty: the first."""

    @property
    def tasks(self) -> dict[str, TaskWithData]:
        """By name."""
        return {task.name: task for blend in self.blends() for task in blend}

    @cached_property
    def folder(self) -> Path:
        """The run folder."""
        if self.settings.folder:
            return Path(self.settings.folder)
        if not is_single_process():
            raise UserError("folder: name one that all processes of the run see")
        return self._temporary()

    @cached_property
    def recipe(self) -> Recipe:
        """What `palm-ds finetune` would be given."""
        names = [task.name for blend in self.blends() for task in blend]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two tasks are called {name!r}; give them names: name=...")
        if self.backbone is None:
            raise UserError("backbone: missing; give palm.Backbone.from_pretrained(FOLDER or NAME)")
        sources: dict[str, Any] = {}
        tasks: dict[str, Any] = {}
        for blend in self.blends():
            first = blend[0]
            sources[first.name] = first.source(self.folder / "rows")
            if self.backbone.tokenizer:
                sources[first.name]["tokenizer"] = self.backbone.tokenizer
            tasks |= {task.name: task.entry(first.name) for task in blend}
        said = {"sources": sources, "tasks": tasks, "stages": self.stages()}
        values = self.settings.values(self.backbone.max_length) | self.backbone.values() | said
        said = classes_to_names(merged(values, self.settings.recipe))
        return make_recipe(said, type(self).__name__)

    @cached_property
    def run(self) -> RunSpec:
        """With tasks as their rows have them, and steps counted."""
        settled = resolve(self.recipe, self.data)
        if not self.settings.evaluate_every:
            every = math.ceil(settled.plan.steps / math.ceil(self.settings.epochs))
            settled = replace(settled, evaluate=replace(settled.evaluate, every=every))
        return RunSpec(recipe=settled, ds_config=self.settings.ds_config(), folder=self.folder)

    @cached_property
    def data(self) -> Data:
        """The rows, opened."""
        return open_data(self.recipe)

    def invalidate(self) -> None:
        """What is learned is something else than before. Raises UserError once training began."""
        if self._opened or self._ended:
            raise UserError("the training has begun: say this before")
        for name in ("recipe", "run", "data"):
            if name in self.__dict__:
                delattr(self, name)

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return self.run.recipe.plan.steps

    def examples_of(self, task: str) -> int:
        """Rows that a task learns from."""
        source = self.run.recipe.built_tasks[task].source
        return sum(len(rows) for _, rows, _ in self.data.train[source])

    def steps_per_epoch_of(self, task: str) -> int:
        """As PaddlePALM counts: of whole batches."""
        blend = next(b for b in self.run.recipe.plan.blends if task in b.split(" + "))
        return max(self.examples_of(task) // self.run.recipe.examples_of(blend), 1)

    # -- training --

    def train(self, event_handler: EventHandler | None = None) -> Metrics:
        """To the end of the plan; the scores of the last evaluation. `event_handler` is told of
        palm.event's. Interrupted (Ctrl-C, "interrupt" of a notebook), it saves and returns; called
        again, or in another process with the same `folder`, it goes on from there."""
        opened = self._open()
        dispatcher = self._listen(opened, event_handler)
        opened.next_step, self._batches = self.cur_train_step, None
        with stop_signals() as flag:
            code = opened.run_to_end(flag)
        self.cur_train_step = dispatcher.done
        self._ended = opened.loop.done
        self.scores = as_metrics(opened.loop.scores) or self.scores
        dispatcher.end()
        self._close()
        if code == STOPPED:
            raise UserError(f"{_NOT_FINITE}; the weights before it are in checkpoints/")
        return self.scores

    def _listen(
        self, opened: TrainingRun, handler: EventHandler | None, *, read: bool = False
    ) -> EventDispatcher:
        reference = self.reference or next(iter(self.tasks))
        opened.loop.on_event = dispatcher = EventDispatcher(
            opened.loop, reference, handler, read=read
        )
        dispatcher.done = self.cur_train_step
        return dispatcher

    def get_one_batch(self) -> list[Batch]:
        """What this process computes of the next step, one Batch a micro-batch; each call is one
        step further."""
        opened = self._open()
        if self._batches is None:
            self._batches = opened.loop.batches(range(self.cur_train_step, self.steps))
        try:
            return next(self._batches)
        except StopIteration:
            raise UserError(f"all {self.steps} steps were given out") from None

    def train_one_step(self, batch: list[Batch] | None = None) -> dict[str, float]:
        """The next step of the plan (on a batch of `get_one_batch`): {task: loss}. After the last
        one the weights are written."""
        opened = self._open()
        if self._ended:
            raise UserError(f"all {self.steps} steps are done")
        batch = self.get_one_batch() if batch is None else batch
        dispatcher = self._listen(opened, None, read=True)
        if not self._begun:
            opened.loop.begin(self.cur_train_step)
        self._begun = True
        if opened.loop.train_step(self.cur_train_step, batch) == STOPPED:
            raise UserError(f"{_NOT_FINITE}; this step was not applied")
        self.cur_train_step = dispatcher.done
        self.scores = as_metrics(opened.loop.scores) or self.scores
        if self.cur_train_step == self.steps or opened.loop.done:
            opened.finish()
            self._ended = True
            self._close()
        return dispatcher.losses

    def _open(self) -> TrainingRun:
        """The run on its engine; where its folder says that it was, if it was."""
        if self._ended:
            raise UserError(f"the training is over: all {self.steps} steps are done")
        if self._opened is None:
            leave_at_exit()
            self._predictor = None
            console = Console(width=140, force_terminal=False, force_jupyter=False)
            with plain_messages():
                opened = setup_run(
                    self.run, console=console, data=self.data, examples=fill_mask.examples
                )
            assert opened is not None
            weakref.finalize(self, opened.close_log)
            self._opened, self.cur_train_step = opened, opened.next_step
        return self._opened

    def close(self) -> None:
        """Let go of the engine before the training is over; with a `folder` of its own, another
        trainer goes on from the last checkpoint."""
        self._close()
        self._ended = True

    def _close(self) -> None:
        if self._opened:
            self._opened.close()
        self._opened = self._batches = None

    # -- what came of it --

    def save(self, folder: str | Path, *, huggingface: bool = False) -> Path:
        """The weights, with all that reading them takes: for `palm.Backbone.from_pretrained`,
        palm-ds predict and `init_from`; or as Hugging Face has them (the encoder)."""
        folder = Path(folder)
        if huggingface and (kind := self.recipe.backbone_config.kind):
            raise UserError(f"save: Hugging Face has no encoder like {kind}; leave it to palm_ds")
        if self._opened is None:
            kept = self.folder / ("hf" if huggingface else "weights")
            if not kept.is_dir():
                raise UserError("nothing to save: nothing was trained")
            if self.first_process:
                shutil.copytree(kept, folder, dirs_exist_ok=True)
            return folder
        opened = self._opened
        state = opened.loop.engine.full_state_dict()
        if self.first_process:
            tokenizer, config = opened.data.tokenizer, opened.model.backbone.config
            info = info_of(opened.run.recipe, opened.model, steps=self.cur_train_step)
            if huggingface:
                heads, row = info.token_heads, info.task_id
                weights.export_hf(
                    state,
                    folder,
                    config=config,
                    tokenizer=tokenizer,
                    task_id=row,
                    token_heads=heads,
                )
            else:
                weights.save_weights(state, folder, info, tokenizer=tokenizer)
        return folder

    def predict(
        self, rows: Rows, *, task: str = "", columns: Mapping[str, Any] | None = None
    ) -> dict[str, list[dict[str, Any]]]:
        """{task: a prediction for every row, in their order}, of all tasks that can read such rows
        or of one. Labels need not be there. While training goes on, of the weights as they are;
        afterwards of those that it ended with."""
        return predictions_of(self._asked(task), listed(rows), self._processes, columns)

    def predict_one_batch(self, rows: Rows) -> dict[str, list[dict[str, Any]]]:
        """The same of a few rows."""
        return self.predict(rows)

    def evaluate(self, rows: Rows | None = None, *, task: str = "") -> Metrics:
        """{task: {metric: value}} on the rows of `dev`, or on others with labels."""
        found: dict[str, dict[str, float]] = {}
        asking, given = self._asked(task), None if rows is None else listed(rows)
        for name in asking.tasks:
            source = self.run.recipe.sources[self.run.recipe.built_tasks[name].source]
            with_labels = source.validation if given is None else given
            if with_labels:
                found[name] = scores_of(asking, name, with_labels, self._processes)
        if not found:
            raise UserError("evaluate: give rows with labels; the tasks were given no `dev`")
        return found

    def _temporary(self) -> Path:
        """A folder that goes with this object."""
        folder = tempfile.mkdtemp(prefix="palm_ds_")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _asked(self, task: str) -> Predictor:
        """The model as it is now."""
        names = [task] if task else []
        if self._opened is None:
            if self._predictor is None:
                if not (self.folder / "recipe.yaml").is_file():
                    raise UserError("nothing was trained: call train() first")
                self._predictor = open_predictor(self.folder, device=self._processes.device)
            return select_tasks(self._predictor, names, self.folder)
        opened = self._opened
        if opened.run.ds_config.stage == 3:
            raise UserError("predict: ZeRO 3 has weights in pieces; train to the end, or `save`")
        return Predictor(
            model=opened.model,
            recipe=opened.run.recipe,
            tokenizer=opened.data.tokenizer,
            tasks=asked_tasks(opened.run.recipe, names, self.folder),
            device=opened.loop.engine.device,
            batch_tokens=batch_tokens_for(opened.loop.engine.device),
        )

    @cached_property
    def _processes(self) -> Processes:
        leave_at_exit()
        return start(self.run.ds_config)

    @property
    def first_process(self) -> bool:
        """This is the one that writes, of the processes of the run."""
        return self._processes.rank == 0
