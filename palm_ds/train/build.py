"""From a recipe to the things it names: corpora, stream, held-out rows, model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from palm_ds.common import rng as keyed
from palm_ds.common.errors import UserError
from palm_ds.corpus.ernie_dataset import open_ernie
from palm_ds.corpus.manifest import UNITS
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.data.blend_dataset import Feed, make_feeds
from palm_ds.data.budgets import Measure
from palm_ds.data.corpus_source import split
from palm_ds.data.example_stream import ExampleStream
from palm_ds.data.packed_stream import Stream
from palm_ds.data.reader import Table, open_table
from palm_ds.data.stages import tasks_of
from palm_ds.data.table_source import split_rows
from palm_ds.data.task import Task
from palm_ds.model.config import BackboneConfig
from palm_ds.model.encoder import build_backbone
from palm_ds.model.kernels import choose_kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.ds_config import Machine
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.text.tokens import SpecialTokens
from palm_ds.train.evaluate import HeldOut, held_out
from palm_ds.train.recipe import Recipe, SourceSettings
from palm_ds.weights import weights_folder as weights

log = logging.getLogger(__name__)

AnyStream: TypeAlias = Stream | ExampleStream
_FEW_ROWS = 20  # scores on fewer move by five points with a single row
_PLURAL = {"word": "words", "phrase": "phrases", "entity": "entities"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


Side: TypeAlias = Mapping[str, list[tuple[str, Any, float]]]
"""Of each source of a recipe: (corpus or table, Source or TableSource, weight)."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The opened corpora and tables of a recipe."""

    train: Side
    held_out: Side
    corpora: Mapping[str, Corpus]
    tables: Mapping[str, Table]
    tokenizer: Tokenizer

    @property
    def vocabulary(self) -> SpecialTokens:
        return self.tokenizer.vocabulary


@dataclass
class _Opening:
    """What was opened so far."""

    recipe: Recipe
    corpora: dict[str, Corpus] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    tokenizers: dict[str, Tokenizer] = field(default_factory=dict)
    """Of each corpus or table, by its name."""
    train: dict[str, list[tuple[str, Any, float]]] = field(default_factory=dict)
    held_out: dict[str, list[tuple[str, Any, float]]] = field(default_factory=dict)

    def corpus(self, name: str, source: SourceSettings) -> None:
        recipe = self.recipe
        readers = [task for task in recipe.built_tasks.values() if task.source == name]
        blended = [_tasks_beside(recipe, task.name) for task in readers]
        marks = sorted({mark for tasks in blended for task in tasks for mark in task.marks()})
        share = 0.0 if source.validation else recipe.held_out
        for folder, weight in source.weights.items():
            training, held = split(_opened(source, folder, self.corpora), share, marks)
            self.train.setdefault(name, []).append((folder, training, weight))
            self.held_out.setdefault(name, []).append((folder, held, weight))
        if folder := source.validation_folder:
            everything, _ = split(_opened(source, folder, self.corpora), 0.0, marks)
            self.held_out[name] = [(folder, everything, 1.0)]
        for folder in [*source.weights, *filter(None, [source.validation_folder])]:
            self.tokenizers[folder] = self.corpora[folder].tokenizer()

    def table(self, name: str, source: SourceSettings) -> None:
        tokenizer = self._tokenizer(name, source)
        share = 0.0 if source.validation else self.recipe.held_out
        training, held = split_rows(self._table(source.table, source), share, tokenizer, name)
        if source.validation:
            rows = self._table(source.validation, source)
            held, _ = split_rows(rows, 0.0, tokenizer, f"{name} (validation)")
        self.train[name], self.held_out[name] = [(name, training, 1.0)], [(name, held, 1.0)]
        self.tokenizers[f"sources.{name}"] = tokenizer

    def _tokenizer(self, name: str, source: SourceSettings) -> Tokenizer:
        """That of a table; the same object for the same vocabulary."""
        where = Path(source.tokenizer) if source.tokenizer else self._given_with_weights(name)
        known = {tokenizer.origin: tokenizer for tokenizer in self.tokenizers.values()}
        tokenizer = load_tokenizer(where)
        return known.get(tokenizer.origin, tokenizer)

    def _given_with_weights(self, name: str) -> Path:
        start = self.recipe.init_from
        found = weights.tokenizer_in(Path(start)) if start else None
        if found is None:
            why = f"{start} has none with it" if start else "there is no `init_from`"
            raise UserError(f"sources.{name}.tokenizer: missing, and {why}; name a vocabulary")
        return found

    def _table(self, paths: str | list[str], source: SourceSettings) -> Table:
        key = paths if isinstance(paths, str) else ", ".join(paths)
        if key not in self.tables:
            self.tables[key] = open_table(paths, source.read)
        return self.tables[key]


