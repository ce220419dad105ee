"""The run folder: what it is a run of, and what a run leaves in it.

recipe.yaml and ds_config.json as resolved, environment.json, metrics.jsonl, TensorBoard events,
report.html, checkpoints/, weights/ (portable) and hf/ (opens with AutoModel).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from palm_ds import checkpoint
from palm_ds.assemble import Data, settle
from palm_ds.corpus.store import Corpus
from palm_ds.errors import UserError
from palm_ds.log import environment
from palm_ds.machine import Machine
from palm_ds.model import Model
from palm_ds.run import NOT_LEARNED, Recipe, differences, make_recipe, read_yaml
from palm_ds.stream import Stream


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is learned, how it is computed, where it is written."""

    recipe: Recipe
    machine: Machine
    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def check_folder(run: Run, data: Data) -> None:
    """A folder of another recipe or corpus is refused with the difference shown."""
    file = run.folder / "recipe.yaml"
    if not file.exists():
        if checkpoint.steps_in(run.checkpoints):
            raise UserError(f"{run.folder}: has checkpoints but no recipe.yaml; not a run folder")
        return
    changed = differences(_kept_before(file), _as_kept(run, data))
    if changed:
        more = f" (and {len(changed) - 4} more)" if len(changed) > 4 else ""
        raise UserError(
            f"{run.folder}: holds a run of a different recipe: {'; '.join(changed[:4])}{more}. "
            f"Choose another --run_dir, or restore the recipe"
        )


def _kept_before(file: Path) -> dict[str, Any]:
    """The recipe and corpora of a run folder, keys that came later with their defaults."""
    values = read_yaml(file)
    corpora = values.pop("corpora", {})
    try:
        values = make_recipe(values, str(file)).learned()
    except UserError:  # a task of another version, or one that is not here: compared as written
        values = {k: v for k, v in values.items() if k not in NOT_LEARNED}
    return values | {"corpora": corpora}


def _as_kept(run: Run, data: Data) -> dict[str, Any]:
    """What a run folder remembers of the recipe and the corpora."""
    prints = {folder: content_of(corpus) for folder, corpus in data.corpora.items()}
    return run.recipe.learned() | {"corpora": prints}


def content_of(corpus: Corpus) -> str:
    """A corpus's contents in a few letters, from the hashes in its manifest."""
    shards = {shard.name: corpus.manifest.files[shard.name] for shard in corpus.manifest.shards}
    text = json.dumps([shards, dict(corpus.manifest.tokenizer)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_folder(run: Run, config: Mapping[str, Any], data: Data) -> None:
    """recipe.yaml, ds_config.json and environment.json, as this run resolved them."""
    run.folder.mkdir(parents=True, exist_ok=True)
    kept = run.recipe.resolved() | _as_kept(run, data)
    text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    (run.folder / "recipe.yaml").write_text(text, encoding="utf-8")
    (run.folder / "ds_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (run.folder / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")


def overview(run: Run, stream: Stream, model: Model, world: int) -> str:
    """What is about to happen: the plan, the model, the epochs."""
    recipe = run.recipe
    parameters = sum(p.numel() for p in model.parameters())
    micro, accumulation = run.machine.split(recipe.rows, world)
    words = stream.plan.steps * recipe.rows * recipe.length
    items = ", ".join(f"{feed.name}: {len(feed.items):,}" for feed in stream.feeds)
    found = dict.fromkeys(feed.tasks[0].about(feed.source) for feed in stream.feeds)
    return "\n".join(
        [
            *filter(None, found),
            recipe.plan_table(),
            f"model: {parameters / 1e6:,.1f} M parameters; task ids {recipe.task_ids}",
            f"step: {recipe.rows} rows of {recipe.length}, {recipe.rows * recipe.length:,} tokens; "
            f"{world} x {accumulation} x {micro} rows (processes, accumulation, micro-batch)",
            f"all: {words:,} tokens; items of an epoch: {items}",
            f"ZeRO {run.machine.stage}, {run.machine.precision}; written to {run.folder}",
        ]
    )


def describe(run: Run) -> None:
    """Print the filled recipe, the plan and the DeepSpeed config."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    recipe = settle(run.recipe)
    print(yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True))
    print(recipe.plan_table())
    config = run.machine.deepspeed_config(rows=recipe.rows, world=world, clip=recipe.optimizer.clip)
    print(json.dumps(config, indent=1))
