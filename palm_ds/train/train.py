"""A training run from its recipe to its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from rich.console import Console

from palm_ds.common import errors
from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.engine import Engine, check_model, start, stop
from palm_ds.model.encoder.check_custom_encoder import check_custom_encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.model.lora import add_lora
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint.full_disk import may_pass
from palm_ds.runtime.device.memory import host_memory
from palm_ds.runtime.optimizer.optimizer import optimizer_class
from palm_ds.runtime.optimizer.param_groups import Selection
from palm_ds.runtime.processes.processes import Processes, check_supported
from palm_ds.runtime.processes.run_lock import RunLock
from palm_ds.runtime.processes.signals import StopFlag, stop_signals
from palm_ds.runtime.zero.swap_folder import check_swap_room
from palm_ds.train.evaluate.evaluate import HeldOutSet, TaskScore, evaluate
from palm_ds.train.export import (
    GENERATOR,
    FinalWeights,
    best_weights,
    check_export,
    check_family,
    export,
    write_onnx,
)
from palm_ds.train.loop.early_stopping import BestTracker, check_held_out
from palm_ds.train.loop.loop import EventHandler, Loop
from palm_ds.train.loop.profiler import ProfileSettings, attach_profiler
from palm_ds.train.plan.cluster import Cluster
from palm_ds.train.plan.table import stage_work
from palm_ds.train.plan.work import size_of, work_of
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.report.html_report import write_report
from palm_ds.train.report.run_log import RunLog
from palm_ds.train.setup import run_folder
from palm_ds.train.setup.build import (
    AnyStream,
    build_held_out,
    build_model,
    build_pairs,
    build_probe,
    build_stream,
)
from palm_ds.train.setup.corpus_check import CorpusCheck
from palm_ds.train.setup.extend import ModelSignature
from palm_ds.train.setup.limits import check_memory, check_space_together, choose_micro_batch
from palm_ds.train.setup.preflight import compare_hosts, findings
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.resume import StartingPoint, find_starting_point, signature_of
from palm_ds.train.setup.sources import Data, check_tables, check_units, open_data, preparation_of
from palm_ds.train.startup_notes import startup_notes
from palm_ds.train.teachers.distillation_plan import DistillationPlan, resolve_teachers
from palm_ds.train.teachers.teachers import attach_teachers, build_teachers

Examples: TypeAlias = Callable[[Path, CorpusSource], Iterable[str]]
"""(weights folder, held-out source) -> lines for the log at the end of a run, such as masked words
filled in."""
log = logging.getLogger(__name__)


def train(
    run: run_folder.RunSpec,
    event_handler: EventHandler | None = None,
    *,
    flag: StopFlag | None = None,
    dry_run: bool = False,
    plan_for: Sequence[Cluster] = (),
    examples: Examples | None = None,
    profile: ProfileSettings | None = None,
    console: Console | None = None,
) -> int:
    """Train a run to its end, from its last checkpoint if its folder has one.

    Returns the exit code (common/errors.py): 0 when the curriculum is finished, 75 when the run
    was asked to stop and has saved, 3 when a non-finite loss stopped it.

    `flag`: that of the program's own stop_signals; by default there is one while it trains.
    `dry_run`: check everything, train nothing; `plan_for`: then predict memory and step time there.

    `event_handler(name, facts)` is called on every process with begin, stage, next (before a step),
    step (after it), evaluation, save, and the events that end a run early."""
    more = {"plan_for": plan_for, "console": console, "examples": examples}
    opened = setup_run(run, event_handler, dry_run=dry_run, **more)
    if opened is None:
        stop()
        return 0
    attach_profiler(opened.loop, profile)
    try:
        with nullcontext(flag) if flag else stop_signals() as stopping:
            stopping.starting = False
            code = opened.run_to_end(stopping)
    finally:
        opened.leave_folder()
    opened.close()
    stop()
    return code


@dataclass
class TrainingRun:
    """A run ready to train: its data, its model on the engine, its next step."""

    run: run_folder.RunSpec
    data: Data
    model: Model
    loop: Loop
    next_step: int
    lock: RunLock
    examples: Examples | None = None

    def run_to_end(self, flag: StopFlag) -> int:
        """Train to the end and export; returns the exit code. All processes take part."""
        code = self.loop.run_steps(self.next_step, flag)
        if self.loop.done:
            self.finish()
        return code

    def finish(self) -> None:
        """Write the weights, for palm_ds and for Hugging Face, and the report; the graph comes
        last, when nothing depends on it. All processes take part."""
        engine, run_log = self.loop.engine, self.loop.log
        self._export(self.final_state())
        if run_log:
            encoder = self.model.backbone
            no_hf = f"none (no such encoder as {encoder.config.kind})"
            hf = self.run.folder / "hf" if encoder.hf else no_hf
            beside = (self.run.folder / GENERATOR, self.run.heads_folder)
            hf = ", ".join([str(hf), *(str(folder) for folder in beside if folder.is_dir())])
            run_log.event("end", f"weights: {self.run.folder / 'weights'}; Hugging Face: {hf}")
            for line in self._example_lines():
                run_log.event("example", line)
            run_log.forgetting(self.run.recipe.curriculum)
            try:
                run_log.event("report", f"report: {write_report(self.run.folder)}")
            except OSError as error:
                run_log.event("report", f"report: cannot be written: {error.strerror}")
            graph = write_onnx(self.run.folder / "hf", self.run.recipe) if encoder.hf else ()
            for line in graph:
                run_log.event("onnx", line)
        engine.processes.barrier()

    def final_state(self) -> Mapping[str, torch.Tensor]:
        """The averaged weights, or those of the last step without `optimizer.ema`, or if the
        averages are worse."""
        engine = self.loop.engine
        problem = self.loop.recovery.averages_problem()
        if not problem:
            with engine.ema_weights():
                return engine.full_state_dict()
        text = f"optimizer.ema: the averaged weights are not good: {problem}"
        text += "; the final weights are those of the last step"
        self.loop.recovery.event("averages", text)
        return engine.full_state_dict()

    def _export(self, state: Mapping[str, torch.Tensor]) -> None:
        """Write the final weights; waits for space if the disk is full. Raises TemporaryError if it
        stays so, UserError for another problem."""
        last = FinalWeights.of(state, self.run.recipe, self.loop.steps_done)
        known = self.loop.best.step >= 0  # best/ may be that of an earlier `evaluate.best`
        final = best_weights(self.run, last, self.loop.log) if known else last
        problem = self.loop.saver.write_at_rank0(
            lambda: export(self.run, self.model, final, self.data)
        )
        if problem:
            raise self._not_written(problem)

    def _not_written(self, problem: str) -> Exception:
        """The error, which says what there is instead. A full disk is no mistake: a restart, or the
        next start of a job, writes the weights once there is space."""
        saved = max(checkpoint.steps_in(self.run.checkpoints), default=0)
        complete = saved == self.loop.steps_done
        rest = (
            "the training is in checkpoints/, and the same command writes them"
            if complete
            else f"the last checkpoint is of step {saved}, and the same command continues from it"
        )
        text = f"{self.run.folder}: the final weights cannot be written: {problem}; {rest}"
        if not may_pass(problem):
            return UserError(text)
        stopped = complete and self.loop.saver.flag.stop_requested
        return TemporaryError(text, errors.STOPPED if stopped else errors.FAILED)

    def _example_lines(self) -> list[str]:
        """Example predictions on held-out documents, else on training documents; empty without a
        masked-word head or a corpus, and for an encoder that reads windows of documents."""
        if self.run.recipe.documents_read:
            return []
        heads = self.model.heads.values()
        has_head = any(type(head) is MaskedLMHead for head in heads)  # none that writes texts
        if self.examples is None or not has_head or not self.data.corpora:
            return []
        source: CorpusSource = next(
            source
            for side in (self.data.held_out, self.data.train)
            for opened in side.values()
            for _, source, _ in opened
            if isinstance(source, CorpusSource) and len(source)
        )
        folder = "hf" if self.model.backbone.hf else "weights"
        return list(self.examples(self.run.folder / folder, source))

    def leave_folder(self) -> None:
        """Close the log and let other runs use the folder; a checkpoint that is still being written
        is given up. May be called twice."""
        self.loop.engine.cancel_save()
        if self.loop.log:
            self.loop.log.close()
        self.lock.release()

    def close(self) -> None:
        """Release the folder and the engine; other engines of this process stay. Collective."""
        self.loop.saver.finish()
        self.loop.corpus_check.close()
        self.leave_folder()
        self.loop.engine.release()


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The parts of a run before its engine starts."""

    run: run_folder.RunSpec
    data: Data
    processes: Processes
    stream: AnyStream
    model: Model
    validation: HeldOutSet
    best: BestTracker
    plan: DistillationPlan
    changes: tuple[str, ...] = ()
    """Settings that differ from those of the run so far."""

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe

    @property
    def signature(self) -> ModelSignature:
        """Of the model as it is now: LoRA changes it."""
        return signature_of(self.run, self.model, self.data)

    @property
    def freezable(self) -> list[Selection]:
        """Parameters that some steps freeze."""
        return self.recipe.step_settings.freezable


