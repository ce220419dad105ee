"""Prints the packed rows of a training step: their examples, masked tokens and labels.

    recipe ──open_step──> View ──sequences──> PackedExample ──as_text / as_record──> screen / JSON
                                                └──summary──> tables over a whole step

No engine is started and nothing is trained: rows are a pure function of the recipe and its data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from rich.text import Text

from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted
from palm_ds.data.stream.task_group_dataset import PackedRow, TaskGroupDataset
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import Task
from palm_ds.model.config.encoder_kinds import is_custom
from palm_ds.model.config.meta import on_meta
from palm_ds.model.distillation.soft_labels import soft_name
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import predicts_tokens
from palm_ds.model.heads.replaced_tokens import generator_name
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.text.display import token_texts
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.text.tokens import SpecialTokens
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.setup.build import build_held_out, build_stream, full_config
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.sources import Data, open_data

_COLORS = ("cyan", "magenta", "green", "blue", "yellow")
_TOKENS = 12
"""At most this many tokens of a class are listed."""
_CLASSES = 9
"""At most this many classes of a task are listed in the summary; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Rows to show, and what is needed to render them."""

    title: str
    datasets: Sequence[TaskGroupDataset]
    rows: Sequence[PackedRow]
    shown: Sequence[int]
    """Indices of the rows to show in full; the summary covers all rows."""
    length: int
    tokenizer: Tokenizer
    token_tasks: frozenset[str]
    """The tasks whose labels are tokens, not classes."""
    mask_rate: float | None = None
    """The step's own, if it has one."""

    def texts(self, ids: np.ndarray) -> list[tuple[str, bool]]:
        """The text of each id, and whether it continues the previous word."""
        known = token_texts(self.tokenizer, np.maximum(ids, 0))
        pairs = zip(ids.tolist(), known, strict=True)
        return [(self._own(number), False) if number < 0 else text for number, text in pairs]

    def tokens(self, ids: np.ndarray) -> list[str]:
        """The vocabulary entry of each id."""
        pairs = zip(ids.tolist(), self.tokenizer.tokens(np.maximum(ids, 0)), strict=True)
        return [self._own(number) if number < 0 else token for number, token in pairs]

    def _own(self, number: int) -> str:
        """The text of an id below 0, which a task has in addition to the vocabulary."""
        tasks = (task for dataset in self.datasets for task in dataset.tasks)
        named = next(filter(None, (task.own_token(number) for task in tasks)), f"<{number}>")
        if isinstance(named, str):
            return named
        parts = token_texts(self.tokenizer, named)
        return "".join(text if joined else f" {text}" for text, joined in parts).strip()


@dataclass(frozen=True, kw_only=True)
class PackedExample:
    """One example in a packed row."""

    row: int
    start: int
    """Position of its first token in the row."""
    dataset: TaskGroupDataset
    number: int
    """Its index in its dataset."""
    example: Example


# Opening ---------------------------------------------------------------------------------------


def open_step(recipe: Recipe, step: int, *, rows: int) -> View:
    """The rows of a training step (counted from 1, as in the log), the first `rows` in full."""
    _check(rows)
    data = open_data(recipe)
    recipe = resolve(recipe, data)
    if not 1 <= step <= recipe.curriculum.steps:
        raise UserError(f"--step {step}: the plan has steps 1 to {recipe.curriculum.steps}")
    # As if all tasks were taught: rows without a label have only the teacher's.
    taught = dict.fromkeys(recipe.built_tasks) if recipe.teacher else {}
    stream = build_stream(recipe, data, soft=taught)
    if recipe.extend:
        stream.already_read = examples_already_read(Path(recipe.extend))
    packed = stream.step_rows(step - 1)
    stage = recipe.curriculum.stage_at(step - 1) + 1
    return View(
        title=f"step {step:,} of {recipe.curriculum.steps:,}, stage {stage}",
        datasets=stream.datasets,
        rows=packed,
        shown=range(min(rows, len(packed))),
        length=stream.length_at(step - 1),
        tokenizer=_tokenizer(data),
        token_tasks=token_prediction_tasks(recipe, data.vocabulary),
        mask_rate=recipe.stage_plan.mask_rates.at(step - 1),
    )


