"""Folders that a run leaves: weights/ for palm_ds, also the best ones so far; hf/ for Hugging Face,
with onnx/ in it; generator/ beside it, of a run that detects the tokens it replaces.

A Hugging Face folder holds one head: that of the only task over a table, if transformers has a
class for it (`Task.hf_export` names it). A run of several tasks exports the encoder alone, with the
pooling of a task that trains vectors of texts (`Task.text_pooling`). `export_heads` writes a folder
for each head next to it, `palm-ds convert --head NAME` for any one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.common.version import __version__
from palm_ds.data.sources.row_inputs import dataset_names_in
from palm_ds.data.tasks.task import TableTask
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.distillation.distillation import without_projections
from palm_ds.model.encoder.encoder import Encoder, with_rope_bases
from palm_ds.model.encoder.shared_embeddings import merged_tables
from palm_ds.model.heads.outputs import ExportedHead
from palm_ds.model.lora import adapter_of, merged
from palm_ds.model.multi_task_model import Model
from palm_ds.model.pooling import SPLADE
from palm_ds.runtime.checkpoint.full_disk import may_pass
from palm_ds.text.exported_tokenizer import only_here, text_tokenizer
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.report.metrics_file import FILE, read_metrics
from palm_ds.train.report.run_log import RunLog
from palm_ds.train.setup.build import default_task, outputs_of, pooling_taken, text_pooling
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import Data, preparation_of, preparations
from palm_ds.weights import weights_folder
from palm_ds.weights.convert.source import read_documents
from palm_ds.weights.convert.to_onnx import check_installed
from palm_ds.weights.convert.try_onnx import AddedOnnx, try_onnx, why_no_onnx
from palm_ds.weights.download.downloader import hub_name_of
from palm_ds.weights.formats.huggingface.families import has_class, served_family
from palm_ds.weights.formats.huggingface.model_card import Provenance
from palm_ds.weights.formats.huggingface.target import family_to_write
from palm_ds.weights.formats.native import ADAPTER, WEIGHTS
from palm_ds.weights.formats.onnx.description import FOLDER as ONNX
from palm_ds.weights.formats.weights_info import INFO, WeightsInfo, damaged_files, read_info
from palm_ds.weights.generator_weights import generator_state, why_no_folder
from palm_ds.weights.peft_adapter import FOLDER, has_adapter, write_adapter

log = logging.getLogger(__name__)

GENERATOR = "generator"
"""The folder of a generator, beside hf/, which has the discriminator."""
_HEAD_PARAMETERS = {"out.weight", "out.bias"}  # the parameters of a head that transformers has too


def head_taken(recipe: Recipe, parameters: Collection[str]) -> ExportedHead | None:
    """The head of the recipe's only task over a table, not counting auxiliary tasks and those that
    mask words. None if there are several, or if transformers has no such head. `parameters`: the
    parameter names of the model."""
    names = _tasks_with_heads(recipe)
    return _exported_head(recipe, names[0], parameters) if len(names) == 1 else None


def _tasks_with_heads(recipe: Recipe) -> list[str]:
    tasks = recipe.built_tasks.items()
    return [name for name, t in tasks if t.reads == "table" and not (t.auxiliary or t.edits_text)]


def _exported_head(recipe: Recipe, task: str, parameters: Collection[str]) -> ExportedHead | None:
    """The head of a task, or None if transformers has no such head."""
    head = recipe.built_tasks[task].hf_export()
    if head is None or not has_class(recipe.backbone_config, head.outputs.head_class):
        return None
    prefix = f"heads.{head.name}."
    parts = {name.removeprefix(prefix) for name in parameters if name.startswith(prefix)}
    return replace(head, task_id=recipe.task_ids[task]) if parts == _HEAD_PARAMETERS else None


def info_of(recipe: Recipe, model: Model, *, steps: int) -> WeightsInfo:
    """The description of a run's weights after `steps` steps, for weights.json."""
    bases = recipe.stage_plan.rope_bases(steps)
    return WeightsInfo(
        backbone=with_rope_bases(model.backbone.config, bases),
        task_ids=recipe.task_ids,
        head_of=model.head_of,
        export_task=default_task(recipe, model),
        token_heads=weights_folder.token_heads_of(model),
        heads=outputs_of(recipe, model),
        made_by={"palm_ds": __version__, "recipe": recipe.fingerprint, "steps": steps},
        recipe=recipe.resolved(),
    )


