"""A run from its recipe to its weights: what it starts from, the loop, what it leaves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file

from palm_ds import __version__
from palm_ds.data.corpus_source import Source
from palm_ds.engine import Engine, start, stop
from palm_ds.inference import fill_mask
from palm_ds.model.check_custom_encoder import try_backbone
from palm_ds.model.heads import MaskedWordHead
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime import checkpoint
from palm_ds.runtime.optimizer import Resting, freeze, optimizer_class
from palm_ds.runtime.processes import Processes
from palm_ds.train.build import (
    AnyStream,
    Data,
    about_corpora,
    build_held_out,
    build_model,
    build_stream,
    check_tables,
    check_units,
    few_held_out,
    open_data,
    settle,
)
from palm_ds.train.early_stopping import Best
from palm_ds.train.evaluate import evaluate
from palm_ds.train.extend import Inheritance, Lineage, inherit
from palm_ds.train.hf_head import head_taken
from palm_ds.train.loop import EventHandler, Loop, StopAsked, stop_signals
from palm_ds.train.recipe import Recipe
from palm_ds.train.report.html_report import write_report
from palm_ds.train.report.run_log import RunLog
from palm_ds.train.run_folder import Run, check_folder, overview, write_folder
from palm_ds.weights import weights_folder as weights
from palm_ds.weights.formats.huggingface.model_card import Made
from palm_ds.weights.formats.native import WEIGHTS

log = logging.getLogger(__name__)


def train(run: Run, event_handler: EventHandler | None = None, *, dry_run: bool = False) -> int:
    """Train a run to its end, or from where its folder says it stopped. The exit code: 0 when the
    plan is done or the run was asked to stop, 3 when a non-finite loss stopped it.

    `event_handler(name, facts)` is called, on every process, with begin, stage, next (a step
    begins), step (it is done), evaluation and save, and what a run that ends early ends with."""
    opened = open_run(run, event_handler, dry_run=dry_run)
    if opened is None:
        stop()
        return 0
    try:
        with stop_signals() as asked:
            code = opened.go(asked)
    finally:
        opened.close_log()
    opened.close()
    stop()
    return code


@dataclass
class Opened:
    """A run that stands ready: its data, its model on the engine, its next step."""

    run: Run
    data: Data
    model: Model
    loop: Loop
    first: int
    """The step that is next."""

    def go(self, asked: StopAsked) -> int:
        """From there to the end, with what a run leaves; the exit code. All processes take
        part."""
        code = self.loop.go(self.first, asked)
        if self.loop.done:
            finish(self.run, self.loop.engine, self.model, self.data, self.loop.log)
        return code

    def close_log(self) -> None:
        if self.loop.log:
            self.loop.log.close()

    def close(self) -> None:
        """Let go of the log and the engine; other engines of this process stay."""
        self.close_log()
        self.loop.engine.release()


def open_run(
    run: Run,
    event_handler: EventHandler | None = None,
    *,
    dry_run: bool = False,
    console: Console | None = None,
    data: Data | None = None,
) -> Opened | None:
    """Everything of a run opened and checked; None of a dry run, which ends there. What is logged
    is shown on `console` (default: the terminal, with a live display). `data` of the recipe may
    have been opened before. Classes of one's own are tried first."""
    optimizer_class(run.recipe.optimizer, zero_stage=run.machine.stage)
    try_backbone(run.recipe.backbone_config)
    data = data if data is not None else open_data(run.recipe)
    run = replace(run, recipe=settle(run.recipe, data))
    recipe = run.recipe
    check_tables(recipe, data)
    check_units(recipe, data)
    check_folder(run, data)
    validation = build_held_out(recipe, data)
    best = Best(recipe.evaluate, recipe.built_tasks)
    best.check({task.name for feed in validation.feeds for task in feed.tasks})
    processes = start(run.machine)
    stream = build_stream(recipe, data, partial(run.machine.room_for, world=processes.world))
    model = build_model(
        recipe, run.machine, data.vocabulary, device=processes.device, level=logging.INFO
    )
    lineage = _lineage(run, model, data)
    origin = find_origin(run, model, lineage, stream, processes)
    log.info("%s", overview(run, stream, model, processes.world))
    for text in [*about_corpora(data), *few_held_out(recipe, data)]:
        log.info("%s", text)
    apart = [pattern for task in recipe.built_tasks.values() for pattern in task.freeze]
    if dry_run:
        stream.batches(0, 0, 1, stream.rows)
        freeze(model, recipe.optimizer.freeze)
        Resting(apart, [name for name, _ in model.named_parameters()])
        if best.named:
            log.info("evaluate.best: step 1 shows whether %s exists", recipe.evaluate.best)
        log.info("dry run: everything fits together; nothing was trained")
        return None
    engine = Engine(
        model,
        machine=run.machine,
        optimizer=recipe.optimizer,
        rows=stream.rows,
        seed=recipe.seed,
        steps=origin.ages,
        factors=_head_rates(recipe),
        apart=apart,
    )
    if best.named and not origin.found:  # not to be told after an epoch
        few = evaluate(engine, validation.some(best.named, engine.world), recipe.built_tasks)
        if best.named in few:
            best.metric(few[best.named])
    first = origin.enter(engine, stream)
    best.restore(origin.found.state.get("best", {}) if origin.found else {})
    loop = Loop(
        run=run,
        engine=engine,
        model=model,
        stream=stream,
        validation=validation,
        log=_open_log(run, engine, data, first, console),
        lineage=lineage,
        tell=event_handler or (lambda name, facts: None),
        best=best,
        tokenizer=data.tokenizer,
        evaluated=origin.found.state.get("evaluated", first) if origin.found else -1,
    )
    return Opened(run=run, data=data, model=model, loop=loop, first=first)


