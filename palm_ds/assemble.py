"""From a recipe to the things it names: corpora, stream, held-out rows, model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch
from torch import nn

from palm_ds import keyed
from palm_ds.backbone import Backbone
from palm_ds.backbone_config import BackboneConfig
from palm_ds.budget import Measure
from palm_ds.corpus.ernie_lines import open_ernie
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.errors import UserError
from palm_ds.evaluate import HeldOut, held_out
from palm_ds.example import Vocabulary
from palm_ds.feed import Feed, make_feeds
from palm_ds.kernels import choose_kernels
from palm_ds.machine import Machine
from palm_ds.model import Model
from palm_ds.plan import tasks_of
from palm_ds.run import Recipe, SourceSettings
from palm_ds.source import Source, split
from palm_ds.stream import Stream
from palm_ds.task import Task

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Data:
    """The opened corpora of a recipe."""

    train: Mapping[str, list[tuple[str, Source, float]]]
    held_out: Mapping[str, list[tuple[str, Source, float]]]
    corpora: Mapping[str, Corpus]

    @property
    def vocabulary(self) -> Vocabulary:
        return next(iter(self.corpora.values())).vocabulary


def open_data(recipe: Recipe) -> Data:
    """Every corpus of the recipe, opened and checked: one tokenizer, the columns its tasks read."""
    corpora: dict[str, Corpus] = {}
    train_sources: dict[str, list[tuple[str, Source, float]]] = {}
    held_sources: dict[str, list[tuple[str, Source, float]]] = {}
    for name, source in recipe.sources.items():
        readers = [task for task in recipe.built_tasks.values() if task.source == name]
        blended = [_tasks_beside(recipe, task.name) for task in readers]
        marks = sorted({mark for tasks in blended for task in tasks for mark in task.marks()})
        share = 0.0 if source.validation else recipe.held_out
        for folder, weight in source.weights.items():
            training, held = split(_opened(source, folder, corpora), share, marks)
            train_sources.setdefault(name, []).append((folder, training, weight))
            held_sources.setdefault(name, []).append((folder, held, weight))
        if folder := source.validation_folder:
            everything, _ = split(_opened(source, folder, corpora), 0.0, marks)
            held_sources[name] = [(folder, everything, 1.0)]
    prints = {c.manifest.tokenizer["fingerprint"]: folder for folder, c in corpora.items()}
    if len(prints) > 1:
        first, second, *_ = prints.values()
        raise UserError(
            f"sources: {first} and {second} were prepared with different tokenizers; "
            f"prepare them with the same one (--tokenizer {first}/tokenizer)"
        )
    return Data(train=train_sources, held_out=held_sources, corpora=corpora)


def _opened(source: SourceSettings, folder: str, corpora: dict[str, Corpus]) -> Corpus:
    """The corpus of a folder, opened once; made first of ERNIE's files."""
    if folder not in corpora:
        if source.ernie:
            files = Path(folder.removesuffix(".corpus"))
            corpora[folder] = open_ernie(files, Path(source.tokenizer), Path(folder))
        else:
            corpora[folder] = open_corpus(folder)
    return corpora[folder]


def _tasks_beside(recipe: Recipe, name: str) -> list[Task]:
    """The tasks that label the texts of a task: those it stands in a blend with."""
    together = {name}
    for blend in recipe.outline.blends:
        names = tasks_of(blend)
        if name in names:
            together |= set(names)
    return [recipe.built_tasks[other] for other in together]


def settle(recipe: Recipe, data: Data | None = None) -> Recipe:
    """The same recipe with its stages in steps of each blend, where they are written otherwise
    (tokens, sequences, a sampler); itself where they are not. Corpora are opened where it takes
    them and `data` is not given."""
    outline = recipe.outline
    if outline.settled:
        return recipe
    measures = None
    if outline.needs_corpus:
        measures = measure(recipe, data if data is not None else open_data(recipe))
    return replace(recipe, stages=outline.plan(recipe.step_tokens, measures).explicit())


def measure(recipe: Recipe, data: Data) -> dict[str, Measure]:
    """What the training documents hold for each blend; the same for every seed."""
    feeds, feeds_of = _feeds(recipe, recipe.outline.blends, data.train, seed=0)
    return {
        blend: _measure([(feeds[number], share) for number, share in mixture])
        for blend, mixture in feeds_of.items()
    }


def _measure(mixture: Sequence[tuple[Feed, float]]) -> Measure:
    """Of feeds and their shares of the tokens."""
    taken = [(feed, share, feed.mean_tokens) for feed, share in mixture]
    return Measure(
        tokens=float(sum(len(feed.items) * each for feed, _, each in taken)),
        mean_length=float(1 / sum(Fraction(share) / each for _, share, each in taken)),
    )


def _feeds(
    recipe: Recipe,
    blends: Sequence[str],
    side: Mapping[str, list[tuple[str, Source, float]]],
    *,
    seed: int,
    fixed: bool = False,
) -> tuple[list[Feed], dict[str, list[tuple[int, float]]]]:
    """The feeds of blends over a recipe's training or its held-out documents."""
    return make_feeds(
        blends,
        recipe.built_tasks,
        recipe.task_ids,
        side,
        seed=seed,
        length=recipe.length,
        fixed=fixed,
    )


def build_stream(recipe: Recipe, data: Data) -> Stream:
    """The training rows of a recipe."""
    feeds, feeds_of = _feeds(recipe, recipe.plan.blends, data.train, seed=recipe.seed)
    return Stream(
        plan=recipe.plan,
        feeds=feeds,
        feeds_of=feeds_of,
        rows=recipe.rows,
        length=recipe.length,
        seed=recipe.seed,
        pad=data.vocabulary.pad,
    )


def build_held_out(recipe: Recipe, data: Data) -> HeldOut:
    """The held-out rows of a recipe; the same for every seed of one recipe's tasks."""
    feeds, _ = _feeds(recipe, recipe.plan.blends, data.held_out, seed=0, fixed=True)
    feeds = [feed for feed in feeds if len(feed.source.documents)]
    return held_out(feeds, recipe.evaluate.examples, recipe.length, data.vocabulary.pad)


def build_model(
    recipe: Recipe,
    machine: Machine,
    vocabulary: Vocabulary,
    *,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
) -> Model:
    """Backbone and heads with their first weights, each a function of (seed, its own name); `say`
    is told which form of each kernel was chosen, and why."""
    config = full_config(recipe.backbone_config, vocabulary)
    kernels, lines = choose_kernels(
        {**machine.kernels, **({"compile": "on"} if machine.compile else {})},
        device=device,
        dtype=_DTYPES[machine.precision],
        config=config,
    )
    for line in lines:
        say(line)
    torch.manual_seed(keyed.key(recipe.seed, "backbone") >> 1)
    backbone = Backbone(config, kernels, recompute=machine.activation_checkpointing)
    heads: dict[str, nn.Module] = {}
    head_of = {name: task.share or name for name, task in recipe.built_tasks.items()}
    for name, task in recipe.built_tasks.items():
        if not task.share:
            torch.manual_seed(keyed.key(recipe.seed, "head", name) >> 1)
            heads[name] = task.head(backbone)
    return Model(backbone, heads, head_of)


def full_config(config: BackboneConfig, vocabulary: Vocabulary) -> BackboneConfig:
    """With the vocabulary's size where the recipe leaves it open."""
    size = config.vocab_size or vocabulary.size
    if size < vocabulary.size:
        raise UserError(
            f"backbone.vocab_size: {size} rows, but the corpus's tokenizer has {vocabulary.size}"
        )
    return replace(config, vocab_size=size, pad=vocabulary.pad)