def setup_run(
    run: run_folder.RunSpec,
    event_handler: EventHandler | None = None,
    *,
    dry_run: bool = False,
    plan_for: Sequence[Cluster] = (),
    console: Console | None = None,
    data: Data | None = None,
    examples: Examples | None = None,
) -> TrainingRun | None:
    """Open, check and build a run; returns None after a dry run. The log goes to `console`
    (default: the terminal, with a live display). `data`: the recipe's data if they are open."""
    _check_first(run, dry_run=dry_run)
    processes = start(run.ds_config)  # before anything that takes its time
    if not plan_for:  # a plan is for other machines, of whose devices and disks nobody knows here
        check_supported(run.ds_config, processes.device)
    data = data if data is not None else open_data(run.recipe)
    run = replace(run, recipe=resolve(run.recipe, data))
    plan = resolve_teachers(run.recipe, data)
    check_tables(run.recipe, data, taught=plan.soft_tasks)
    check_units(run.recipe, data)
    changes = run_folder.check_folder(run, data)
    parts = replace(_build_parts(run, data, plan, processes), changes=tuple(changes))
    run = parts.run
    compare_hosts(run, data, parts.processes)
    if not plan_for:
        check_space_together(run, parts.model, parts.processes, dry_run=dry_run)
    if dry_run:
        _starting_point(parts)
        return _end_dry_run(parts, plan_for)
    lock = run_folder.lock_folder(run, parts.processes)
    try:
        return _open_run(parts, lock, event_handler, console, examples)
    except BaseException:
        lock.release()
        raise


