"""The training loop: steps, what is logged of them, evaluations, checkpoints, and stopping well."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palm_ds.data.stages import order_of, tasks_of
from palm_ds.engine import Engine
from palm_ds.model.batch import Batch
from palm_ds.model.flops import training_flops
from palm_ds.model.heads import MaskedWordHead
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime import checkpoint
from palm_ds.runtime.signals import StopAsked
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.train.build import AnyStream
from palm_ds.train.early_stopping import Best
from palm_ds.train.evaluate import HeldOut, Score, evaluate
from palm_ds.train.export import info_of
from palm_ds.train.extend import Lineage
from palm_ds.train.prefetch import prefetched
from palm_ds.train.recipe import Recipe
from palm_ds.train.report.run_log import RunLog
from palm_ds.train.run_folder import Run
from palm_ds.train.step_meter import StepMeter
from palm_ds.weights import weights_folder as weights

EventHandler = Callable[[str, Mapping[str, Any]], None]
STOPPED = 3
"""Exit code of a run that a non-finite loss stopped."""


@dataclass
class Loop:
    """The training loop of one process; rank 0 has the log."""

    run: Run
    engine: Engine
    model: Model
    stream: AnyStream
    validation: HeldOut
    log: RunLog | None
    lineage: Lineage
    tell: EventHandler
    best: Best
    tokenizer: Tokenizer
    done: bool = False
    scores: dict[str, Score] = field(default_factory=dict)
    evaluated: int = -1
    """After how many steps the last evaluation was."""
    _saved: int = -1
    _meter: StepMeter = field(default_factory=StepMeter)
    _skipped: int = 0
    _orders: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe

    def go(self, first: int, asked: StopAsked) -> int:
        """From step `first` to the end of the plan, or until somebody asks to stop; the exit
        code."""
        self.begin(first)
        steps = range(first, self.recipe.plan.steps)
        batches_of = self.batches(steps)
        for step in steps:
            if self.done:
                break
            begun = time.monotonic()
            batches = next(batches_of)
            waited = time.monotonic() - begun
            ended = self.one(step, batches, stop=asked.now, waited=waited)
            if ended is not None:
                return ended
        self.done = True
        return 0

    def begin(self, first: int) -> None:
        """Before the first step."""
        self._event("begin", step=first)
        if self.recipe.extend and not first and self.validation.rows:
            self._evaluate(0)  # what the old run left
        if first and self.evaluated < first and self._evaluation_due(first):
            self._evaluate(first)  # a run that is asked to stop saves and leaves, nothing more
        self.done = self.best.exhausted
        self._meter, self._skipped = StepMeter(), self.engine.skipped_steps

    def batches(self, steps: range) -> Iterator[list[Batch]]:
        """This process's micro-batches of steps."""
        return prefetched(self.stream, self.engine, steps, self.run.machine.data_workers)

    def one(
        self, step: int, batches: list[Batch], *, stop: bool = False, waited: float = 0.0
    ) -> int | None:
        """One step and what is due after it; the exit code where the run ends with it. It is done
        as well when `done` says so."""
        recipe, engine, plan = self.recipe, self.engine, self.recipe.plan
        if step == plan.stages[plan.stage_at(step)].first:
            self._event("stage", step=step, stage=plan.stage_at(step))
        self.tell("next", {"step": step})
        weights_of = {name: task.weight for name, task in recipe.built_tasks.items()}
        lr = recipe.optimizer.lr * recipe.schedule.factor(step, plan)
        result = engine.step(batches, lr, step, weights_of, stop, self._rest(step))
        self._meter.add(result, self._flops(batches), waited)
        self.tell("step", {"step": step + 1, "result": result, "lr": lr})
        last = step + 1 == plan.steps
        if (step + 1) % recipe.log.every == 0 or last or result.stop:
            self._log_step(step, lr, self._meter)
            now = engine.skipped_steps
            if self._bad(step, now - self._skipped, self._meter) and not self._taken_back(step):
                return STOPPED
            self._meter, self._skipped = StepMeter(), engine.skipped_steps
        if result.stop:
            self._save(step + 1)
            self._event("stopped", f"stopped on request; goes on from step {step + 1}")
            return 0
        paused = time.monotonic()
        self._after(step + 1)
        self._meter.began += time.monotonic() - paused  # not training time
        if self.best.exhausted:
            self._event("patience", f"nothing better since step {self.best.step}; done")
            self._save(step + 1)
            self.done = True
        return None

    def _rest(self, step: int) -> tuple[str, ...]:
        """The parameters that the tasks of a step leave as they are; such a step is of one
        blend."""
        tasks, plan = self.recipe.built_tasks, self.recipe.plan
        if not any(task.freeze for task in tasks.values()):
            return ()
        number = plan.stage_at(step)
        stage = plan.stages[number]
        if stage.mix != "step":
            return ()
        if number not in self._orders:
            self._orders[number] = order_of(stage, number, self.recipe.seed)
        blend, _ = stage.steps_of[self._orders[number][step - stage.first]]
        return tuple(dict.fromkeys(p for name in tasks_of(blend) for p in tasks[name].freeze))

    def _after(self, done: int) -> None:
        """Evaluation and checkpoint when they are due after so many steps."""
        every = self.recipe.save.every
        if self._evaluation_due(done):
            self._evaluate(done)
        if done == self.recipe.plan.steps or (every and done % every == 0):
            self._save(done)

    def _evaluation_due(self, done: int) -> bool:
        every = self.recipe.evaluate.every
        ends = any(done == stage.first + stage.steps for stage in self.recipe.plan.stages)
        return bool(self.validation.rows) and (ends or bool(every) and done % every == 0)

    def _flops(self, batches: list[Batch]) -> float:
        heads, config = self.model.heads, self.model.backbone.config
        words = [t for t, h in self.model.head_of.items() if isinstance(heads[h], MaskedWordHead)]
        return sum(training_flops(config, batch, words) for batch in batches)

    def _log_step(self, step: int, lr: float, meter: StepMeter) -> None:
        record = meter.read(self.engine) | {
            "step": step + 1,
            "stage": self.recipe.plan.stage_at(step),
            "lr": lr,
            "grad_norm": self.engine.grad_norm,
            "loss_scale": self.engine.loss_scale,
            "skipped": self.engine.skipped_steps,
        }
        if self.log:
            self.log.step(record)

    def _evaluate(self, done: int) -> None:
        tasks, better = self.recipe.built_tasks, False
        with self.engine.averaged():
            self.scores = evaluate(self.engine, self.validation, tasks)
            self.evaluated = done
            if self.best.wanted and done:
                better = self.best.see(done, self.scores)
            if better:
                self._keep_best(done)
        records = {name: score.record() for name, score in self.scores.items()}
        stage = self.recipe.plan.stage_at(done - 1) if done else -1
        if self.log:
            self.log.evaluation(done, records, stage=stage)
        if better:
            self._event("best", f"the best so far: {self.best}", step=done)
        self.tell("evaluation", {"step": done, "scores": self.scores})

    def _keep_best(self, done: int) -> None:
        """The weights as they are, in the run folder's best/. All processes take part."""
        state = self.engine.full_state_dict()
        if self.engine.rank == 0:
            info = info_of(self.recipe, self.model, steps=done)
            weights.save_weights(state, self.run.best, info, tokenizer=self.tokenizer)

    def _save(self, done: int) -> None:
        if self._saved == done:
            return
        state = {
            "step": done,
            "cursor": self.stream.cursor(done),
            "begun": self.stream.begun,
            "consumed": self.stream.consumed(done),
            "lineage": self.lineage.record(),
            "best": self.best.record(),
            "evaluated": self.evaluated,
        }
        try:
            self.engine.save(self.run.checkpoints, state, step=done, keep=self.recipe.save.keep)
        except checkpoint.SaveError as error:
            self._event("save failed", f"not saved: {error}", step=done)
            return
        self._saved = done
        self._event("save", step=done)

    def _event(self, name: str, message: str = "", **facts: Any) -> None:
        if self.log:
            self.log.event(name, message, **facts)
        self.tell(name, facts)

    # -- non-finite losses and gradients --

    def _bad(self, step: int, skipped: int, meter: StepMeter) -> bool:
        """Whether steps since the last logged one were skipped for a reason that matters: fp16's
        search for its loss scale skips steps as well, as long as it finds one."""
        if not skipped or self.recipe.nonfinite == "skip":
            return False
        searching = self.engine.machine.precision == "fp16" and skipped < meter.steps
        return not searching or self.engine.loss_scale <= 1

    def _taken_back(self, step: int) -> bool:
        """Whether the run may go on after a step that was not finite, from older weights."""
        where = f"a loss or gradient was not finite within the {self.recipe.log.every} steps to "
        where += f"step {step + 1}; it was not applied"
        if self.recipe.nonfinite == "rollback":
            state = self.engine.load(self.run.checkpoints)
            if state is not None:
                back = f"{where}; back to the weights of step {state['step']}, on from {step + 2}"
                self._event("rollback", back, step=step + 1)
                return True
        self._save(step + 1)
        self._event(
            "nonfinite",
            f"{where}. Stopped; the weights are good. Lower optimizer.lr, look at those steps' "
            "data, or set `nonfinite: skip`",
        )
        return False