def open_held_out(recipe: Recipe, *, rows: int) -> View:
    """The held-out rows, the first `rows` of each task group in full."""
    _check(rows)
    data = open_data(recipe)
    recipe = resolve(recipe, data)
    held = build_held_out(recipe, data)
    if not held.rows:
        raise UserError("--held_out: the recipe's held_out is 0, nothing is held out")
    dataset_of = np.array([row[0].dataset for row in held.rows])
    shown = [
        number
        for dataset in np.unique(dataset_of)
        for number in np.flatnonzero(dataset_of == dataset)[:rows]
    ]
    return View(
        title="held out",
        datasets=held.datasets,
        rows=held.rows,
        shown=[int(number) for number in shown],
        length=recipe.length,
        tokenizer=_tokenizer(data),
        token_tasks=token_prediction_tasks(recipe, data.vocabulary),
    )


def examples_already_read(old: Path) -> dict[str, int]:
    """{dataset: examples} read by the run to extend; the new run continues after them."""
    folder = old / "checkpoints"
    newest = checkpoint.latest_good(folder, group=SINGLE_PROCESS, warn=lambda line: None)
    if newest is None:
        raise UserError(f"extend: {old}: no checkpoint in {folder}; name a run folder")
    return dict(newest.state["consumed"])


def _check(rows: int) -> None:
    if rows < 0:
        raise UserError(
            f"--rows {rows}: expected the number of rows to show; 0 shows only the summary"
        )


def _tokenizer(data: Data) -> Tokenizer:
    return data.tokenizer


def token_prediction_tasks(recipe: Recipe, vocabulary: SpecialTokens) -> frozenset[str]:
    """The tasks whose head, or its generator, predicts tokens, found by building every head."""
    config = full_config(recipe.backbone_config, vocabulary)
    owners = {name: task.share or name for name, task in recipe.built_tasks.items()}
    predicting = {}
    # a custom encoder may compute in __init__
    with torch.device("cpu") if is_custom(config.kind) else on_meta():
        backbone = build_encoder(config)
        for owner in dict.fromkeys(owners.values()):
            task = recipe.built_tasks[owner]
            generates = generator_name(task.name) in task.loss_weights()
            predicting[owner] = generates or predicts_tokens(task.head(backbone))
    return frozenset(name for name, owner in owners.items() if predicting[owner])


def sequences(view: View, rows: Iterable[int]) -> Iterator[PackedExample]:
    """The examples of some rows, built as in training."""
    for row in rows:
        start = 0
        for ref in view.rows[row]:
            dataset = view.datasets[ref.dataset]
            example = dataset.example(ref.number, ref.layout, view.mask_rate)
            yield PackedExample(
                row=row, start=start, dataset=dataset, number=ref.number, example=example
            )
            start += len(example)


# As text ---------------------------------------------------------------------------------------


def as_text(view: View, row: int) -> Text:
    """A row: each example in its own color, with its labels below."""
    seen = list(sequences(view, [row]))
    real = sum(len(each.example) for each in seen)
    text = Text(f"row {row + 1}")
    text.append(f"  {counted(len(seen), 'sequence')}, {real} of {view.length} positions\n", "dim")
    for number, each in enumerate(seen):
        text.append_text(_sequence(view, each, _COLORS[number % len(_COLORS)]))
    return text


def _sequence(view: View, seen: PackedExample, color: str) -> Text:
    example, dataset = seen.example, seen.dataset
    text = Text("  ")
    text.append(dataset.name, f"bold {color}")
    end = seen.start + len(example) - 1
    place = f"positions {seen.start} to {end}, example {seen.number:,}, task id {dataset.task_id}"
    text.append(f"  {place}\n", "dim")
    for first, last in _segments(example.token_type_ids):
        text.append(f"    segment {example.token_type_ids[first]}  ", "dim")
        text.append_text(_tokens(view, example, first, last, color))
        text.append("\n")
    for task in dataset.tasks:
        text.append(f"    {task.name}: ", "bold")
        text.append(describe(view, task, example) + "\n")
    return text