@dataclass(frozen=True, kw_only=True)
class FinalWeights:
    """The weights that a run ends with, and the step that they are from."""

    state: Mapping[str, torch.Tensor]
    """Those of the model; with `lora`, merged."""
    adapter: Mapping[str, torch.Tensor]
    """LoRA's own; empty without it."""
    steps: int

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor], recipe: Recipe, steps: int) -> FinalWeights:
        """From the engine's weights after the last of `steps` steps."""
        adapter = adapter_of(state) if recipe.lora else {}
        whole = without_projections(merged(state, recipe.lora))
        return cls(state=whole, adapter=adapter, steps=steps)


def best_weights(run: RunSpec, last: FinalWeights, log: RunLog | None) -> FinalWeights:
    """The best weights with `evaluate.best`, else the last ones, also if those in best/ are damaged
    or deleted. Only rank 0 has a log. Raises TemporaryError if they cannot be read now."""
    best = run.recipe.evaluate.best
    if log is None or not best:
        return last
    try:
        info = read_info(run.best / INFO)
        if damaged := damaged_files(run.best, info):
            raise UserError(damaged[0])
    except UserError as error:
        if may_pass(str(error)):  # they are not lost: a restart reads them
            raise TemporaryError(f"{error}; the same command tries again") from None
        text = f"the best weights by {best} are lost: {error}; the final weights are those of step "
        log.event("best lost", f"{text}{last.steps:,}, the last")
        return last
    steps = info.made_by["steps"]
    log.event("chosen", f"final weights: step {steps:,}, the best by {best}", of_step=steps)
    adapter = load_file(run.best / ADAPTER) if run.recipe.lora else {}
    return FinalWeights(state=load_file(run.best / WEIGHTS), adapter=adapter, steps=steps)


def write_best(
    run: RunSpec, model: Model, state: Mapping[str, torch.Tensor], data: Data, steps: int
) -> None:
    """Write best/ from the engine's weights after the last of `steps` steps."""
    best = FinalWeights.of(state, run.recipe, steps)
    write_weights(run.best, run.recipe, model, best, data, keep_adapter=True)


def exported_tokenizer(recipe: Recipe, data: Data) -> Tokenizer:
    """The tokenizer of hf/, which simplifies and lower-cases as the run's sources did before they
    were tokenized. A step that only some of them had is left out, with a line."""
    made = preparation_of(recipe, data).applied_to(data.tokenizer)
    for note in only_here(made):
        log.info("hf/: %s", note)
    each = preparations(recipe, data)
    for done, what in (
        ([one.simplify for one in each], "simplified"),
        ([one.lower for one in each], "lower-cased"),
    ):
        if any(done) and not all(done):
            log.info("hf/: only some sources were %s; its tokenizer does not do it", what)
    return made


def write_weights(
    folder: Path,
    recipe: Recipe,
    model: Model,
    final: FinalWeights,
    data: Data,
    *,
    keep_adapter: bool = False,
) -> WeightsInfo:
    """Write a portable folder with all that is needed to read it. `keep_adapter`: also LoRA's own
    weights."""
    info = info_of(recipe, model, steps=final.steps)
    weights_folder.save_weights(
        final.state,
        folder,
        info,
        tokenizer=data.tokenizer,
        text_tokenizer=text_tokenizer(data.tokenizer, preparation_of(recipe, data)),
        pooling=text_pooling(recipe),
        adapter=final.adapter if keep_adapter else None,
    )
    return info