def _open_run(
    parts: _Parts,
    lock: RunLock,
    event_handler: EventHandler | None,
    console: Console | None,
    examples: Examples | None,
) -> TrainingRun:
    """The run on its engine, at its starting point."""
    run, data = parts.run, parts.data
    start_at = _starting_point(parts)
    if start_at.found:
        run_folder.wait_for_swap_room(run, parts.model, parts.processes)
    engine = _start_engine(parts, start_at)
    first = start_at.restore(engine, parts.stream)
    state = start_at.found.state if start_at.found else {}
    forgotten = parts.best.restore(state.get("best", {}))
    evaluated = state.get("evaluated", first) if start_at.found and not forgotten else -1
    loop = Loop(
        run=run,
        engine=engine,
        model=parts.model,
        stream=parts.stream,
        validation=parts.validation,
        log=_open_log(parts, engine, first, console),
        signature=parts.signature,
        on_event=event_handler or (lambda name, facts: None),
        best=parts.best,
        data=data,
        corpus_check=CorpusCheck(data.corpora, run.folder, engine.processes),
        evaluated=evaluated,
        ended_at=state.get("ended_at", 0),
        started_before=start_at.started_before(parts.model.head_of),
    )
    loop.recovery.restore(state.get("recovery", {}))
    if forgotten:
        loop.recovery.event("best forgotten", forgotten)
    return TrainingRun(run, data, parts.model, loop, first, lock, examples)


def _starting_point(parts: _Parts) -> StartingPoint:
    """Find where the run starts; log that and what it consists of."""
    run, data = parts.run, parts.data
    start = find_starting_point(
        run, parts.model, parts.signature, parts.stream, data, parts.processes
    )
    if run.recipe.lora:
        add_lora(parts.model, run.recipe.lora, seed=run.recipe.seed)
    log.info("%s", run_folder.overview(run, parts.stream, parts.model, parts.processes.world))
    for text in startup_notes(run, data, parts.plan, parts.processes):
        log.info("%s", text)
    return start


def _check_first(run: run_folder.RunSpec, *, dry_run: bool) -> None:
    """Check user-defined code and missing packages, before any data is opened."""
    check_export(run.recipe)
    optimizer_class(run.recipe.optimizer, zero_stage=run.ds_config.stage)
    if run.recipe.lora and run.recipe.lora.dora and run.ds_config.stage == 3:
        raise UserError(
            "lora.dora: needs whole matrices for their norms, which ZeRO 3 does not keep; use ZeRO "
            "0 to 2"
        )
    run_folder.prepare_swap_folder(run, dry_run=dry_run)
    partial = [n for n, task in run.recipe.built_tasks.items() if task.attends_partially]
    check_custom_encoder(run.recipe.backbone_config, partial)
    _ = run.recipe.own_metrics  # checks itself


