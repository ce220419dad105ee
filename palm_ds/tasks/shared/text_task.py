"""What tasks over rows of a table share: which texts, how they are cut, where labels come from.

row ──texts──> [CLS] text_a [SEP] text_b [SEP]   cut to `max_length`, the longest text first
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from palm_ds.common.errors import UserError, suggest
from palm_ds.data.example import Example, arrange
from palm_ds.data.stored_prediction import StoredPrediction
from palm_ds.data.table_source import TableSource
from palm_ds.data.task import Task
from palm_ds.tasks.metrics.classes import confusion
from palm_ds.weights.formats.huggingface.target import HeadTaken

MOST_LABELS = 10_000
"""More different labels than this are taken for a mistake in the columns."""

MOST_SHOWN = 12
"""Lines and columns of a table in the report."""

SHORTEST = 8
"""Fewer tokens than this are no text."""

_ENDLESS = 10**9
_COUNTED = 8
"""Labels that are counted in the line about a table."""
_ARRANGED_BY = ("items", "layout", "example")

AnyTextTask = TypeVar("AnyTextTask", bound="TextTask")
LabelledTask = TypeVar("LabelledTask", bound="ClassesTask")


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """A task over rows: one example a row, [CLS] text [SEP] ... of its texts."""

    texts: tuple[str, ...] = ()
    """The columns of its texts; by default text_a and, where there is one, text_b."""
    label_column: str = "label"
    """The column of its label."""
    max_length: int = 0
    """Most tokens of an example, [CLS] and [SEP] counted; 0: as many as a row holds."""

    reads: ClassVar[Literal["corpus", "table"]] = "table"

    @property
    def where(self) -> str:
        """The task in the recipe, for messages."""
        return f"tasks.{self.name}"

    def like(self, origin: Task) -> Task:
        if type(origin) is not type(self):
            mine, its = type(self).__name__, type(origin).__name__
            raise UserError(
                f"{self.where}.share: {origin.name!r} is another kind of task ({its}, not {mine})"
            )
        return self

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        """The columns of its texts in this source, all of them there."""
        pair = ("text_a", "text_b") if "text_b" in source.columns else ("text_a",)
        for column in (columns := self.texts or pair):
            source.need(column, self.where)
        return columns

    def room(self, room: int) -> int:
        """Most tokens of an example in rows of so many."""
        if self.max_length < 0 or 0 < self.max_length < SHORTEST:
            raise UserError(f"{self.where}.max_length: {self.max_length}; at least {SHORTEST}")
        if self.max_length > room:
            raise UserError(
                f"{self.where}.max_length: {self.max_length} tokens, but rows hold {room}; raise "
                "`length` or lower it"
            )
        return self.max_length or room

    def check(self, source: TableSource, *, labelled: bool) -> None:
        self.columns_of(source)
        if labelled:
            self.check_labels(source)

    def check_labels(self, source: TableSource) -> None:
        """Raises UserError, with the row's place, where a label is missing or cannot be used."""
        return

    def label_roles(self) -> tuple[str, ...]:
        return (self.label_column,)

    def describe_rows(self, source: TableSource, room: int) -> str:
        """How many rows there are, and how many do not fit."""
        parts = [f"{self.name}: {len(source):,} rows", self.describe_labels(source)]
        if cut := self.cut_rows(source, room):
            parts.append(f"{cut:,} cut to {self.room(room)} tokens")
        return "; ".join(filter(None, parts))

    def describe_labels(self, source: TableSource) -> str:
        """How often each label occurs, where that can be said in a line."""
        return ""

    def cut_rows(self, source: TableSource, room: int) -> int:
        """None where a task reads a long row in several pieces."""
        items = self.items(source, room)
        if len(items) != len(source):
            return 0
        no_draws = np.empty((len(items), self.draws))
        kept = self.layout(items, no_draws, source, room)[:, 0]
        whole = replace(self, max_length=0).layout(items, no_draws, source, _ENDLESS)[:, 0]
        return int((whole > kept).sum())

    def arrangement_key(self) -> str:
        kind = type(self)
        if any(getattr(kind, x) is not getattr(TextTask, x) for x in _ARRANGED_BY):
            return super().arrangement_key()
        return repr((kind.columns_of, kind.room, self.texts, self.max_length))

    def score_rows(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> dict[str, float]:
        """With a label for every row; the order and meaning of labels as predict.py noted them."""
        made = dict(enumerate(map(self.read_prediction, predictions)))
        task = self.for_scoring(source, made)
        task.check_labels(source)
        return task.metrics(made, source)

    def for_scoring(
        self: AnyTextTask, source: TableSource, predictions: Mapping[int, dict[str, Any]]
    ) -> AnyTextTask:
        """The task with what it needs to know to score predictions of these rows, if it was not
        trained on others."""
        return self

    def exported(self, **more: Any) -> HeadTaken:
        """What `hf_export` says of a task whose head transformers has."""
        return HeadTaken(name=self.share or self.name, **more)

    def items(self, source: TableSource, room: int) -> np.ndarray:  # type: ignore[override]
        """(rows, 1): every row."""
        return np.arange(len(source))[:, None]

    def layout(  # type: ignore[override]
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, room: int
    ) -> np.ndarray:
        """(n, 3 + texts): length, 0, item, tokens of each text."""
        item = items[:, 0]
        lengths = [source.encoded(column).lengths[item] for column in self.columns_of(source)]
        kept = level(np.stack(lengths, 1), self.room(room) - 1 - len(lengths))
        total = kept.sum(1) + 1 + len(lengths)
        return np.column_stack([total, np.zeros_like(total), item, kept])

    def example(  # type: ignore[override]
        self, layout: np.ndarray, source: TableSource, rng: np.random.Generator
    ) -> Example:
        item, *tokens = (int(x) for x in layout[2:])
        columns = self.columns_of(source)
        pieces = [
            source.encoded(column).read(item, 0, many)
            for column, many in zip(columns, tokens, strict=True)
        ]
        example = arrange(pieces, source.vocabulary)
        example.item = item
        return example


@dataclass(frozen=True, kw_only=True)
class ClassesTask(TextTask):
    """A text task whose labels are names of classes."""

    labels: tuple[str, ...] = ()
    """The names of its classes, in order; by default those found in the training rows, numbers by
    size, others by letter."""

    def settled(self: LabelledTask, source: TableSource) -> LabelledTask:
        """With the labels of the training rows, where the recipe names none."""
        if self.labels:
            return self
        source.need(self.label_column, self.where)
        found = sorted(self.names_in(source), key=_order)
        if not found:
            raise UserError(
                f"{self.where}: {source.name} has no label in column {self.label_column!r}"
            )
        if len(found) > MOST_LABELS:
            raise UserError(
                f"{self.where}: {len(found)} different labels in column {self.label_column!r} of "
                f"{source.name}; is this the right column? (or list them in `labels`)"
            )
        return replace(self, labels=tuple(found))

    def like(self, origin: Task) -> Task:
        """With the labels of the task whose head it shares: a class is the same to both."""
        super().like(origin)
        assert isinstance(origin, ClassesTask)
        if self.labels and self.labels != origin.labels:
            raise UserError(
                f"{self.where}.labels: not those of tasks.{origin.name}, whose head it shares; "
                "leave them out here"
            )
        return replace(self, labels=origin.labels)

    def names_in(self, source: TableSource) -> set[str]:
        """Every label that occurs."""
        return {str(value) for value in source.column(self.label_column) if value is not None}

    def names_predicted(self, prediction: Mapping[str, Any]) -> set[str]:
        """The labels that a prediction names."""
        return {str(prediction["label"])}

    def for_scoring(
        self: LabelledTask, source: TableSource, predictions: Mapping[int, dict[str, Any]]
    ) -> LabelledTask:
        """With every label that occurs, after those it knows."""
        source.need(self.label_column, self.where)
        found = set().union(*map(self.names_predicted, predictions.values()))
        others = (self.names_in(source) | found) - set(self.labels)
        return replace(self, labels=(*self.labels, *sorted(others, key=_order)))

    def describe_labels(self, source: TableSource) -> str:
        if self.label_column not in source.columns:
            return ""
        counts = Counter(map(str, source.column(self.label_column)))
        known = [f"{label} {counts[label]:,}" for label in self.labels if label in counts]
        more = f", ... ({len(self.labels)} labels)" if len(self.labels) > _COUNTED else ""
        return ", ".join(known[:_COUNTED]) + more if known else ""

    def number(self, name: Any, source: TableSource, item: int) -> int:
        """The class of a label. Raises UserError where it is none of the labels."""
        if str(name) not in self.labels:
            known = ", ".join(self.labels[:8]) + (", ..." if len(self.labels) > 8 else "")
            raise UserError(
                f"{source.where(item)}: {self.label_column}: no label {str(name)!r}"
                f"{suggest(str(name), self.labels)}; {self.where} knows {known}"
            )
        return self.labels.index(str(name))

    def class_name(self, label: int) -> str:
        return self.labels[label] if label < len(self.labels) else str(label)


def confusion_table(
    found: Sequence[int], targets: Sequence[int], names: Sequence[str]
) -> dict[str, list[list[Any]]]:
    """{title: rows}: how often each class (row) was taken for which (column); of more classes than
    a page holds, the pairs that are taken for one another most often."""
    counts = confusion(found, targets, range(len(names)))
    if len(names) <= MOST_SHOWN:
        heads = ["is", *(f"taken for {name}" for name in names)]
        rows = zip(names, counts.tolist(), strict=True)
        return {"Confusion": [heads, *([name, *row] for name, row in rows)]}
    np.fill_diagonal(counts, 0)
    worst = np.argsort(-counts, axis=None, kind="stable")[:MOST_SHOWN]
    pairs = [divmod(int(place), len(names)) for place in worst]
    rows = [[names[is_], names[taken], int(counts[is_, taken])] for is_, taken in pairs]
    return {"Confusion, the most frequent": [["is", "taken for", "rows"], *filter(_some, rows)]}


def _some(row: Sequence[Any]) -> bool:
    return row[-1] > 0


def _order(name: str) -> tuple[int, float, str]:
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def level(lengths: np.ndarray, most: int | np.ndarray) -> np.ndarray:
    """(n, texts) tokens kept of texts of so many (n, texts), at most `most` of a row together: the
    longest is cut first, of equally long ones the later (BERT's truncation, for any number).

    >>> level(np.array([[3, 9], [9, 9], [2, 2]]), 11)
    array([[3, 8], [6, 5], [2, 2]])
    """
    most = np.broadcast_to(np.asarray(most, np.int64), len(lengths))
    low, high = np.zeros(len(lengths), np.int64), lengths.max(1, initial=0)
    while (low < high).any():  # the largest cap under which the row fits
        middle = (low + high + 1) // 2
        fits = np.minimum(lengths, middle[:, None]).sum(1) <= most
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    kept = np.minimum(lengths, low[:, None])
    left = most - kept.sum(1)
    longer = lengths > low[:, None]
    return kept + (longer & (np.cumsum(longer, 1) <= left[:, None]))


def missing(values: Sequence[Any], source: TableSource, what: str) -> None:
    """Raises UserError at the first row that has no value."""
    for item, value in enumerate(values):
        if value is None or value == "":
            raise UserError(f"{source.where(item)}: {what} is empty")