def export(run: RunSpec, model: Model, final: FinalWeights, data: Data) -> None:
    """Write weights/ and hf/ of the run folder, with `lora` also adapter/, which belongs to hf/. An
    encoder that Hugging Face does not have has neither of these two."""
    recipe, state, steps = run.recipe, final.state, final.steps
    info = write_weights(run.folder / "weights", recipe, model, final, data)
    if not model.backbone.hf:
        return
    scores = held_out_scores(run.folder, steps)
    head = head_taken(recipe, state)
    if head and head.outputs.averaged and not pooling_taken(recipe):
        log.info(
            "hf/: the head reads the means of tokens, as a CrossEncoder of sentence-transformers "
            "can; no class of transformers does (`pooling: pooler` trains a head for them)"
        )
    write_hf(run.folder / "hf", recipe, info, state, data, steps=steps, scores=scores)
    _write_generator(run.folder / GENERATOR, recipe, info, model, final, data)
    _write_heads(run.heads_folder, recipe, info, final, data, scores)
    if recipe.lora and not has_adapter(info.backbone, recipe.lora):
        log.info(
            "adapter/: none for %s: its matrices are others in transformers", info.backbone.kind
        )
    elif recipe.lora:
        hf, base = run.folder / "hf", recipe.init_from
        write_adapter(run.folder / FOLDER, final.adapter, recipe.lora, hf, base=base)


def _write_generator(
    folder: Path,
    recipe: Recipe,
    info: WeightsInfo,
    model: Model,
    final: FinalWeights,
    data: Data,
) -> None:
    """Write the generator of a run with replaced tokens as a Hugging Face folder."""
    for name, generator in model.generators.items():
        if not generator.written:
            continue
        if why := why_no_folder(generator):
            log.info("%s/: none: %s; weights/ keeps the generator", GENERATOR, why)
            continue
        config = replace(generator.encoder.config, vocab_size=info.backbone.vocab_size)
        config = with_rope_bases(config, recipe.stage_plan.rope_bases(final.steps))
        weights_folder.export_hf(
            generator_state(merged_tables(final.state), generator, name),
            folder,
            config=config,
            tokenizer=exported_tokenizer(recipe, data),
            family=_family(config, recipe),
            task_id=info.task_ids[name] if config.task_types else 0,
            made=_provenance(recipe, final.steps, {}),
        )


def _write_heads(
    folder: Path,
    recipe: Recipe,
    info: WeightsInfo,
    final: FinalWeights,
    data: Data,
    scores: Mapping[str, Mapping[str, float]],
) -> None:
    """Write a Hugging Face folder for each task with a head, as `export_heads` asks for."""
    for name in _tasks_with_heads(recipe) if recipe.export_heads else ():
        head = _exported_head(recipe, name, final.state)
        if head is None:
            log.info("export_heads: %s: transformers has no such head; weights/ keeps it", name)
            continue
        write_hf(
            folder / name,
            recipe,
            info,
            final.state,
            data,
            steps=final.steps,
            scores={task: metrics for task, metrics in scores.items() if task == name},
            head=head,
        )


def write_hf(
    folder: Path,
    recipe: Recipe,
    info: WeightsInfo,
    state: Mapping[str, torch.Tensor],
    data: Data,
    *,
    steps: int,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    head: ExportedHead | None = None,
) -> None:
    """Write a model after `steps` steps as a Hugging Face folder, with `head` or else that of the
    only task over a table. It uses the task embedding of the exported head's task, or else that of
    `export_task` (default: the task that trains vectors of texts, or the first masked-word
    task)."""
    taken = None if head else pooling_taken(recipe)
    sparse = taken is not None and taken[1].pooling == SPLADE
    weights_folder.export_hf(
        state,
        folder,
        config=info.backbone,
        tokenizer=exported_tokenizer(recipe, data),
        family=_family(info.backbone, recipe),
        task_id=info.task_id,
        task_ids={info.head_of[task]: row for task, row in info.task_ids.items()},
        token_heads=info.token_heads,
        outputs=info.heads,
        head=None if taken else head or head_taken(recipe, state),
        pooling=taken[1] if taken else None,
        words=info.head_of[taken[0]] if taken and sparse else "",
        made=_provenance(recipe, steps, scores or {}),
    )