def _segments(segments: np.ndarray) -> list[tuple[int, int]]:
    """[first, last) of every stretch of equal segment ids."""
    cuts = np.flatnonzero(np.diff(segments)) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(segments)], strict=True))


def _tokens(view: View, example: Example, first: int, last: int, color: str) -> Text:
    """Tokens separated by spaces, or `·` within a word. The original of a masked or replaced token
    follows in brackets; `(=)` marks one that is predicted but unchanged."""
    vocabulary = view.tokenizer.vocabulary
    predicted = np.zeros(len(example), bool)
    for task in view.token_tasks & example.labels.keys():
        predicted[example.labels[_shown(example, task)][0]] = True
    predicted &= example.source_offsets >= 0  # a [CLS] is read, not predicted
    now = view.texts(example.input_ids[first:last])
    before = view.texts(example.unmasked_ids[first:last])
    text = Text()
    for at, (word, joined), (was, _) in zip(range(first, last), now, before, strict=True):
        changed = example.input_ids[at] != example.unmasked_ids[at]
        if at > first:
            text.append("·" if joined and not changed else " ", "dim")
        if changed:
            masked = example.input_ids[at] == vocabulary.mask
            text.append(word, "bold reverse" if masked else "bold red")
            text.append(f"({was})", "dim")
        elif predicted[at]:
            text.append(word, f"underline {color}")
            text.append("(=)", "dim")
        else:
            text.append(word, "dim" if example.source_offsets[at] < 0 else color)
    return text


def describe(view: View, task: Task, example: Example) -> str:
    """A task's labels on an example, as text."""
    if task.name not in example.labels or not len(example.labels[task.name][0]):
        taught = soft_name(task.name) in example.labels
        return "no labels but the teacher's" if taught else "no labels"
    where, targets = _labels(example, task)
    if _are_vectors(example, task):
        places = ", ".join(map(str, where[:_TOKENS]))
        return f"{counted(len(where), 'vector')} at {places}{', ...' * (len(where) > _TOKENS)}"
    if task.name in view.token_tasks:
        names = [text for text, _ in view.texts(targets)]
        return f"{counted(len(where), 'token')}: {', '.join(names)}"
    if len(where) == 1 and where[0] == 0:
        return task.class_name(int(targets[0]))
    return "; ".join(_class(view, task, example, int(k)) for k in np.unique(targets))


def _class(view: View, task: Task, example: Example, label: int) -> str:
    """`capital 3 (the, france, paris)`"""
    where, targets = _labels(example, task)
    here = where[targets == label]
    words = [text for text, _ in view.texts(example.unmasked_ids[here[:_TOKENS]])]
    more = ", ..." if len(here) > _TOKENS else ""
    return f"{task.class_name(label)} {len(here)} ({', '.join(words)}{more})"


# As values -------------------------------------------------------------------------------------


def as_record(view: View, seen: PackedExample) -> dict[str, Any]:
    """An example as plain values for JSON. Positions count from its [CLS], 0; `original` holds the
    originals of masked and replaced tokens."""
    example = seen.example
    changed = np.flatnonzero(example.input_ids != example.unmasked_ids)
    originals = view.tokens(example.unmasked_ids[changed])
    return {
        "row": seen.row + 1,
        "start": seen.start,
        "length": len(example),
        "task_group": seen.dataset.name,
        "task_id": seen.dataset.task_id,
        "example": seen.number,
        "tokens": view.tokens(example.input_ids),
        "segments": example.token_type_ids.tolist(),
        "original": dict(zip(map(str, changed.tolist()), originals, strict=True)),
        "labels": {
            task.name: _label_records(view, task, example)
            for task in seen.dataset.tasks
            if task.name in example.labels
        },
    }


