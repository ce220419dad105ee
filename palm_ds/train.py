"""A run from its recipe to its weights: build, resume, the loop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from palm_ds import __version__, checkpoint, fill_mask, weights
from palm_ds.assemble import Data, build_held_out, build_model, build_stream, open_data
from palm_ds.engine import Engine, StepResult, start, stop, warn_on_stderr
from palm_ds.evaluate import HeldOut, Score, evaluate
from palm_ds.example import Batch
from palm_ds.extend import Lineage, inherit
from palm_ds.flops import training_flops
from palm_ds.folder import Run, check_folder, overview, write_folder
from palm_ds.heads import MaskedWordHead
from palm_ds.log import RunLog
from palm_ds.model import Model
from palm_ds.report import write_report
from palm_ds.run import Recipe
from palm_ds.source import Source
from palm_ds.stream import Stream

EventHandler = Callable[[str, Mapping[str, Any]], None]
STOPPED = 3
"""Exit code of a run that a non-finite loss stopped."""


def train(run: Run, event_handler: EventHandler | None = None, *, dry_run: bool = False) -> int:
    """Train a run to its end, or from where its folder says it stopped. The exit code: 0 when the
    plan is done or the run was asked to stop, 3 when a non-finite loss stopped it.

    `event_handler(name, facts)` is called, on every process, with begin, stage, step, evaluation,
    save and end."""
    recipe = run.recipe
    data = open_data(recipe)
    check_folder(run, data)
    stream, validation = build_stream(recipe, data), build_held_out(recipe, data)
    processes = start(run.machine)

    def say(text: str) -> None:
        if processes.rank == 0:
            print(text, flush=True)

    found = checkpoint.find(run.checkpoints, group=processes, warn=warn_on_stderr)
    model = build_model(recipe, run.machine, data.vocabulary, device=processes.device, say=say)
    lineage = _lineage(run, model, data)
    inheritance = None
    if recipe.extend and found is None:
        inheritance = inherit(
            Path(recipe.extend),
            model,
            lineage,
            [feed.name for feed in stream.feeds],
            group=processes,
            warn=warn_on_stderr,
        )
        say("\n".join(inheritance.lines()))
        stream.begun = dict(inheritance.consumed)
    elif recipe.init_from and found is None:
        say("\n".join(weights.load_weights(Path(recipe.init_from), model).lines()))
    say(overview(run, stream, model, processes.world))
    if dry_run:
        stream.batches(0, 0, 1, recipe.rows)
        say("dry run: everything fits together; nothing was trained")
        stop()
        return 0
    engine = Engine(
        model,
        machine=run.machine,
        optimizer=recipe.optimizer,
        rows=recipe.rows,
        seed=recipe.seed,
        steps=found.parameters if found else inheritance.steps if inheritance else None,
    )
    state: Mapping[str, Any] = {"step": 0, "cursor": {}}
    if found:
        engine.restore(found)
        state = found.state
        if found.layout != engine.layout:
            say(f"goes on with {engine.layout}; saved with {found.layout}")
    elif inheritance:
        engine.inherit(inheritance.found, grown=inheritance.grown, fresh=inheritance.fresh)
    stream.begun = dict(state.get("begun") or stream.begun)
    stream.seek(state["cursor"])
    log = _open_log(run, engine, data, state["step"])
    loop = Loop(
        run=run,
        engine=engine,
        model=model,
        stream=stream,
        validation=validation,
        log=log,
        lineage=lineage,
        tell=event_handler or (lambda name, facts: None),
    )
    try:
        with stop_signals() as asked:
            code = loop.go(state["step"], asked)
        if loop.done:
            finish(run, engine, model, data, log)
    finally:
        if log:
            log.close()
    engine.close()
    return code


def _lineage(run: Run, model: Model, data: Data) -> Lineage:
    corpus = next(iter(data.corpora.values()))
    return Lineage(
        backbone=model.backbone.config,
        task_ids=run.recipe.task_ids,
        tokenizer=corpus.manifest.tokenizer["fingerprint"],
    )


def _open_log(run: Run, engine: Engine, data: Data, step: int) -> RunLog | None:
    """Rank 0's log; the run folder's other files are written with it."""
    if engine.rank:
        return None
    write_folder(run, engine.config, data)
    steps = run.recipe.plan.steps
    log = RunLog(run.folder, list(run.recipe.tasks), total_steps=steps, start=step)
    if step:
        log.event("resume", f"goes on from step {step}", step=step)
    return log


@dataclass
class Meter:
    """What happened since the last logged step. Sums stay on the device until they are read."""

    loss: dict[str, Any] = field(default_factory=dict)
    correct: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    flops: float = 0.0
    waited: float = 0.0
    steps: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, result: StepResult, flops: float, waited: float) -> None:
        for task, count in result.counts.items():
            self.loss[task] = self.loss.get(task, 0.0) + result.loss_sums[task]
            self.correct[task] = self.correct.get(task, 0) + result.correct[task]
            self.counts[task] = self.counts.get(task, 0) + count
        self.tokens += result.tokens
        self.flops += flops
        self.waited += waited
        self.steps += 1

    def read(self, engine: Engine) -> dict[str, Any]:
        """The record of a logged step; all processes take part."""
        seen = [task for task, count in self.counts.items() if count]
        sums = engine.reduce(
            {f"loss {t}": self.loss[t] for t in seen}
            | {f"right {t}": self.correct[t] for t in seen}
            | {"flops": self.flops, "waited": self.waited}
        )
        seconds = max(time.monotonic() - self.began, 1e-9)
        return {
            "loss": {t: sums[f"loss {t}"] / self.counts[t] for t in seen},
            "accuracy": {t: sums[f"right {t}"] / self.counts[t] for t in seen},
            "tokens_per_second": self.tokens / seconds,
            "flops_per_second": sums["flops"] / seconds,
            "data_wait": sums["waited"] / engine.world / seconds,
        }


@dataclass
class Loop:
    """The training loop of one process; rank 0 has the log."""

    run: Run
    engine: Engine
    model: Model
    stream: Stream
    validation: HeldOut
    log: RunLog | None
    lineage: Lineage
    tell: EventHandler
    done: bool = False
    scores: dict[str, Score] = field(default_factory=dict)
    _saved: int = -1

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe

    def go(self, first: int, asked: StopAsked) -> int:
        """From step `first` to the end of the plan, or until somebody asks to stop."""
        recipe, engine, plan = self.recipe, self.engine, self.recipe.plan
        weights_of = {name: task.weight for name, task in recipe.built_tasks.items()}
        self._event("begin", step=first)
        meter, skipped = Meter(), engine.skipped_steps
        batches_of = prefetched(
            self.stream, engine, range(first, plan.steps), self.run.machine.data_workers
        )
        for step in range(first, plan.steps):
            begun = time.monotonic()
            batches = next(batches_of)
            waited = time.monotonic() - begun
            if step == plan.stages[plan.stage_at(step)].first:
                self._event("stage", step=step, stage=plan.stage_at(step))
            lr = recipe.optimizer.lr * recipe.schedule.factor(step, plan)
            result = engine.step(batches, lr, step, weights_of, asked.now)
            meter.add(result, self._flops(batches), waited)
            self.tell("step", {"step": step + 1, "result": result, "lr": lr})
            last = step + 1 == plan.steps
            if (step + 1) % recipe.log.every == 0 or last or result.stop:
                self._log_step(step, lr, meter)
                now = engine.skipped_steps
                if self._bad(step, now - skipped, meter):
                    return self._nonfinite(step, asked)
                meter, skipped = Meter(), now
            if result.stop:
                self._save(step + 1)
                self._event("stopped", f"stopped on request; goes on from step {step + 1}")
                return 0
            paused = time.monotonic()
            self._after(step + 1)
            meter.began += time.monotonic() - paused  # not training time
        self.done = True
        return 0

    def _after(self, done: int) -> None:
        """Evaluation and checkpoint when they are due after so many steps."""
        plan, settings = self.recipe.plan, self.recipe
        stage_ends = any(done == stage.first + stage.steps for stage in plan.stages)
        every = settings.evaluate.every
        if self.validation.rows and (stage_ends or every and done % every == 0):
            self._evaluate(done)
        if done == plan.steps or (settings.save.every and done % settings.save.every == 0):
            self._save(done)

    def _flops(self, batches: list[Batch]) -> float:
        heads, config = self.model.heads, self.model.backbone.config
        words = [t for t, h in self.model.head_of.items() if isinstance(heads[h], MaskedWordHead)]
        return sum(training_flops(config, batch, words) for batch in batches)

    def _log_step(self, step: int, lr: float, meter: Meter) -> None:
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
        tasks = self.recipe.built_tasks
        self.scores = evaluate(self.engine, self.validation, tasks)
        records = {name: score.record() for name, score in self.scores.items()}
        stage = self.recipe.plan.stage_at(done - 1)
        if self.log:
            self.log.evaluation(done, records, stage=stage)
        self.tell("evaluation", {"step": done, "scores": self.scores})

    def _save(self, done: int) -> None:
        if self._saved == done:
            return
        state = {
            "step": done,
            "cursor": self.stream.cursor(done),
            "begun": self.stream.begun,
            "consumed": self.stream.consumed(done),
            "lineage": self.lineage.record(),
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

    def _bad(self, step: int, skipped: int, meter: Meter) -> bool:
        """Whether steps since the last logged one were skipped for a reason that matters: fp16's
        search for its loss scale skips steps as well, as long as it finds one."""
        if not skipped or self.recipe.nonfinite == "skip":
            return False
        searching = self.engine.machine.precision == "fp16" and skipped < meter.steps
        return not searching or self.engine.loss_scale <= 1

    def _nonfinite(self, step: int, asked: StopAsked) -> int:
        where = f"a loss or gradient was not finite within the {self.recipe.log.every} steps to "
        where += f"step {step + 1}; it was not applied"
        if self.recipe.nonfinite == "rollback":
            state = self.engine.load(self.run.checkpoints)
            if state is not None:
                back = f"{where}; back to the weights of step {state['step']}, on from {step + 2}"
                self._event("rollback", back, step=step + 1)
                return self.go(step + 1, asked)
        self._save(step + 1)
        self._event(
            "nonfinite",
            f"{where}. Stopped; the weights are good. Lower optimizer.lr, look at those steps' "
            "data, or set `nonfinite: skip`",
        )
        return STOPPED


def prefetched(stream: Stream, engine: Engine, steps: range, workers: int) -> Iterator[list[Batch]]:
    """This process's micro-batches of each step; `workers` processes make them ahead."""
    dataset = _StepBatches(stream, engine.rank, engine.world, engine.micro_rows)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        collate_fn=_as_it_is,
        pin_memory=False,
    )
    return iter(loader)


