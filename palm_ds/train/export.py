"""What a finished run leaves: weights/ for palm_ds and hf/ for Hugging Face.

A Hugging Face folder holds one head: that of the only task over a table, if transformers has a
class for it (`Task.hf_export` names it). A run of several tasks exports the encoder alone;
`palm-ds convert --head NAME` writes any one head.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from safetensors.torch import load_file

from palm_ds import __version__
from palm_ds.model.heads import MaskedLMHead
from palm_ds.model.multi_task_model import Model
from palm_ds.text.exported_tokenizer import normalizing_tokenizer
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.train.recipe import Recipe
from palm_ds.train.report.run_log import RunLog
from palm_ds.train.run_folder import RunSpec
from palm_ds.train.sources import Data
from palm_ds.weights import weights_folder
from palm_ds.weights.formats.contents import HeadOutputs
from palm_ds.weights.formats.huggingface.model_card import Provenance
from palm_ds.weights.formats.huggingface.target import ExportedHead
from palm_ds.weights.formats.native import WEIGHTS
from palm_ds.weights.formats.weights_info import WeightsInfo

log = logging.getLogger(__name__)

_HEAD_PARAMETERS = {"out.weight", "out.bias"}  # the parameters of a head that transformers has too


def head_taken(recipe: Recipe, parameters: Collection[str]) -> ExportedHead | None:
    """The head of the recipe's only task over a table, not counting auxiliary tasks and those that
    mask words. None if there are several, or if transformers has no such head. `parameters`: the
    parameter names of the model."""
    tasks = recipe.built_tasks.values()
    tasks = [x for x in tasks if x.reads == "table" and not (x.auxiliary or x.edits_text)]
    head = tasks[0].hf_export() if len(tasks) == 1 else None
    if head is None:
        return None
    prefix = f"heads.{head.name}."
    parts = {x.removeprefix(prefix) for x in parameters if x.startswith(prefix)}
    return (
        replace(head, task_id=recipe.task_ids[tasks[0].name]) if parts == _HEAD_PARAMETERS else None
    )


def outputs_of(recipe: Recipe, model: Model) -> dict[str, HeadOutputs]:
    """{head: the meaning of its scores}, as given by the task that owns it."""
    tasks = recipe.built_tasks
    return {name: tasks[name].head_outputs() for name in model.heads if name in tasks}


def info_of(recipe: Recipe, model: Model, *, steps: int) -> WeightsInfo:
    """The description of a run's weights after `steps` steps, for weights.json."""
    words = [t for t, h in model.head_of.items() if isinstance(model.heads[h], MaskedLMHead)]
    return WeightsInfo(
        backbone=model.backbone.config,
        task_ids=recipe.task_ids,
        head_of=model.head_of,
        export_task=recipe.export_task or next(iter(words or recipe.task_ids), ""),
        token_heads=weights_folder.token_heads_of(model),
        heads=outputs_of(recipe, model),
        made_by={"palm_ds": __version__, "recipe": recipe.fingerprint, "steps": steps},
        recipe=recipe.resolved(),
    )


def final_weights(
    run: RunSpec, state: Mapping[str, torch.Tensor], log: RunLog
) -> tuple[Mapping[str, torch.Tensor], int]:
    """The weights that a run ends with and their step: the best ones with `evaluate.best`."""
    best = run.recipe.evaluate.best
    if not best or not run.best.exists():
        return state, run.recipe.curriculum.steps
    steps = weights_folder.read_info(run.best).made_by["steps"]
    log.event("chosen", f"final weights: step {steps:,}, the best by {best}", of_step=steps)
    return load_file(run.best / WEIGHTS), steps


def exported_tokenizer(recipe: Recipe, data: Data) -> Tokenizer:
    """The tokenizer of hf/, which simplifies and lower-cases as the run's sources did before they
    were tokenized. A step that only some of them had is left out, with a line."""
    tokenizer = data.tokenizer
    texts = [corpus.manifest.options.get("text", {}) for corpus in data.corpora.values()]
    tables = [source.read for source in recipe.sources.values() if source.table]
    simplified = [bool(x.get("simplify")) for x in texts] + [x.simplify for x in tables]
    lowered = [tokenizer.lower or bool(x.get("lower")) for x in texts]
    lowered += [tokenizer.lower for _ in tables]
    for done, what in ((simplified, "simplified"), (lowered, "lower-cased")):
        if any(done) and not all(done):
            log.info("hf/: only some sources were %s; its tokenizer does not do it", what)
    return normalizing_tokenizer(tokenizer, simplify=all(simplified), lower=all(lowered))


def export(
    run: RunSpec, model: Model, state: Mapping[str, torch.Tensor], data: Data, steps: int
) -> None:
    """Write weights/ and hf/ of the run folder. hf/ uses the task embedding of the recipe's
    `export_task` (default: the first masked-word task). A user-defined encoder has no hf/."""
    recipe, config = run.recipe, model.backbone.config
    info = info_of(recipe, model, steps=steps)
    tokenizer = data.tokenizer
    weights_folder.save_weights(state, run.folder / "weights", info, tokenizer=tokenizer)
    if config.kind:
        return
    weights_folder.export_hf(
        state,
        run.folder / "hf",
        config=config,
        tokenizer=exported_tokenizer(recipe, data),
        task_id=info.task_id,
        token_heads=info.token_heads,
        outputs=info.heads,
        head=head_taken(recipe, state),
        made=Provenance(
            source=f"a run of {steps:,} steps by recipe {recipe.fingerprint}",
            program=f"palm_ds {__version__}",
        ),
    )
