"""The training loop: steps, logging, evaluation, checkpoints, graceful stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from palm_ds.common import errors
from palm_ds.common.errors import UserError
from palm_ds.data.stream.stages import StepInfo
from palm_ds.engine import Engine
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.encoder.flops import training_flops
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.checkpoint.full_disk import may_pass
from palm_ds.runtime.device.torch_settings import collecting_between
from palm_ds.runtime.processes.processes import StopRequestedError
from palm_ds.runtime.processes.signals import StopFlag
from palm_ds.train.evaluate.evaluate import HeldOutSet, TaskScore, evaluate, evaluate_sets
from palm_ds.train.export import write_best
from palm_ds.train.loop.early_stopping import BestTracker
from palm_ds.train.loop.monitors import LabelWatch, Passes, SlowRanks, StepMeter
from palm_ds.train.loop.prefetch import prefetched
from palm_ds.train.loop.recovery import Recovery
from palm_ds.train.loop.saving import Saver
from palm_ds.train.plan.work import encoder_passes
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.report.run_log import RunLog
from palm_ds.train.setup.build import AnyStream
from palm_ds.train.setup.corpus_check import CorpusCheck
from palm_ds.train.setup.extend import ModelSignature
from palm_ds.train.setup.run_folder import RunSpec, restore_folder
from palm_ds.train.setup.sources import Data

EventHandler = Callable[[str, Mapping[str, Any]], None]


@dataclass
class Loop:
    """The training loop of one process; rank 0 has the log."""

    run: RunSpec
    engine: Engine
    model: Model
    stream: AnyStream
    validation: HeldOutSet
    log: RunLog | None
    signature: ModelSignature
    on_event: EventHandler
    best: BestTracker
    data: Data
    corpus_check: CorpusCheck
    done: bool = False
    scores: dict[str, TaskScore] = field(default_factory=dict)
    end_requested: bool = False
    """Whether to end the run after this step, as if the curriculum ended there."""
    ended_at: int = 0  # steps done when that happened, perhaps before a restart
    steps_done: int = 0  # of the weights that the engine has
    evaluated: int = -1  # steps done at the last evaluation
    started_before: frozenset[str] = frozenset()
    """Tasks that were trained before the first step, in the run that this one extends."""
    _meter: StepMeter = field(default_factory=StepMeter)
    _slow_ranks: SlowRanks = field(default_factory=SlowRanks)

    def __post_init__(self) -> None:
        self.task_weights = _loss_weights(self.recipe, self.model)
        self._label_watch = LabelWatch(self.recipe.curriculum)
        self.passes = Passes(self.stream.datasets[0], self.stream.consumed, self.recipe)
        self.saver = Saver(self.run, self.engine, self._event, ends_pass=self.passes.end_at)
        self.recovery = Recovery(
            recipe=self.recipe,
            engine=self.engine,
            checkpoints=self.run.checkpoints,
            save=partial(self._save, now=True),
            finish_save=self.saver.finish,
            event=self._event,
        )

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe

    def run_steps(self, first: int, flag: StopFlag) -> int:
        """Train from step `first` to the end of the curriculum or until a stop is requested.
        Returns the exit code."""
        self.saver.flag = flag
        try:
            self.begin(first)
        except StopRequestedError:
            self.saver.saved = first or -1  # it has just been restored
            return self._stopped(first)
        steps = range(first, self.recipe.curriculum.steps)
        batches_of = self.batches(steps)
        for step in collecting_between(steps):
            if self.done:
                break
            started = time.monotonic()
            batches = next(batches_of)
            waited = time.monotonic() - started
            exit_code = self.train_step(step, batches, stop=flag.stop_requested, waited=waited)
            if exit_code is not None:
                return exit_code
        self.done = True
        return 0

    def begin(self, first: int) -> None:
        """Evaluate if necessary before the first step; the run may have ended before (`done`)."""
        self.steps_done = first
        self._event("begin", step=first)
        set_rope_bases(self.model.encoders, self.recipe, first)  # the next stage sets its own
        if self.recipe.extend and not first and not self.validation.is_empty:
            self._evaluate(0)  # the scores of the run that it extends
        if first and self.evaluated < first and self._evaluation_due(first):
            self._evaluate(first)  # a run that was stopped saved, but did not evaluate
        elif self.best.should_stop:  # perhaps by another `patience` than before
            self._event("patience", self.best.why_it_stops)
        self.done = self.best.should_stop or self.ended_at > 0
        self._meter = StepMeter()

    def batches(self, steps: range) -> Iterator[list[Batch]]:
        """This process's micro-batches of each step."""
        return prefetched(self.stream, self.engine, steps, self.run.ds_config.data_workers)

    def train_step(
        self, step: int, batches: list[Batch], *, stop: bool = False, waited: float = 0.0
    ) -> int | None:
        """Train one step, then log, evaluate and save as scheduled. Returns the exit code if the
        run ends here; a run that has converged sets `done` instead."""
        self.done, self.ended_at = False, 0  # a step by hand continues a run that had ended
        at = self.recipe.curriculum.at(step, self.recipe.seed)
        if at.starts_stage:
            self._event("stage", step=step, stage=at.stage + 1)
            set_rope_bases(self.model.encoders, self.recipe, step + 1)
        self.on_event("next", {"step": step})
        lr = self.recipe.optimizer.lr * self.recipe.lr_scale(at)
        frozen, decay = self.recipe.step_settings.frozen(at), self.recipe.decay_scale(at)
        own = self.recipe.step_settings.optimizer(at).of_step
        how = stop, frozen, decay, own, step / self.recipe.curriculum.steps
        result = self.engine.step(batches, lr, step, self.task_weights, *how)
        self.steps_done = step + 1
        self._meter.add(result, _flops(self.model, batches), waited)
        for task in self._label_watch.add(at, result.counts):
            self._event("unlabelled", self._label_watch.describe(task), step=step + 1, task=task)
        self.recovery.add(at, result, batches)
        self.on_event("step", {"step": step + 1, "result": result, "lr": lr})
        if result.checkpoint_written:
            self.untimed(partial(self.saver.finish, step + 1))
        last = step + 1 == self.recipe.curriculum.steps
        if logs := last or result.stop or (step + 1) % self.recipe.log.every == 0:
            self._log_step(at, lr)
        last = last or (result.stop and self._end_if_requested(step + 1))
        saves = self.saver.due(step + 1) or result.stop
        if (logs or saves) and not self.recovery.check(step, last=last, saves=saves):
            return errors.NONFINITE
        if result.stop:
            return self._stopped(step + 1)
        return self._evaluate_and_save(step + 1)

    def _stopped(self, done: int) -> int:
        """Save because a stop was requested; returns the exit code."""
        self._save(done, stopping=True)
        if self.saver.saved != done:
            return errors.FAILED
        waits = self.evaluated < done and self._evaluation_due(done)
        then = "; its evaluation is made then" if waits else ""
        text = f"stopped; step {done} is saved; {self.run.resumed_by} to continue{then}"
        self._event("stopped", text)
        return errors.STOPPED

    def _evaluate_and_save(self, done: int) -> int | None:
        """Do what is scheduled after `done` steps. Returns the exit code if the run must stop."""
        try:
            self.untimed(partial(self._evaluate_if_due, done))
        except StopRequestedError:  # resumed, the run evaluates before its first step
            good = self.recovery.check(done - 1, saves=True, last=self._end_if_requested(done))
            return self._stopped(done) if good else errors.NONFINITE
        if not (self.best.should_stop or self._end_if_requested(done)):
            if self.saver.due(done):
                self.untimed(partial(self._save, done))
            return None
        if not self.recovery.check(done - 1, last=True):  # before ruined weights are saved
            return errors.NONFINITE
        self._save(done, ends=True)
        self.done = True
        return None

    def _end_if_requested(self, done: int) -> bool:
        """Whether the run ends after `done` steps, before its plan does."""
        if self.end_requested and done < self.recipe.curriculum.steps:
            self._event("ended", f"ended after step {done}, as requested")
            self.ended_at = done
        return self.ended_at > 0

    def untimed(self, work: Callable[[], None]) -> None:
        """Do what is not training time."""
        started = time.monotonic()
        work()
        self._meter.began += time.monotonic() - started

    def _evaluate_if_due(self, done: int) -> None:
        if text := self.passes.describe_end(done):
            self._event("pass", text, step=done, number=self.passes.completed(done))
        if self._evaluation_due(done):
            self._evaluate(done)

    def _evaluation_due(self, done: int) -> bool:
        due = self.recipe.stage_plan.evaluates_after(done, self.recipe.evaluate.every)
        due = due or (self.recipe.evaluate.passes and self.passes.end_at(done))
        return due and not self.validation.is_empty

    def _log_step(self, at: StepInfo, lr: float) -> None:
        """Log the steps since the last logged one."""
        record = self._meter.read(self.engine) | {
            "step": at.step + 1,
            "stage": at.stage + 1,
            "lr": lr,
            "grad_norm": self.engine.grad_norm,
            "loss_scale": self.engine.loss_scale,
            "skipped": self.engine.skipped_steps,
        }
        if self.log:
            self.log.step(record)
        for line in self._slow_ranks.add(*self._meter.rank_times(self.engine)):
            self._event("slow rank", line)
        self._meter = StepMeter()

    def _evaluate(self, done: int) -> None:
        tasks, before = self.recipe.built_tasks, self.best.record()
        started = self.started_before | self.recipe.curriculum.started(done)
        with self.engine.ema_weights():
            with self.engine.processes.abandons(lambda: self.saver.flag.stop_requested):
                what = self.engine, self.validation, tasks, self.recipe.own_metrics
                scores, sets = evaluate(*what), evaluate_sets(*what)
            self.scores, self.evaluated = scores | sets, done
            saved = self.saver.due(done)
            better = done > 0 and self.best.update(done, scores, saved=saved, started=started)
            better = better and self._keep_best(done, before)
        records = {name: score.record() for name, score in self.scores.items()}
        if self.log:
            stage = self.recipe.curriculum.stage_at(done - 1) + 1 if done else 0
            self.log.evaluation(done, records, stage=stage, started=sorted(started))
        if better:
            self._event("best", f"best so far: {self.best}", step=done)
        self.on_event("evaluation", {"step": done, "scores": self.scores})
        if self.best.should_stop:
            self._event("patience", self.best.why_it_stops)

    def _keep_best(self, done: int, before: Mapping[str, Any]) -> bool:
        """Write the current weights to best/; if that fails for now, return to the best evaluation
        `before` instead, whose weights it has. Returns whether it has the current ones."""
        state = self.engine.full_state_dict()
        write = partial(write_best, self.run, self.model, state, self.data, done)
        if not (problem := self.saver.write_at_rank0(write, patience=0.0)):
            return True
        if not may_pass(problem):
            self.saver.finish(done)
            raise UserError(f"{self.run.best}: the best weights cannot be written: {problem}")
        self.best.restore({**before, "values": self.best.record()["values"]})
        text = f"step {done} is the best so far, but not kept and not counted: {problem}"
        self._event("best not kept", text, step=done)
        return False

    def _save(self, done: int, **how: bool) -> None:
        """Save after `done` steps, unless a corpus is damaged; `how`: as in `Saver.save`. Raises
        UserError."""
        self.saver.finish(done)  # before an error, which would lose it
        self.corpus_check.collect()
        state = {
            "step": done,
            "cursor": self.stream.state_dict(done),
            "already_read": self.stream.already_read,
            "consumed": self.stream.consumed(done),
            "signature": self.signature.record(self.recipe.stage_plan.rope_bases(done)),
            "best": self.best.record(),
            "evaluated": self.evaluated,
            "ended_at": self.ended_at,
            "started_before": sorted(self.started_before),
            "recovery": self.recovery.record(),
        }
        if self.log and (text := restore_folder(self.run, self.engine.config, self.data)):
            self.log.event("folder", text)
        keep = self.recovery.retention(done, self.best.values)
        self.saver.save(state, done, keep=keep, **how)

    def _event(self, name: str, message: str = "", **facts: object) -> None:
        if self.log:
            self.log.event(name, message, **facts)
        self.on_event(name, facts)


def _loss_weights(recipe: Recipe, model: Model) -> dict[str, float]:
    tasks = [task.loss_weights() for task in recipe.built_tasks.values()]
    own = {name: weight for task in tasks for name, weight in task.items()}
    return own | model.teacher_weights


def _flops(model: Model, batches: list[Batch]) -> torch.Tensor | float:
    """FLOPs of a step, forward and backward."""
    passes = encoder_passes(model)
    return sum(training_flops(x, batch, *tasks) for x, *tasks in passes for batch in batches)


def set_rope_bases(encoders: Iterable[Encoder], recipe: Recipe, done: int) -> None:
    """Use the bases of rotary positions that the last of `done` steps has, which are those of its
    stage or of the encoder's configuration."""
    for encoder in encoders:
        for local, own in zip((False, True), recipe.stage_plan.rope_bases(done), strict=True):
            base = own or encoder.rope_base(encoder.config, local=local)
            if base is not None:
                encoder.set_rope_base(base, local=local)