@dataclass
class _StepBatches(torch.utils.data.Dataset):
    stream: Stream
    rank: int
    world: int
    micro_rows: int

    def __getitem__(self, step: int) -> list[Batch]:
        return self.stream.batches(step, self.rank, self.world, self.micro_rows)


def _as_it_is(batches: list[Batch]) -> list[Batch]:
    return batches


@dataclass
class StopAsked:
    """Set by SIGTERM and Ctrl-C; read between steps."""

    now: bool = False


@contextmanager
def stop_signals() -> Iterator[StopAsked]:
    """SIGTERM and SIGINT ask the run to save and leave; a second Ctrl-C leaves at once."""
    asked = StopAsked()

    def ask(number: int, frame: Any) -> None:
        if asked.now and number == signal.SIGINT and time.monotonic() - first[0] > 2:
            raise KeyboardInterrupt
        first[0] = first[0] or time.monotonic()
        asked.now = True

    first = [0.0]
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(run: Run, engine: Engine, model: Model, data: Data, log: RunLog | None) -> None:
    """The weights, portable and for Hugging Face, and the report. All processes take part."""
    state = engine.full_state_dict()
    if log:
        export(run, model, state, data)
        log.event("end", f"weights: {run.folder / 'weights'}; Hugging Face: {run.folder / 'hf'}")
        for line in fill_mask.examples(run.folder / "hf", _some_source(data)):
            log.event("example", line)
        log.event("report", f"report: {write_report(run.folder)}")
    engine.processes.barrier()


def export(run: Run, model: Model, state: Mapping[str, torch.Tensor], data: Data) -> None:
    """weights/ and hf/ of the run folder; hf/ reads texts as the recipe's `export_task` did, or as
    the first task of masked words."""
    recipe, config = run.recipe, model.backbone.config
    words = [t for t, h in model.head_of.items() if isinstance(model.heads[h], MaskedWordHead)]
    info = weights.WeightsInfo(
        backbone=config,
        task_ids=recipe.task_ids,
        head_of=model.head_of,
        export_task=recipe.export_task or next(iter(words), ""),
        made_by={
            "palm_ds": __version__,
            "recipe": recipe.fingerprint,
            "steps": recipe.plan.steps,
        },
    )
    tokenizer = next(iter(data.corpora.values())).tokenizer()
    weights.save_weights(state, run.folder / "weights", info, tokenizer=tokenizer)
    weights.export_hf(
        state, run.folder / "hf", config=config, tokenizer=tokenizer, task_id=info.task_id
    )


def _some_source(data: Data) -> Source:
    """Held-out documents where there are some."""
    return next(
        source
        for side in (data.held_out, data.train)
        for corpora in side.values()
        for _, source, _ in corpora
        if len(source.documents)
    )