def _build_parts(
    run: run_folder.RunSpec, data: Data, plan: DistillationPlan, processes: Processes
) -> _Parts:
    recipe = run.recipe
    check_memory(recipe, data.vocabulary.size, world=processes.world, memory=host_memory())
    validation = build_held_out(recipe, data)
    best = BestTracker(recipe.evaluate, recipe.built_tasks)
    scored = {task.name for dataset in validation.datasets for task in dataset.tasks}
    best.check(scored)
    check_held_out(recipe.save, scored)
    round_up_rows = partial(run.ds_config.round_up_rows, world=processes.world)
    stream = build_stream(recipe, data, round_up_rows, plan.soft_tasks)
    model = build_model(
        recipe,
        run.ds_config,
        data.vocabulary,
        device=processes.device,
        training=True,
        level=logging.INFO,
    )
    check_family(recipe, model.backbone)
    tokenizer = preparation_of(recipe, data).applied_to(data.tokenizer)
    validation = replace(
        validation,
        pairs=build_pairs(recipe, model, tokenizer),
        probe=build_probe(recipe, model, tokenizer),
    )
    attach_teachers(plan, model, seed=recipe.seed)
    size = dict(rows=stream.rows, length=recipe.stage_plan.longest)
    ds_config = choose_micro_batch(run.ds_config, model, processes, **size)
    for step_size in set(recipe.stage_plan.sizes) if recipe.rows else ():
        for rows in (*step_size.growth, step_size.rows):
            ds_config.micro_batching(rows, processes.world)  # checks itself
    return _Parts(
        run=replace(run, ds_config=ds_config),
        data=data,
        processes=processes,
        stream=stream,
        model=model,
        validation=validation,
        best=best,
        plan=plan,
    )


def _end_dry_run(parts: _Parts, plan_for: Sequence[Cluster]) -> None:
    """Check what otherwise fails in the first step, and predict what it takes."""
    stream, model = parts.stream, parts.model
    batches, rows = stream.largest_step()
    optimizer, ds_config = parts.recipe.optimizer, parts.run.ds_config
    scales, freezable = parts.recipe.head_lr_scales, parts.freezable
    check_model(model, optimizer, ds_config, lr_scales=scales, freezable=freezable)
    check_swap_room(ds_config, model, parts.processes)
    if "." in (best := parts.recipe.evaluate.best) and not parts.best.known_metrics:
        log.info("evaluate.best: whether %s exists is checked only when training starts", best)
    size = replace(size_of(model), teachers=parts.plan.sizes(ds_config.precision))
    work = work_of(model, batches, rows)
    stages = stage_work(stream, model) if plan_for else ()
    for line in findings(parts.run, parts.processes, size, work, plan_for, stages):
        log.info("%s", line)
    log.info("all checks passed; nothing was trained")


def _start_engine(parts: _Parts, start_at: StartingPoint) -> Engine:
    recipe = parts.recipe
    engine = Engine(
        parts.model,
        ds_config=parts.run.ds_config,
        optimizer=recipe.optimizer,
        rows=parts.stream.rows,
        seed=recipe.seed,
        update_counts=start_at.update_counts,
        lr_scales=recipe.head_lr_scales,
        freezable=parts.freezable,
        teacher=build_teachers(parts.plan, parts.model, parts.run, parts.data, parts.processes),
    )
    if parts.best.enabled and not start_at.found:
        _check_best(parts, engine)
    return engine


def _check_best(parts: _Parts, engine: Engine) -> None:
    """Raises UserError for an unknown metric, or tasks that have none, now and not after an epoch.
    Some are not defined on a few rows, such as the AUC of one class; so all rows are looked at
    before one is refused. Collective."""
    recipe, best, held_out = parts.recipe, parts.best, parts.validation

    def check(rows: int) -> None:
        scores: dict[str, TaskScore] = {}
        for name in best.compared:
            some = held_out.first_rows_of(name, rows)
            found = evaluate(engine, some, recipe.built_tasks, recipe.own_metrics)
            scores |= {task: score for task, score in found.items() if task == name}
        best.check_scores(scores)

    try:
        check(engine.world)
    except UserError:
        check(len(held_out.rows))


def _open_log(parts: _Parts, engine: Engine, step: int, console: Console | None) -> RunLog | None:
    """Rank 0's log; the other files of the run folder are written with it. Collective."""
    run = parts.run
    run_folder.write_folder_together(run, engine, parts.data)
    if engine.rank:
        return None
    tasks, steps = list(run.recipe.tasks), run.recipe.curriculum.steps
    more = {"track": run.recipe.track, "config": run.recipe.resolved()}
    run_log = RunLog(run.folder, tasks, total_steps=steps, start=step, console=console, **more)
    if step:
        run_log.event("resume", f"resumes from step {step}", step=step)
    if parts.changes:
        text = run_folder.record_changes(run.folder, step, parts.changes)
        run_log.event("changed", text, step=step, changes=list(parts.changes))
    return run_log