def check_export(recipe: Recipe) -> None:
    """Raises UserError if a package that the export needs is missing."""
    if recipe.export_onnx:
        check_installed("export_onnx")


def check_family(recipe: Recipe, encoder: Encoder) -> None:
    """Raises UserError if an encoder of an architecture that Hugging Face has cannot be written as
    it, as its paddings and positions are others."""
    if encoder.hf:
        try:
            family_to_write(encoder.config, _family(encoder.config, recipe))
        except UserError as error:
            raise UserError(f"backbone: hf/ could not be written after the run: {error}") from None


def write_onnx(folder: Path, recipe: Recipe) -> Iterator[str]:
    """Write onnx/ into a Hugging Face folder, as the recipe says. Yields a line with the time it
    will take, then lines about its files, or one about why there are none: that costs a run nothing
    else."""
    if recipe.export_onnx == ():
        return
    if why := why_no_onnx(folder, recipe.export_onnx):
        added = AddedOnnx(why=why)
    else:
        seconds = _seconds_for_onnx(folder, recipe.backbone_config.num_layers)
        skip = "" if recipe.export_onnx else "; `export_onnx: []` leaves it out"
        yield f"writing {folder / ONNX}, which takes about {seconds:.0f} s{skip}"
        added = try_onnx(folder, recipe.export_onnx)
    if added.why and recipe.export_onnx:
        log.warning("export_onnx: nothing was written: %s", added.why)
    else:
        yield from added.lines(folder)


def _seconds_for_onnx(folder: Path, layers: int) -> float:
    """Measured on a CPU core: 7 with one small layer, 13 with 6 of 384, 30 with 12 of 768."""
    return 6 + layers + sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 40e6


def _family(config: EncoderConfig, recipe: Recipe) -> str:
    """The family to write; empty if the encoder decides."""
    keeps = not config.task_types or recipe.export_family == "ernie"
    return "" if keeps else served_family(config)


def _provenance(
    recipe: Recipe, steps: int, scores: Mapping[str, Mapping[str, float]]
) -> Provenance:
    tables = [task for task in recipe.built_tasks.values() if isinstance(task, TableTask)]
    start = Path(recipe.init_from) if recipe.init_from else None
    return Provenance(
        source=f"a run of {steps:,} steps by recipe {recipe.fingerprint}",
        program=f"palm_ds {__version__}",
        license=read_documents(start).license if start and start.exists() else "",
        datasets=tuple(sorted({*recipe.datasets, *dataset_names_in(_paths(recipe))})),
        base_model=hub_name_of(start) if start else "",
        tasks={name: task["kind"] for name, task in recipe.resolved()["tasks"].items()},
        scores=scores,
        scored_at=steps,
        pairs=any(len(task.texts) > 1 or task.pair_roles for task in tables),
    )


def _paths(recipe: Recipe) -> Iterator[str]:
    """The files and folders that it trains on."""
    for source in recipe.sources.values():
        tables = [source.table] if isinstance(source.table, str) else source.table
        if not source.reader:
            yield from tables if source.table else source.weights


def held_out_scores(folder: Path, steps: int) -> dict[str, dict[str, float]]:
    """{task: {measure: score}} of the evaluation of a run after `steps` steps: the task's metrics,
    or else loss and accuracy. Empty if there was none."""
    file = folder / FILE
    evaluations = read_metrics(file, steps=False).evaluations if file.is_file() else []
    evaluation = next((record for record in reversed(evaluations) if record["step"] == steps), {})
    scores = {task: _measures(score) for task, score in (evaluation.get("scores") or {}).items()}
    return {task: values for task, values in scores.items() if values}


def _measures(score: Mapping[str, Any]) -> dict[str, float]:
    plain = {name: score.get(name) for name in ("loss", "accuracy")}
    values = score.get("metrics") or plain
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