def open_data(recipe: Recipe) -> Data:
    """Every corpus and table of the recipe, opened and checked: one tokenizer, the columns its
    tasks read."""
    opening = _Opening(recipe)
    for name, source in recipe.sources.items():
        getattr(opening, source.reads)(name, source)
    prints = {t.fingerprint: name for name, t in opening.tokenizers.items()}
    if len(prints) > 1:
        first, second, *_ = prints.values()
        raise UserError(
            f"sources: {first} and {second} have different tokenizers; prepare corpora with the "
            f"same one (--tokenizer {first}/tokenizer), give tables the same `tokenizer`"
        )
    return Data(
        train=opening.train,
        held_out=opening.held_out,
        corpora=opening.corpora,
        tables=opening.tables,
        tokenizer=next(iter(opening.tokenizers.values())),
    )


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
    """The same recipe with nothing left to the data: its stages in steps of each blend, where they
    are written otherwise (tokens, sequences, epochs, a sampler), and its tasks with what they learn
    of their training rows (the names of their classes). Itself where nothing is open. Corpora and
    tables are opened where it takes them and `data` is not given."""
    reading = [task for task in recipe.built_tasks.values() if task.reads == "table"]
    outline = recipe.outline
    if outline.settled and not reading:
        return recipe
    measures = None
    if outline.needs_corpus or reading:
        data = data if data is not None else open_data(recipe)
        recipe = _with_settled_tasks(recipe, data)
    if outline.needs_corpus and data is not None:
        measures = measure(recipe, data)
    return replace(recipe, stages=outline.plan(recipe.step_tokens, measures).explicit())


def _with_settled_tasks(recipe: Recipe, data: Data) -> Recipe:
    values, settled = dict(recipe.tasks), dict(recipe.built_tasks)
    row = _usual_row(recipe)
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


def check_tables(recipe: Recipe, data: Data) -> None:
    """Raises UserError at the first row of a table that cannot be learned from or scored."""
    for task in recipe.built_tasks.values():
        if task.reads == "table":
            for side in (data.train, data.held_out):
                for _, source, _ in side[task.source]:
                    task.check(source, labelled=True)


def check_units(recipe: Recipe, data: Data) -> None:
    """Raises UserError for a unit that a task masks and its corpora lack."""
    for task in recipe.built_tasks.values():
        corpora = [source.corpus for _, source, _ in data.train[task.source]]
        for unit in task.required_units():
            if not any(corpus.count_units(unit) for corpus in corpora):
                where = ", ".join(str(corpus.path) for corpus in corpora)
                raise UserError(
                    f"tasks.{task.name}.units: {unit}, but {where} has none; remove it, or prepare "
                    f"the corpus again with a lexicon (--lexicon_{unit} FILE) or more text"
                )


def about_corpora(data: Data) -> list[str]:
    """A line for each corpus: how many units of each kind it has."""
    return [_about_corpus(corpus) for corpus in data.corpora.values()]


def _about_corpus(corpus: Corpus) -> str:
    known = [name for name in UNITS if name in corpus.marks]
    counts = [f"{corpus.count_units(name):,} {_PLURAL[name]}" for name in known]
    return f"{corpus.path}: {', '.join([f'{corpus.manifest.tokens:,} tokens', *counts])}"


def few_held_out(recipe: Recipe, data: Data) -> list[str]:
    """A line for each table of which so few rows are held out that their scores say little."""
    sizes = {
        name: (len(data.train[name][0][1]), len(data.held_out[name][0][1]))
        for name, settings in recipe.sources.items()
        if settings.table and not settings.validation and recipe.held_out
    }
    return [
        f"{name}: {held} of {held + training} rows are held out (held_out: {recipe.held_out:g}), "
        "too few to score on; give the source `validation`, or hold out more"
        for name, (training, held) in sizes.items()
        if held < _FEW_ROWS
    ]