def _labels(example: Example, task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Positions and targets (n,) of a task's labels; of a target with several parts, the first."""
    where, targets = example.labels[_shown(example, task.name)]
    return where, targets[:, 0] if targets.ndim > 1 else targets


def _are_vectors(example: Example, task: Task) -> bool:
    """Whether its targets are numbers of several parts, as features of regions are."""
    targets = example.labels[_shown(example, task.name)][1]
    return targets.ndim > 1 and targets.dtype.kind == "f"


def _shown(example: Example, task: str) -> str:
    """The labels of a task that are shown: those of its generator, if it has one."""
    made = generator_name(task)
    return made if made in example.labels else task


def _label_records(view: View, task: Task, example: Example) -> list[dict[str, Any]]:
    where, targets = _labels(example, task)
    if _are_vectors(example, task):
        return [{"position": int(at)} for at in where]
    if task.name in view.token_tasks:
        names = view.tokens(targets)
    else:
        names = [task.class_name(int(target)) for target in targets]
    return [
        {"position": int(at), "label": int(target), "name": name}
        for at, target, name in zip(where, targets, names, strict=True)
    ]


# Summary ---------------------------------------------------------------------------------------


def summary(view: View) -> list[Text | Table]:
    """Over all rows: how full they are, the examples of each task group, the labels of each
    task."""
    seen = list(sequences(view, range(len(view.rows))))
    real, max_length = sum(len(each.example) for each in seen), view.length * len(view.rows)
    head = (
        f"{view.title}: {counted(len(view.rows), 'row')} of {view.length}, "
        f"{counted(len(seen), 'sequence')}, {real:,} of {max_length:,} positions are real tokens "
        f"({100 * real / max(max_length, 1):.1f} %)"
    )
    return [Text(head, "bold"), _task_group_table(seen, real), _task_table(view, seen)]


def _task_group_table(seen: Sequence[PackedExample], real: int) -> Table:
    columns = ("sequences", "shortest", "mean", "longest", "tokens", "share")
    table = _table("task group", columns)
    for name in dict.fromkeys(each.dataset.name for each in seen):
        lengths = np.array([len(each.example) for each in seen if each.dataset.name == name])
        table.add_row(
            name,
            f"{len(lengths):,}",
            str(lengths.min()),
            f"{lengths.mean():.1f}",
            str(lengths.max()),
            f"{lengths.sum():,}",
            f"{100 * lengths.sum() / real:.1f} %",
        )
    return table


def _task_table(view: View, seen: Sequence[PackedExample]) -> Table:
    table = _table("task", ("labels", "a sequence"))
    table.add_column("which")
    tasks = {task.name: task for each in seen for task in each.dataset.tasks}
    for name, task in tasks.items():
        examples = [each.example for each in seen if task in each.dataset.tasks]
        labels = sum(len(e.labels[_shown(e, name)][0]) for e in examples if name in e.labels)
        which = (
            _shown_as(view, name, examples)
            if name in view.token_tasks
            else _classes(task, examples)
        )
        table.add_row(name, f"{labels:,}", f"{labels / len(examples):.2f}", which)
    return table


def _shown_as(view: View, name: str, examples: Sequence[Example]) -> str:
    """Describe the input at the positions to predict; empty if they are predicted from [CLS]."""
    counts: Counter[str] = Counter()
    for example in examples:
        shown = _shown(example, name)
        where, targets = example.labels.get(shown, (np.empty(0, int),) * 2)
        if targets.ndim > 1 and shown == name:
            continue
        targets = targets[:, 0] if targets.ndim > 1 else targets
        ids, mask = example.input_ids[where], view.tokenizer.vocabulary.mask
        counts["[MASK]"] += int((ids == mask).sum())
        counts["unchanged"] += int((ids == targets).sum())
        counts["another token"] += int(((ids != mask) & (ids != targets)).sum())
    return _shares(counts)


def _classes(task: Task, examples: Sequence[Example]) -> str:
    counts: Counter[str] = Counter()
    for example in examples:
        if task.name in example.labels and not _are_vectors(example, task):
            labels, many = np.unique(_labels(example, task)[1], return_counts=True)
            counts.update(
                {task.class_name(int(k)): int(n) for k, n in zip(labels, many, strict=True)}
            )
    return _shares(counts)


def _shares(counts: Mapping[str, int]) -> str:
    total = max(sum(counts.values()), 1)
    largest = Counter(counts).most_common(_CLASSES)
    text = ", ".join(f"{name} {100 * n / total:.1f} %" for name, n in largest)
    return text + (f", and {len(counts) - _CLASSES} more" if len(counts) > _CLASSES else "")


def _table(first: str, columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right")
    return table
