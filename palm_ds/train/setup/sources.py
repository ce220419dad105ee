"""The corpora, tables and teachers of a recipe, opened and checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from palm_ds.common.errors import UserError, suggest_path
from palm_ds.common.files import sha256_of_file
from palm_ds.corpus.ernie_dataset import open_ernie
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.data.reader import Table, TableSettings, open_table
from palm_ds.data.sources.corpus import split_corpus
from palm_ds.data.sources.endless_rows import EndlessRows
from palm_ds.data.sources.folds import FoldSettings, deal_folds
from palm_ds.data.sources.row_inputs import TUPLE_ROLES
from palm_ds.data.sources.source import held_out_draw
from palm_ds.data.sources.table import TableSource, split_rows
from palm_ds.data.stream.stages import tasks_of
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset, make_datasets
from palm_ds.data.stream.windows import LONGEST, DocumentDataset, DocumentWindows
from palm_ds.data.tasks.soft_labels import SoftTasks
from palm_ds.data.tasks.task import CorpusTask, TableTask, Task
from palm_ds.data.tasks.task_with_data import NamedRows
from palm_ds.model.distillation.settings import TeacherSettings
from palm_ds.model.encoder.encoder import memory_shape
from palm_ds.tasks.ranking import Ranking
from palm_ds.tasks.shared.retrieval_task import RetrievalTask
from palm_ds.tasks.shared.text_task import PositiveClassTask
from palm_ds.text.exported_tokenizer import TextPreparation
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.text.tokens import SpecialTokens
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.recipe.sections import SourceSettings, sampling_weights
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.model_folder import fingerprint_of, open_model

Side: TypeAlias = Mapping[str, list[tuple[str, Any, float]]]
"""{name of a source: its parts, each (folder or name, Source or TableSource, weight)}."""

OpenStart: TypeAlias = Callable[[], CheckpointContents]


@dataclass(frozen=True, kw_only=True)
class Data:
    """The opened corpora and tables of a recipe."""

    train: Side
    held_out: Side
    evaluation_sets: Mapping[str, Side]
    """{name of a further evaluation set: the sources that have one}"""
    corpora: Mapping[str, Corpus]
    tables: Mapping[str, Table]
    tokenizer: Tokenizer
    start: OpenStart
    """Opens the weights of `init_from`, once."""
    teachers: Mapping[str, str] = field(default_factory=dict)
    """{path of a teacher: a short hash of its files}"""
    teacher_models: Mapping[str, CheckpointContents] = field(default_factory=dict)
    """{name of a teacher model: its opened weights}"""

    @property
    def vocabulary(self) -> SpecialTokens:
        return self.tokenizer.vocabulary


@dataclass
class _Opening:
    """Opens the sources of a recipe one by one; each corpus or table is opened once."""

    recipe: Recipe
    start: OpenStart
    in_memory: Mapping[str, NamedRows] = field(default_factory=dict)
    corpora: dict[str, Corpus] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    readings: dict[str, TableSettings] = field(default_factory=dict)
    """How each of `tables` was read."""
    tokenizers: dict[str, Tokenizer] = field(default_factory=dict)
    """By corpus folder or `sources.NAME`."""
    train: dict[str, list[tuple[str, Any, float]]] = field(default_factory=dict)
    held_out: dict[str, list[tuple[str, Any, float]]] = field(default_factory=dict)
    evaluation_sets: dict[str, dict[str, list[tuple[str, Any, float]]]] = field(
        default_factory=dict
    )

    def corpus(self, name: str, source: SourceSettings) -> None:
        recipe = self.recipe
        readers = [task for task in recipe.built_tasks.values() if task.source == name]
        grouped = [task for reader in readers for task in _tasks_on_same_texts(recipe, reader.name)]
        annotations = sorted(
            {x for task in grouped if isinstance(task, CorpusTask) for x in task.annotations()}
        )
        share = 0.0 if source.validation else recipe.held_out
        tokens = {
            folder: _opened(source, folder, self.corpora).manifest.tokens
            for folder in source.weights
        }
        weights = sampling_weights(source.weights, tokens, source.sampling_exponent)
        for folder, weight in weights.items():
            training, held = split_corpus(self.corpora[folder], share, annotations)
            self.train.setdefault(name, []).append((folder, training, weight))
            self.held_out.setdefault(name, []).append((folder, held, weight))
        if folder := source.validation_folder:
            everything, _ = split_corpus(_opened(source, folder, self.corpora), 0.0, annotations)
            self.held_out[name] = [(folder, everything, 1.0)]
        for folder in [*source.weights, *filter(None, [source.validation_folder])]:
            self.tokenizers[folder] = self.corpora[folder].tokenizer()

    def table(self, name: str, source: SourceSettings) -> None:
        tokenizer = self._tokenizer(name, source)
        share = 0.0 if source.validation or source.folds else self.recipe.held_out
        where = f"sources.{name}"
        if source.reader:
            training, held = self._endless(name, source, tokenizer)
        else:
            rows = self._table(source.table, source.read, where)
            training, held = split_rows(rows, 0.0, tokenizer, name)
            if share:
                group = self._group_of(name, training)
                training, held = split_rows(rows, share, tokenizer, name, group)
        if source.folds:
            training, held = self._folded(name, training, source.folds)
        if source.validation:
            rows = self._table(source.validation, source.read, f"{where}.validation")
            held, _ = split_rows(rows, 0.0, tokenizer, f"{name} (validation)")
        held = self._sampled(name, held)
        self.train[name], self.held_out[name] = [(name, training, 1.0)], [(name, held, 1.0)]
        for title, evaluation in source.evaluation_sets.items():
            place = f"{where}.evaluation_sets.{title}"
            table = self._table(evaluation.table, evaluation.read or source.read, place)
            rows, _ = split_rows(table, 0.0, tokenizer, f"{name} ({title})")
            rows = self._sampled(name, rows)
            self.evaluation_sets.setdefault(title, {})[name] = [(name, rows, 1.0)]
        self.tokenizers[where] = tokenizer

    def _folded(
        self, name: str, rows: TableSource, folds: FoldSettings
    ) -> tuple[TableSource, TableSource]:
        """The rows of a table to train on and those of the fold that is held out."""
        tasks = [task for task in self.recipe.built_tasks.values() if task.source == name]
        group = folds.group or self._group_of(name, rows)
        if group:
            rows.need(group, f"sources.{name}.folds.group")
        named = [task.label_column for task in tasks if isinstance(task, PositiveClassTask)]
        label = next((column for column in named if column in rows.columns), "")
        try:
            fold = deal_folds(
                len(rows),
                folds.count,
                seed=self.recipe.seed,
                classes=rows.column(label) if label else None,
                groups=rows.column(group) if group else None,
            )
        except UserError as error:
            raise UserError(f"sources.{name}.{error}") from None
        held = fold == folds.held_out - 1
        return (
            replace(rows, numbers=rows.numbers[~held]),
            replace(rows, numbers=rows.numbers[held]),
        )

    def _endless(
        self, name: str, source: SourceSettings, tokenizer: Tokenizer
    ) -> tuple[TableSource, TableSource]:
        """The first rows of a reader without an end; none are held out."""
        where = f"sources.{name}.reader"
        readers = [task for task in self.recipe.built_tasks.values() if task.source == name]
        roles = {task.tuple_roles for task in readers if isinstance(task, TableTask)}
        rows = EndlessRows(
            reader=source.reader,
            where=where,
            pass_examples=source.pass_examples,
            read=source.read,
            tokenizer=tokenizer,
            tuple_roles=roles.pop() if len(roles) == 1 else TUPLE_ROLES,
        )
        self.tables[where] = rows.sample
        training, held = split_rows(rows.sample, 0.0, tokenizer, name)
        return replace(training, endless=rows), held

    def _sampled(self, name: str, rows: TableSource) -> TableSource:
        """At most `evaluate.examples` rows of a table, always the same. The candidates of a ranking
        and the rows of a query stay together."""
        most = self.recipe.evaluate.examples
        if most is None or most >= len(rows):
            return rows
        group = self._group_of(name, rows)
        draw = held_out_draw(rows.numbers, rows.column(group) if group else None)
        taken = draw <= np.sort(draw)[most - 1] if most else np.zeros(len(rows), bool)
        return replace(rows, numbers=rows.numbers[taken])

    def _group_of(self, name: str, rows: TableSource) -> str:
        """The column whose rows stay together, for the candidates of a ranking and the positives of
        a query; empty if no task ranks the rows of this table or searches them."""
        tasks = [task for task in self.recipe.built_tasks.values() if task.source == name]
        found = (x.group_of(rows) for x in tasks if isinstance(x, Ranking | RetrievalTask))
        return next(found, "")

    def _tokenizer(self, name: str, source: SourceSettings) -> Tokenizer:
        """The tokenizer of a table; one object per vocabulary."""
        where = Path(source.tokenizer) if source.tokenizer else self._tokenizer_of_weights(name)
        known = {tokenizer.origin: tokenizer for tokenizer in self.tokenizers.values()}
        tokenizer = load_tokenizer(where)
        return known.get(tokenizer.origin, tokenizer)

    def _tokenizer_of_weights(self, name: str) -> Path:
        start = self.recipe.init_from
        tokenizer = self.start().tokenizer if start else None
        if tokenizer is None:
            why = f"{start} has none" if start else "there is no `init_from`"
            raise UserError(f"sources.{name}.tokenizer: missing, and {why}; name a vocabulary")
        return tokenizer

    def _table(self, paths: str | list[str], read: TableSettings, where: str) -> Table:
        """A table, opened once. It is known by its path, which run folders store; if the same path
        is read in another way elsewhere, by that place too."""
        path = paths if isinstance(paths, str) else ", ".join(paths)
        key = path if self.readings.get(path, read) == read else f"{path} ({where})"
        if key not in self.tables:
            given = self.in_memory.get(path)
            self.tables[key] = (
                Table.from_rows(given.rows, read, name=given.name, copy=path)
                if given
                else open_table(paths, read)
            )
            self.readings[key] = read
        return self.tables[key]


def open_data(recipe: Recipe, in_memory: Mapping[str, NamedRows] | None = None) -> Data:
    """Open every corpus and table of a recipe. `in_memory`: rows that were written to a file, which
    messages then do not name. Raises UserError if they have different tokenizers or lack what the
    tasks read."""
    start = cache(partial(open_model, recipe.init_from))
    opening = _Opening(recipe, start, in_memory or {})
    for name, source in recipe.sources.items():
        getattr(opening, source.reads)(name, source)
    prints = {t.fingerprint: name for name, t in opening.tokenizers.items()}
    if len(prints) > 1:
        first, second, *_ = prints.values()
        raise UserError(
            f"sources: {first} and {second} have different tokenizers; prepare corpora with the "
            f"same one (--tokenizer {first}/tokenizer) and give tables the same `tokenizer`"
        )
    models, prints = open_teachers(recipe.teacher)
    return Data(
        start=start,
        train=opening.train,
        held_out=opening.held_out,
        evaluation_sets=opening.evaluation_sets,
        corpora=opening.corpora,
        tables=opening.tables,
        tokenizer=next(iter(opening.tokenizers.values())),
        teachers=prints,
        teacher_models=models,
    )


def preparations(recipe: Recipe, data: Data) -> list[TextPreparation]:
    """The preparation of each source's texts."""
    options = [corpus.manifest.options.get("text", {}) for corpus in data.corpora.values()]
    steps = [(bool(text.get("simplify")), bool(text.get("lower"))) for text in options]
    tables = [source.read for source in recipe.sources.values() if source.reads == "table"]
    steps += [(table.simplify, False) for table in tables]
    lower = data.tokenizer.lower
    return [TextPreparation(simplify=each, lower=lower or lowered) for each, lowered in steps]


