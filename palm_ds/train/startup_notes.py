"""Log lines on a run's settings and data before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from palm_ds.common.messages import counted
from palm_ds.corpus.manifest import COUNTED_ANNOTATIONS
from palm_ds.corpus.store import Corpus
from palm_ds.data.reader.options import is_label
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.task import TableTask
from palm_ds.runtime.device.torch_settings import describe_slow_precision, describe_tf32
from palm_ds.runtime.processes.processes import Processes, crowded_hosts
from palm_ds.runtime.zero.swap_folder import describe_swapping
from palm_ds.train.recipe.checks import idle_tasks
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import Data
from palm_ds.train.teachers.distillation_plan import DistillationPlan

_NO_INPUTS = ("id", "qid", "teacher_scores")
_FEW_ROWS = 20  # with fewer, a single row changes a score by more than five points
_PLURAL = {"word": "words", "phrase": "phrases", "entity": "entities"}


def startup_notes(
    run: RunSpec, data: Data, plan: DistillationPlan, processes: Processes
) -> list[str]:
    """Hosts with fewer cores than processes, settings carried out otherwise than written, the size
    of the corpora, tasks that do not train, and held-out sets too small to judge by, or trained on.
    Collective."""
    recipe = run.recipe
    arithmetic = [
        describe_tf32(run.ds_config, processes.device),
        describe_slow_precision(run.ds_config.precision, processes.device),
    ]
    return [
        *crowded_hosts(processes),
        *run.ds_config.notes,
        *describe_swapping(run.ds_config),
        *corpus_summaries(data),
        *recipe.schedule_in_steps.warnings(recipe.curriculum, recipe.stage_plan.schedules),
        *idle_tasks(recipe.built_tasks, recipe.curriculum.task_groups, plan.soft_tasks),
        *plan.lines(),
        *filter(None, arithmetic),
        *small_held_out_warnings(recipe, data),
        *trained_on_warnings(recipe, data),
        *evaluation_notes(recipe, data),
    ]


def corpus_summaries(data: Data) -> list[str]:
    """One line per corpus: its tokens and its units of each kind."""
    return [_corpus_summary(corpus) for corpus in data.corpora.values()]


def _corpus_summary(corpus: Corpus) -> str:
    known = [name for name in COUNTED_ANNOTATIONS if name in corpus.annotations]
    counts = [f"{corpus.count_spans(name):,} {_PLURAL[name]}" for name in known]
    return f"{corpus.path}: {', '.join([f'{corpus.manifest.tokens:,} tokens', *counts])}"


def small_held_out_warnings(recipe: Recipe, data: Data) -> list[str]:
    """One line per table whose held-out rows are too few for meaningful scores."""
    sizes = {
        name: (len(data.train[name][0][1]), len(data.held_out[name][0][1]))
        for name, settings in recipe.sources.items()
        if settings.table and not (settings.validation or settings.folds) and recipe.held_out
    }
    return [
        f"{name}: {held} of {held + training} rows are held out (held_out: {recipe.held_out:g}), "
        "too few to score on; give the source `validation`, or hold out more"
        for name, (training, held) in sizes.items()
        if held < _FEW_ROWS
    ]


def trained_on_warnings(recipe: Recipe, data: Data) -> list[str]:
    """One line per corpus or table to evaluate on whose texts, or some of them, are trained on."""
    lines, nothing = [], "its scores say nothing about new texts"
    for where, name, path, held in _evaluated(recipe, data):
        if again := _trained_again(held, data):
            lines.append(f"{where}: {path} is evaluated on and trained on ({again}): {nothing}")
        elif isinstance(held, CorpusSource) and _only_copies(held):
            lines.append(
                f"{where}: every held-out document of {path} has a copy in the corpus, "
                "which may be trained on; prepare it with --dedup, or give `validation`: "
                f"{nothing}"
            )
        elif repeated := _repeated_rows(held, data.train[name]):
            lines.append(f"{where}: {repeated}")
    return lines


def _evaluated(recipe: Recipe, data: Data) -> Iterator[tuple[str, str, str, object]]:
    """Key in the recipe, name, path and source of all that is evaluated on."""
    given = [("validation", data.held_out)]
    given += [(f"evaluation_sets.{title}", side) for title, side in data.evaluation_sets.items()]
    for key, side in given:
        for name, parts in side.items():
            separate = key != "validation" or recipe.sources[name].validation
            where = f"sources.{name}.{key}" if separate else f"sources.{name}"
            yield from ((where, name, path, held) for path, held, _ in parts)


def _trained_again(held: object, data: Data) -> str:
    """The first source to train on some of whose texts are those of one to evaluate on."""
    trained = (part for parts in data.train.values() for part in parts)
    return next((path for path, training, _ in trained if _overlap(held, training)), "")


def _overlap(held: object, training: object) -> bool:
    """Whether some of the texts of a source to evaluate on are those of one to train on."""
    if isinstance(held, TableSource) and isinstance(training, TableSource):
        same, own = held.table.fingerprint == training.table.fingerprint, held.numbers
        return same and bool(np.isin(own, training.numbers).any())
    if not (isinstance(held, CorpusSource) and isinstance(training, CorpusSource)):
        return False
    if held.corpus.manifest.files != training.corpus.manifest.files or not len(held):
        return False
    if held.split and training.split:  # of which each is a window
        return not held.split.is_held_out or held.split.held_out != training.split.held_out
    return bool(np.isin(held.documents, training.documents).any())


def _repeated_rows(held: object, trained: Sequence[tuple[str, object, float]]) -> str:
    """How many rows to evaluate on have the texts of other rows that are trained on."""
    if not isinstance(held, TableSource):
        return ""
    wanted = list(_texts_of_rows(held))
    known, found = set(wanted), set[object]()
    for _, training, _ in trained:
        if isinstance(training, TableSource) and _inputs(training) == _inputs(held):
            found |= known.intersection(_texts_of_rows(training))
    rows = [row for row, texts in enumerate(wanted) if texts in found and any(texts)]
    if not rows:
        return ""
    of = f"{len(rows):,} of {counted(len(held), 'row')}"
    first = held.where(rows[0])
    return f"{of} to evaluate on have the same texts as rows to train on; the first: {first}"


def _inputs(source: TableSource) -> list[str]:
    """The roles of columns that a model may read."""
    return [role for role in source.columns if role not in _NO_INPUTS and not is_label(role)]


def _texts_of_rows(source: TableSource) -> Iterator[tuple[object, ...]]:
    columns = [map(_comparable, source.column(role)) for role in _inputs(source)]
    return zip(*columns, strict=True)


def _comparable(value: object) -> object:
    """A text as it is; of what has no hash one that equal values share, of an image its own."""
    return repr(value) if isinstance(value, list | dict) else value


def _only_copies(held: CorpusSource) -> bool:
    """Whether every one of some documents stands elsewhere in the corpus, too."""
    repeated = held.corpus.repeated
    return bool(len(held) and len(repeated) and np.isin(held.documents, repeated).all())


def evaluation_notes(recipe: Recipe, data: Data) -> list[str]:
    """Remarks of tasks on the labels of held-out rows, without those that also hold for training
    rows."""
    notes = []
    for task in recipe.built_tasks.values():
        if isinstance(task, TableTask):
            known = [task.describe(source) for _, source, _ in data.train[task.source]]
            for side in (data.held_out, *data.evaluation_sets.values()):
                held = [source for _, source, _ in side.get(task.source, ()) if len(source)]
                remarks = {source.name: task.describe(source) for source in held}
                notes += [
                    f"{place}: {remark}"
                    for place, remark in remarks.items()
                    if remark and remark not in known
                ]
    return notes
