"""A run from its recipe to its weights: what it starts from, the loop, what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from palm_ds import __version__, checkpoint, fill_mask, weights
from palm_ds.assemble import Data, build_held_out, build_model, build_stream, open_data, settle
from palm_ds.engine import Engine, start, stop, warn_on_stderr
from palm_ds.extend import Inheritance, Lineage, inherit
from palm_ds.folder import Run, check_folder, overview, write_folder
from palm_ds.formats.model_card import Made
from palm_ds.heads import MaskedWordHead
from palm_ds.log import RunLog
from palm_ds.loop import EventHandler, Loop, stop_signals
from palm_ds.model import Model
from palm_ds.processes import Processes
from palm_ds.report import write_report
from palm_ds.source import Source
from palm_ds.stream import Stream


def train(run: Run, event_handler: EventHandler | None = None, *, dry_run: bool = False) -> int:
    """Train a run to its end, or from where its folder says it stopped. The exit code: 0 when the
    plan is done or the run was asked to stop, 3 when a non-finite loss stopped it.

    `event_handler(name, facts)` is called, on every process, with begin, stage, step, evaluation,
    save and end."""
    data = open_data(run.recipe)
    run = replace(run, recipe=settle(run.recipe, data))
    recipe = run.recipe
    check_folder(run, data)
    stream, validation = build_stream(recipe, data), build_held_out(recipe, data)
    processes = start(run.machine)

    def say(text: str) -> None:
        if processes.rank == 0:
            print(text, flush=True)

    model = build_model(recipe, run.machine, data.vocabulary, device=processes.device, say=say)
    lineage = _lineage(run, model, data)
    origin = find_origin(run, model, lineage, stream, processes, say)
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
        steps=origin.ages,
    )
    first = origin.enter(engine, stream, say)
    log = _open_log(run, engine, data, first)
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
            code = loop.go(first, asked)
        if loop.done:
            finish(run, engine, model, data, log)
    finally:
        if log:
            log.close()
    engine.close()
    return code


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

    def enter(self, engine: Engine, stream: Stream, say: Callable[[str], None]) -> int:
        """Put engine and stream there; the step that is next."""
        if self.found:
            engine.restore(self.found)
            if self.found.layout != engine.layout:
                say(f"goes on with {engine.layout}; saved with {self.found.layout}")
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
    stream: Stream,
    processes: Processes,
    say: Callable[[str], None],
) -> Origin:
    """Own last good checkpoint, else the run to extend, else `init_from`, else scratch."""
    recipe = run.recipe
    found = checkpoint.find(run.checkpoints, group=processes, warn=warn_on_stderr)
    if found:
        return Origin(found=found)
    if recipe.extend:
        feeds = [feed.name for feed in stream.feeds]
        old = Path(recipe.extend)
        taken = inherit(old, model, lineage, feeds, group=processes, warn=warn_on_stderr)
        say("\n".join(taken.lines()))
        return Origin(inheritance=taken)
    if recipe.init_from:
        say("\n".join(weights.load_weights(Path(recipe.init_from), model).lines()))
    return Origin()


def _lineage(run: Run, model: Model, data: Data) -> Lineage:
    corpus = next(iter(data.corpora.values()))
    return Lineage(
        backbone=model.backbone.config,
        task_ids=run.recipe.task_ids,
        tokenizer=corpus.manifest.tokenizer["fingerprint"],
        token_heads=weights.token_heads_of(model),
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


def finish(run: Run, engine: Engine, model: Model, data: Data, log: RunLog | None) -> None:
    """The weights, portable and for Hugging Face, and the report. All processes take part."""
    state = engine.full_state_dict()
    if log:
        export(run, model, state, data)
        log.event("end", f"weights: {run.folder / 'weights'}; Hugging Face: {run.folder / 'hf'}")
        for line in fill_mask.examples(run.folder / "hf", _some_source(data)):
            log.event("example", line)
        log.forgetting(run.recipe.plan)
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
        token_heads=weights.token_heads_of(model),
        made_by={
            "palm_ds": __version__,
            "recipe": recipe.fingerprint,
            "steps": recipe.plan.steps,
        },
    )
    tokenizer = next(iter(data.corpora.values())).tokenizer()
    weights.save_weights(state, run.folder / "weights", info, tokenizer=tokenizer)
    weights.export_hf(
        state,
        run.folder / "hf",
        config=config,
        tokenizer=tokenizer,
        task_id=info.task_id,
        token_heads=info.token_heads,
        made=Made(
            source=f"a run of {recipe.plan.steps:,} steps by recipe {recipe.fingerprint}",
            program=f"palm_ds {__version__}",
        ),
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