def preparation_of(recipe: Recipe, data: Data) -> TextPreparation:
    """The steps that the texts of all sources had."""
    each = preparations(recipe, data)
    return TextPreparation(
        simplify=all(one.simplify for one in each), lower=all(one.lower for one in each)
    )


def _opened(source: SourceSettings, folder: str, corpora: dict[str, Corpus]) -> Corpus:
    """The corpus of a folder, opened once; ERNIE's files are first converted to it."""
    if folder not in corpora:
        if source.ernie:
            files = Path(folder.removesuffix(".corpus"))
            corpora[folder] = open_ernie(files, Path(source.tokenizer), Path(folder))
        else:
            corpora[folder] = open_corpus(folder)
    return corpora[folder]


def open_teachers(
    settings: TeacherSettings | None,
) -> tuple[Mapping[str, CheckpointContents], Mapping[str, str]]:
    """({name: opened teacher model}, {path as in the recipe: a short hash of the files that a run
    reads}). Raises UserError."""
    if settings is None:
        return {}, {}
    try:
        if settings.file:
            return {}, {settings.file: sha256_of_file(_existing(settings.file))[:16]}
        paths = {name: model.path for name, model in settings.all_models.items()}
        opened = {path: open_model(_existing(path)) for path in dict.fromkeys(paths.values())}
    except UserError as error:
        raise UserError(f"teacher: {error}") from None
    prints = {path: fingerprint_of(contents) for path, contents in opened.items()}
    return {name: opened[path] for name, path in paths.items()}, prints


