"""Starting point of a run: its own checkpoint, the run it extends, `init_from`, or new weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.task import kind_of
from palm_ds.engine import Engine
from palm_ds.model.heads.splade import SpladeHead
from palm_ds.model.multi_task_model import Model
from palm_ds.pretrain.replaced_token_detection import ReplacedTokenDetection
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.processes.processes import Processes
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.setup.build import AnyStream, default_task, outputs_of, text_pooling
from palm_ds.train.setup.extend import ModelSignature, WarmStart, warm_start
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import Data, preparation_of
from palm_ds.weights import weights_folder
from palm_ds.weights.generator_weights import load_generator
from palm_ds.weights.model_folder import open_model
from palm_ds.weights.weights_folder import LoadReport

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Starting point of a run: its own last good checkpoint or the run that it extends. Neither if
    the model already has its weights (new, or from `init_from`)."""

    found: checkpoint.VerifiedCheckpoint | None = None
    warm_start: WarmStart | None = None

    @property
    def update_counts(self) -> dict[str, int] | None:
        """Updates that each parameter has had."""
        if self.found:
            return self.found.parameters
        return self.warm_start.update_counts if self.warm_start else None

    def started_before(self, head_of: Mapping[str, str]) -> frozenset[str]:
        """The tasks that the extended run has trained: those whose head it has (`head_of`)."""
        if self.found:
            return frozenset(self.found.state.get("started_before", ()))
        if not self.warm_start:
            return frozenset()
        new = {".".join(name.split(".")[:2]) for name in self.warm_start.new}
        return frozenset(task for task, head in head_of.items() if f"heads.{head}" not in new)

    def restore(self, engine: Engine, stream: AnyStream) -> int:
        """Restore engine and stream; returns the next step."""
        if self.found:
            engine.restore(self.found)
            why = "remove this folder to resume from an older one"
            _check_finite(engine, self.found.path, why)
            if self.found.layout != engine.layout:
                log.info("resumes with %s; saved with %s", engine.layout, self.found.layout)
            stream.already_read = dict(self.found.state["already_read"])
            stream.load_state_dict(self.found.state["cursor"])
            return self.found.state["step"]
        if old := self.warm_start:
            engine.warm_start(old.found, grown=old.grown, fresh=old.new)
            _check_finite(engine, old.found.path, "extend another run")
            stream.already_read = dict(old.consumed)
        return 0


def _check_finite(engine: Engine, path: Path, cure: str) -> None:
    """Raises UserError if restored weights are not finite. Collective."""
    if names := engine.nonfinite_weights():
        raise UserError(
            f"{path}: {names[0]} has values that are not finite (NaN or infinity); {cure}"
        )


def find_starting_point(
    run: RunSpec,
    model: Model,
    signature: ModelSignature,
    stream: AnyStream,
    data: Data,
    processes: Processes,
) -> StartingPoint:
    """The run's own last good checkpoint, else the run to extend, else `init_from` (whose weights
    are loaded here), else new weights."""
    recipe = run.recipe
    newest = checkpoint.latest_good(run.checkpoints, group=processes, warn=log.warning)
    if newest:
        return StartingPoint(found=newest)
    if recipe.extend:
        datasets = [dataset.name for dataset in stream.datasets]
        old = Path(recipe.extend)
        taken = warm_start(old, model, signature, datasets, group=processes, warn=log.warning)
        log.info("%s", "\n".join(taken.lines()))
        _start_heads(recipe, model, taken.new)
        return StartingPoint(warm_start=taken)
    if recipe.init_from:
        tasks = recipe.built_tasks.items()
        contents = data.start()
        for note in contents.all_notes:
            log.info("init_from: %s", note)
        loaded = weights_folder.load_weights(
            contents,
            model,
            labels={name: task.labels for name, task in tasks},
            new_heads=[name for name, task in tasks if task.new_head],
            layers=recipe.init_layers,
        )
        log.info("%s", "\n".join(loaded.lines()))
        _check_masked_lm(recipe, model, loaded)
    _start_heads(recipe, model, [name for name, _ in model.named_parameters()])
    return StartingPoint()


def _check_masked_lm(recipe: Recipe, model: Model, loaded: LoadReport) -> None:
    """Raises UserError for a task that reads the masked-LM head of `init_from` as a vector, if it
    has none."""
    for name, task in recipe.built_tasks.items():
        start = f"heads.{model.head_of[name]}."
        missing = any(each.startswith(start) for each in loaded.newly_initialized)
        reads = isinstance(model.heads[model.head_of[name]], SpladeHead)
        if reads and missing and not task.new_head:
            raise UserError(
                f"tasks.{name}: sparse vectors are read from the masked-LM head, which "
                f"{recipe.init_from} lacks; train one before (knowledge_masking, for example), or "
                "set `new_head: true` to start with a new one"
            )


def _start_heads(recipe: Recipe, model: Model, own: Collection[str]) -> None:
    """Start generators from the folders that the tasks name, and shift the biases of sparse
    vectors, of the heads whose parameters are this run's `own`: not taken from the run that it
    extends. Raises UserError."""
    for name, task in recipe.built_tasks.items():
        path = task.generator.path if isinstance(task, ReplacedTokenDetection) else ""
        new = any(parameter.startswith(f"heads.{name}.generator.") for parameter in own)
        if not path or task.share or not new:
            continue
        if recipe.extend and model.generators[name].sharing == "shared":
            raise UserError(
                f"tasks.{name}.generator.path: {path} has other embeddings than the run that is "
                "extended; set `embedding_sharing: none`, or begin a new generator without `path`"
            )
        try:
            contents = open_model(path)
            for note in contents.all_notes if path != recipe.init_from else ():
                log.info("tasks.%s.generator: %s", name, note)
            log.info("%s", load_generator(contents, model, name))
        except UserError as error:
            raise UserError(f"tasks.{name}.generator.path: {error}") from None
    for name, head in model.heads.items():
        if isinstance(head, SpladeHead) and f"heads.{name}.bias" in own:
            head.shift_bias()


def signature_of(run: RunSpec, model: Model, data: Data) -> ModelSignature:
    """Signature of the run's weights, for the runs that extend it."""
    ids, leaders = run.recipe.task_ids, run.recipe.curriculum_spec.leaders
    leading_last = sorted(ids, key=lambda task: leaders.get(task) == task)
    return ModelSignature(
        backbone=model.backbone.config,
        task_ids={task: ids[task] for task in leading_last},
        tokenizer=data.tokenizer.fingerprint,
        token_heads=weights_folder.token_heads_of(model),
        heads=outputs_of(run.recipe, model),
        optimizer=run.recipe.optimizer.kind,
        kinds={name: kind_of(type(task)) for name, task in run.recipe.built_tasks.items()},
        head_of=model.head_of,
        export_task=default_task(run.recipe, model),
        pooling=text_pooling(run.recipe),
        preparation=preparation_of(run.recipe, data),
        shapes={name: tuple(p.shape) for name, p in model.named_parameters()},
        lora_scale=run.recipe.lora.scale if run.recipe.lora else 0.0,
    )