def _usual_row(recipe: Recipe) -> int:
    """The row of the task embedding that texts of no pretraining task get."""
    if not recipe.init_from or not recipe.backbone_config.task_slots:
        return 0
    return weights.read_info(Path(recipe.init_from)).task_id


def measure(recipe: Recipe, data: Data) -> dict[str, Measure]:
    """What the training data hold for each blend; the same for every seed."""
    feeds, feeds_of = _feeds(recipe, recipe.outline.blends, data.train, seed=0)
    return {
        blend: _counted(recipe, blend, [feeds[number] for number, _ in mixture])
        if recipe.examples
        else _measure([(feeds[number], share) for number, share in mixture])
        for blend, mixture in feeds_of.items()
    }


def _counted(recipe: Recipe, blend: str, feeds: Sequence[Feed]) -> Measure:
    """Where a step is so many examples, it is what is counted in."""
    items, each = sum(len(feed.items) for feed in feeds), recipe.examples_of(blend)
    return Measure(tokens=Fraction(items, each), mean_length=Fraction(1, each))


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
    side: Side,
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
        segments=recipe.backbone_config.segments,
    )


def build_stream(
    recipe: Recipe, data: Data, room_for: Callable[[int], int] = lambda rows: rows
) -> AnyStream:
    """The training rows of a recipe. Where a step is so many examples, `room_for` makes of the rows
    of the largest step those that machine and processes divide."""
    feeds, feeds_of = _feeds(recipe, recipe.plan.blends, data.train, seed=recipe.seed)
    if recipe.examples:
        stream = ExampleStream(
            plan=recipe.plan,
            feeds=feeds,
            feeds_of=feeds_of,
            examples={blend: recipe.examples_of(blend) for blend in recipe.plan.blends},
            length=recipe.length,
            seed=recipe.seed,
            pad=data.vocabulary.pad,
        )
        stream.rows = room_for(stream.most_rows())
        return stream
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
    feeds = [feed for feed in feeds if len(feed.source)]
    for feed in feeds:
        _check_held_out(recipe, data, feed)
    return held_out(feeds, recipe.evaluate.examples, recipe.length, data.vocabulary.pad)


def _check_held_out(recipe: Recipe, data: Data, feed: Feed) -> None:
    """Raises UserError that names the share if too little is held out for a task to read."""
    name = feed.tasks[0].source
    try:
        assert len(feed.items)
    except UserError as error:
        if recipe.sources[name].validation:
            raise
        held = sum(len(source) for _, source, _ in data.held_out[name])
        count = held + sum(len(source) for _, source, _ in data.train[name])
        of = "rows" if recipe.sources[name].table else "documents"
        raise UserError(
            f"held_out: {recipe.held_out:g} of {count} {of} of sources.{name} holds out {held}, "
            f"too few to evaluate on ({error}); increase it, or give sources.{name}.validation"
        ) from None


def build_model(
    recipe: Recipe,
    machine: Machine,
    vocabulary: SpecialTokens,
    *,
    device: torch.device,
    level: int = logging.DEBUG,
) -> Model:
    """Backbone and heads with their first weights, each a function of (seed, its own name). The
    chosen kernels, and why they were chosen, are logged at `level`."""
    config = full_config(recipe.backbone_config, vocabulary)
    kernels, lines = choose_kernels(
        {**machine.kernels, **({"compile": "on"} if machine.compile else {})},
        device=device,
        dtype=_DTYPES[machine.precision],
        config=config,
    )
    for line in lines:
        log.log(level, "%s", line)
    torch.manual_seed(keyed.key(recipe.seed, "backbone") >> 1)
    backbone = build_backbone(config, kernels, recompute=machine.activation_checkpointing)
    heads: dict[str, nn.Module] = {}
    head_of = {name: task.share or name for name, task in recipe.built_tasks.items()}
    for name, task in recipe.built_tasks.items():
        if not task.share:
            torch.manual_seed(keyed.key(recipe.seed, "head", name) >> 1)
            heads[name] = task.head(backbone)
    return Model(backbone, heads, head_of)


def full_config(config: BackboneConfig, vocabulary: SpecialTokens) -> BackboneConfig:
    """With the vocabulary's size where the recipe leaves it open."""
    size = config.vocab_size or vocabulary.size
    if size < vocabulary.size:
        raise UserError(
            f"backbone.vocab_size: {size} rows, but the corpus's tokenizer has {vocabulary.size}"
        )
    return replace(config, vocab_size=size, pad=vocabulary.pad)