def _existing(path: str) -> Path:
    if not Path(path).exists():
        raise UserError(f"{path}: no such file or folder{suggest_path(Path(path))}")
    return Path(path)


def _tasks_on_same_texts(recipe: Recipe, name: str) -> list[Task]:
    """The tasks that label the same texts as a task: all that share a task group with it."""
    together = {name}
    for task_group in recipe.curriculum_spec.task_groups:
        names = tasks_of(task_group)
        if name in names:
            together |= set(names)
    return [recipe.built_tasks[other] for other in together]


def check_tables(recipe: Recipe, data: Data, taught: Collection[str] = ()) -> None:
    """Raises UserError at the first row of a table that a task cannot use. Rows to train on may
    lack the labels of the tasks that a teacher labels, `taught`."""
    for task in recipe.built_tasks.values():
        if isinstance(task, TableTask):
            for side in (data.train, data.held_out, *data.evaluation_sets.values()):
                for _, source, _ in side.get(task.source, ()):
                    if side is data.train and task.name in taught:
                        _check_labeled_rows(task, source)
                    else:
                        _check_all_rows(task, source, recipe, evaluated=side is not data.train)
    _check_steps(recipe, data)


def _check_all_rows(
    task: TableTask, source: TableSource, recipe: Recipe, *, evaluated: bool
) -> None:
    """Raises UserError at the first row that a task cannot use; each must have a label."""
    try:
        task.check(source, labeled=True)
    except UserError as error:
        if recipe.sources[task.source].read.missing_labels != "keep" or task.labeled(source).all():
            raise
        why = f"no teacher labels the rows of tasks.{task.name}"
        if evaluated:
            why = (
                "rows to evaluate on need labels; give "
                f"sources.{task.source}.validation, or `held_out: 0`"
            )
        raise UserError(f"{error}: {why}") from None


