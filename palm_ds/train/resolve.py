"""Fills in what depends on the data: stage lengths in steps, class names from the training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

from palm_ds.data.blend_dataset import Feed
from palm_ds.data.budgets import Measure
from palm_ds.train.recipe import Recipe
from palm_ds.train.sources import Data, datasets_of, open_data
from palm_ds.weights import weights_folder as weights


def resolve(recipe: Recipe, data: Data | None = None) -> Recipe:
    """Fill in everything that depends on the data: convert stage lengths (tokens, sequences,
    epochs, a sampler) to steps of each blend, and infer the class names of tasks from their
    training rows. Returns the recipe unchanged if nothing is open. `data`: the recipe's data if
    they are open already; otherwise they are opened if needed."""
    reading = [task for task in recipe.built_tasks.values() if task.reads == "table"]
    outline = recipe.outline
    if outline.settled and not reading:
        return recipe
    measures = None
    if outline.needs_corpus or reading:
        data = data if data is not None else open_data(recipe)
        recipe = _with_resolved_tasks(recipe, data)
    if outline.needs_corpus and data is not None:
        measures = measure(recipe, data)
    return replace(recipe, stages=outline.plan(recipe.step_tokens, measures).explicit())


def _with_resolved_tasks(recipe: Recipe, data: Data) -> Recipe:
    values, settled = dict(recipe.tasks), dict(recipe.built_tasks)
    row = _default_task_row(recipe)
    for name in sorted(settled, key=lambda name: bool(settled[name].share)):  # heads' owners first
        task = settled[name]
        if task.reads == "corpus":
            continue
        if task.share:
            task = task.like(settled[task.share])
        for _, source, _ in data.train[task.source]:
            task = task.settled(source)
        if task.task_id < 0:
            task = replace(task, task_id=row)
        settled[name] = task
        fields = {k: v for k, v in asdict(task).items() if k != "name"}
        values[name] = {"kind": recipe.tasks[name].get("kind", name)} | fields
    return replace(recipe, tasks=values)


def _default_task_row(recipe: Recipe) -> int:
    """The row of the task embedding for texts of fine-tuning tasks: that of `export_task`."""
    if not recipe.init_from or not recipe.backbone_config.task_types:
        return 0
    return weights.read_info(Path(recipe.init_from)).task_id


def measure(recipe: Recipe, data: Data) -> dict[str, Measure]:
    """The size of the training data of each blend; independent of the seed."""
    feeds, feeds_of = datasets_of(recipe, recipe.outline.blends, data.train, seed=0)
    return {
        blend: _counted(recipe, blend, [feeds[number] for number, _ in mixture])
        if recipe.examples
        else _measure([(feeds[number], share) for number, share in mixture])
        for blend, mixture in feeds_of.items()
    }


def _counted(recipe: Recipe, blend: str, feeds: Sequence[Feed]) -> Measure:
    """With a batch in examples, sizes are counted in steps."""
    items, each = sum(len(feed.items) for feed in feeds), recipe.examples_of(blend)
    return Measure(tokens=Fraction(items, each), mean_length=Fraction(1, each))


def _measure(mixture: Sequence[tuple[Feed, float]]) -> Measure:
    """The size of a mixture of datasets, each with its share of the tokens."""
    taken = [(feed, share, feed.mean_tokens) for feed, share in mixture]
    return Measure(
        tokens=float(sum(len(feed.items) * each for feed, _, each in taken)),
        mean_length=float(1 / sum(Fraction(share) / each for _, share, each in taken)),
    )