def _head_rates(recipe: Recipe) -> dict[str, float]:
    """{pattern of a head's parameters: factor of the learning rate} of tasks with one of their
    own."""
    return {
        f"heads.{name}.*": task.head_lr / recipe.optimizer.lr
        for name, task in recipe.built_tasks.items()
        if task.head_lr
    }


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run starts from: its own last good checkpoint, else the run it extends; neither where
    the model has its weights already (from scratch, or of `init_from`)."""

    found: checkpoint.Found | None = None
    inheritance: Inheritance | None = None

    @property
    def ages(self) -> dict[str, int] | None:
        """How many updates each parameter has had."""
        if self.found:
            return self.found.parameters
        return self.inheritance.steps if self.inheritance else None

    def enter(self, engine: Engine, stream: AnyStream) -> int:
        """Put engine and stream there; the step that is next."""
        if self.found:
            engine.restore(self.found)
            if self.found.layout != engine.layout:
                log.info("resumes with %s; saved with %s", engine.layout, self.found.layout)
            stream.begun = dict(self.found.state["begun"])
            stream.seek(self.found.state["cursor"])
            return self.found.state["step"]
        if old := self.inheritance:
            engine.inherit(old.found, grown=old.grown, fresh=old.fresh)
            stream.begun = dict(old.consumed)
        return 0


def find_origin(
    run: Run,
    model: Model,
    lineage: Lineage,
    stream: AnyStream,
    processes: Processes,
) -> Origin:
    """Own last good checkpoint, else the run to extend, else `init_from`, else scratch."""
    recipe = run.recipe
    found = checkpoint.find(run.checkpoints, group=processes, warn=log.warning)
    if found:
        return Origin(found=found)
    if recipe.extend:
        feeds = [feed.name for feed in stream.feeds]
        old = Path(recipe.extend)
        taken = inherit(old, model, lineage, feeds, group=processes, warn=log.warning)
        log.info("%s", "\n".join(taken.lines()))
        return Origin(inheritance=taken)
    if recipe.init_from:
        log.info("%s", "\n".join(weights.load_weights(Path(recipe.init_from), model).lines()))
    return Origin()


def _lineage(run: Run, model: Model, data: Data) -> Lineage:
    own = model.backbone.config.kind
    return Lineage(
        backbone=model.backbone.config,
        task_ids=run.recipe.task_ids,
        tokenizer=data.tokenizer.fingerprint,
        token_heads=weights.token_heads_of(model),
        optimizer=run.recipe.optimizer.kind,
        shapes={n: tuple(p.shape) for n, p in model.named_parameters()} if own else {},
    )


def _open_log(
    run: Run, engine: Engine, data: Data, step: int, console: Console | None
) -> RunLog | None:
    """Rank 0's log; the run folder's other files are written with it."""
    if engine.rank:
        return None
    write_folder(run, engine.config, data)
    steps = run.recipe.plan.steps
    tasks = list(run.recipe.tasks)
    log = RunLog(run.folder, tasks, total_steps=steps, start=step, console=console)
    if step:
        log.event("resume", f"goes on from step {step}", step=step)
    return log


def finish(run: Run, engine: Engine, model: Model, data: Data, log: RunLog | None) -> None:
    """The weights, portable and for Hugging Face, and the report. All processes take part."""
    with engine.averaged():
        state = engine.full_state_dict()
    if log:
        steps, best = run.recipe.plan.steps, run.recipe.evaluate.best
        if best and run.best.exists():
            state, steps = (
                load_file(run.best / WEIGHTS),
                weights.read_info(run.best).made_by["steps"],
            )
            said = f"the weights are those of step {steps:,}, the best by {best}"
            log.event("chosen", said, of_step=steps)
        export(run, model, state, data, steps)
        kind = model.backbone.config.kind
        theirs = f"none, it has no encoder like {kind}" if kind else run.folder / "hf"
        log.event("end", f"weights: {run.folder / 'weights'}; Hugging Face: {theirs}")
        for line in _fill_mask_examples(run, model, data):
            log.event("example", line)
        log.forgetting(run.recipe.plan)
        log.event("report", f"report: {write_report(run.folder)}")
    engine.processes.barrier()


def export(
    run: Run, model: Model, state: Mapping[str, torch.Tensor], data: Data, steps: int
) -> None:
    """weights/ and hf/ of the run folder, after so many steps; hf/ reads texts as the recipe's
    `export_task` did, or as the first task of masked words. An encoder of one's own has no hf/."""
    recipe, config = run.recipe, model.backbone.config
    info = weights.info_of(recipe, model, steps=steps)
    tokenizer = data.tokenizer
    weights.save_weights(state, run.folder / "weights", info, tokenizer=tokenizer)
    if config.kind:
        return
    weights.export_hf(
        state,
        run.folder / "hf",
        config=config,
        tokenizer=tokenizer,
        task_id=info.task_id,
        token_heads=info.token_heads,
        head=head_taken(recipe, state),
        made=Made(
            source=f"a run of {steps:,} steps by recipe {recipe.fingerprint}",
            program=f"palm_ds {__version__}",
        ),
    )


def _fill_mask_examples(run: Run, model: Model, data: Data) -> list[str]:
    """Of held-out documents where there are some; none where no words or no documents are read."""
    words = any(isinstance(head, MaskedWordHead) for head in model.heads.values())
    if not words or not data.corpora:
        return []
    source: Source = next(
        source
        for side in (data.held_out, data.train)
        for opened in side.values()
        for _, source, _ in opened
        if isinstance(source, Source) and len(source)
    )
    folder = "weights" if model.backbone.config.kind else "hf"
    return list(fill_mask.examples(run.folder / folder, source))