def _check_labeled_rows(task: TableTask, source: TableSource) -> None:
    """Raises UserError at the first row that a task cannot use; some rows have no label."""
    task.check(source, labeled=False)
    numbers = source.numbers[task.labeled(source)]
    if len(numbers):
        task.check(replace(source, numbers=numbers), labeled=True)


def _check_steps(recipe: Recipe, data: Data) -> None:
    """Raises UserError if the steps of a task have too few examples to learn from."""
    for task_group in recipe.curriculum_spec.task_groups if recipe.examples else ():
        for name in tasks_of(task_group):
            task = recipe.built_tasks[name]
            if isinstance(task, TableTask):
                for _, source, _ in data.train[task.source]:
                    task.check_step(source, recipe.examples_of(task_group))


def check_units(recipe: Recipe, data: Data) -> None:
    """Raises UserError if a task masks a unit that its corpora lack."""
    for task in recipe.built_tasks.values():
        if not isinstance(task, CorpusTask):
            continue
        corpora = [source.corpus for _, source, _ in data.train[task.source]]
        for unit in task.required_units():
            if not any(corpus.count_spans(unit) for corpus in corpora):
                where = ", ".join(str(corpus.path) for corpus in corpora)
                raise UserError(
                    f"tasks.{task.name}.units: {unit}, but {where} has none; remove it from "
                    "`units`, or prepare the corpus from text again, with a lexicon "
                    f"(--lexicon_{unit} FILE)"
                )


def datasets_of(
    recipe: Recipe,
    task_groups: Sequence[str],
    side: Side,
    *,
    seed: int,
    fixed: bool = False,
    soft: SoftTasks = MappingProxyType({}),
    length: int = 0,
) -> tuple[list[TaskGroupDataset], dict[str, list[tuple[int, float]]]]:
    """The datasets of task groups over one side of the data: training, held-out or an evaluation
    set. Returns them with {group: [(index of a dataset, share)]}. `length`: of their rows; 0: the
    recipe's."""
    length = length or recipe.length
    documents, memory = recipe.documents_read, memory_shape(recipe.backbone_config)[1]
    datasets, mixtures = make_datasets(
        task_groups,
        recipe.built_tasks,
        recipe.task_ids,
        side,
        seed=seed,
        length=LONGEST if documents else length,
        fixed=fixed,
        segments=recipe.backbone_config.token_types,
        soft=soft,
    )
    if not documents:
        return datasets, mixtures
    windows = DocumentWindows.of(documents, length, memory)
    return [DocumentDataset.of(dataset, windows) for dataset in datasets], mixtures
