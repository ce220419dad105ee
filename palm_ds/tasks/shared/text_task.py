"""Base classes of tasks on tables: selects and truncates the texts of a row and reads its label.

row ──texts──> [CLS] text_a [SEP] text_b [SEP]   truncated to `max_length`, longest text first
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np

from palm_ds.common.config import Several
from palm_ds.common.errors import UserError, did_you_mean
from palm_ds.common.settings import Share
from palm_ds.data.sources.table import TableSource, TokenizedColumn, encode
from palm_ds.data.tasks.example import Example, build_input, layouts
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.data.tasks.task import TableTask, Task
from palm_ds.model.heads.outputs import ExportedHead
from palm_ds.tasks.shared.label_notes import class_numbers, distinct, label_notes

MOST_LABELS = 10_000
"""With more distinct labels than this, the label column is probably wrong."""

SHORTEST = 8
"""Minimum `max_length`."""

_NO_LIMIT = 10**9
_COUNTED = 8
"""Maximum number of labels in the summary line of a table."""
ARRANGED_BY = ("items", "layout", "example")
"""The methods that decide which examples a task makes of a row."""

AnyTextTask = TypeVar("AnyTextTask", bound="TextTask")
LabeledTask = TypeVar("LabeledTask", bound="ClassesTask")


@dataclass(frozen=True, kw_only=True)
class TextTask(TableTask):
    """A task on table rows; each row is one example [CLS] text [SEP] ...."""

    texts: Several[str] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Text columns; by default text_a and, if the training rows have it, text_b."""
    label_column: str = "label"
    """Label column."""
    max_length: int = 0
    """Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a row."""

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        """The text columns in this source. Raises UserError if one is missing."""
        pair = ("text_a", "text_b") if "text_b" in source.columns else ("text_a",)
        for column in (columns := tuple(self.texts) or pair):
            source.need(column, self.where)
        return columns

    def input_length(self, max_length: int) -> int:
        """Maximum tokens of an example in rows of `max_length` tokens."""
        if self.max_length < 0 or 0 < self.max_length < SHORTEST:
            raise UserError(
                f"{self.where}.max_length: {self.max_length}; it must be 0 or at least {SHORTEST}"
            )
        if self.max_length > max_length:
            raise UserError(
                f"{self.where}.max_length: {self.max_length} tokens, but rows hold {max_length}; "
                "raise `length` or lower it"
            )
        return self.max_length or max_length

    def check(self, source: TableSource, *, labeled: bool) -> None:
        self.columns_of(source)
        if labeled:
            self.check_labels(source)

    def check_labels(self, source: TableSource) -> None:
        """Raises UserError, naming the row, if a label is missing or invalid."""
        return

    def label_roles(self) -> tuple[str, ...]:
        return (self.label_column,)

    def true_labels(self, source: TableSource) -> list[Any]:
        """The label of each row, for metrics of the user's own: its value, or with several label
        columns {column: value}; None if it has none."""
        roles = [role for role in self.label_roles() if role in source.columns]
        columns = [source.column(role) for role in roles]
        if len(columns) == 1:
            return columns[0]
        rows = zip(*columns, strict=True)
        return [dict(zip(roles, row, strict=True)) for row in rows] or [None] * len(source)

    def labeled(self, source: TableSource) -> np.ndarray:
        """(rows,) bool: a row has a label if it has a value in every column of labels."""
        if not self.label_roles():
            return super().labeled(source)
        return source.cached(f"labeled {self.name}", lambda: self._labeled(source))

    def _labeled(self, source: TableSource) -> np.ndarray:
        roles, nothing = self.label_roles(), [None] * len(source)
        columns = [source.column(role) if role in source.columns else nothing for role in roles]
        rows = zip(*columns, strict=True)
        return np.array([not any(value in (None, "") for value in row) for row in rows], bool)

    def describe_rows(self, source: TableSource, max_length: int) -> str:
        """Summary of the rows: their number, their labels, and how many are truncated."""
        parts = [f"{self.name}: {len(source):,} rows", self.describe_labels(source)]
        if missing := int((~self.labeled(source)).sum()):
            parts.append(f"{missing:,} without a label")
        if cut := self.cut_rows(source, max_length):
            parts.append(f"{cut:,} truncated to {self.input_length(max_length)} tokens")
        return "; ".join(filter(None, parts))

    def describe_labels(self, source: TableSource) -> str:
        """Frequencies of the labels in one line; empty if there are none."""
        return ""

    def cut_rows(self, source: TableSource, max_length: int) -> int:
        """Number of truncated rows; 0 for tasks that split long rows into windows."""
        items = self.items(source, max_length)
        if len(items) != len(source):
            return 0
        no_draws = np.zeros((len(items), self.num_uniforms))
        kept = self.layout(items, no_draws, source, max_length)["length"]
        whole = replace(self, max_length=0).layout(items, no_draws, source, _NO_LIMIT)
        return int((whole["length"] > kept).sum())

    def input_key(self) -> str:
        kind = type(self)
        if any(getattr(kind, x) is not getattr(TextTask, x) for x in ARRANGED_BY):
            return super().input_key()
        return self.text_key()

    def text_key(self) -> str:
        """The `input_key` of a task that arranges texts as this class does."""
        kind = type(self)
        return repr((kind.columns_of, kind.max_length, self.texts, self.max_length))

    def prepared(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> tuple[Self, dict[int, dict[str, Any]]]:
        """Of predictions for all rows, each of which must have a label."""
        made = dict(enumerate(map(self.read_prediction, predictions)))
        task = self.for_scoring(source, made)
        task.check_labels(source)
        return task, made

    def for_scoring(
        self: AnyTextTask, source: TableSource, predictions: Mapping[int, dict[str, Any]]
    ) -> AnyTextTask:
        """The task, resolved from these rows and predictions if no trained task is available."""
        return self

    def exported(self) -> ExportedHead:
        """Export settings of a task with a head that transformers supports."""
        return ExportedHead(name=self.share or self.name, outputs=self.head_outputs())

    def items(self, source: TableSource, max_length: int) -> np.ndarray:
        """(rows, 1): all rows."""
        return np.arange(len(source))[:, None]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """`item`, and `tokens` (texts,) of each text."""
        item = items[:, 0]
        lengths = [source.encoded(column).lengths[item] for column in self.columns_of(source)]
        special = source.vocabulary.around(len(lengths))
        kept = level(np.stack(lengths, 1), self.input_length(max_length) - special)
        return layouts(kept.sum(1) + special, item=item, tokens=kept)

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        item = int(layout["item"])
        columns = self.columns_of(source)
        pieces = [
            source.encoded(column).read(item, 0, many)
            for column, many in zip(columns, layout["tokens"].tolist(), strict=True)
        ]
        example = build_input(pieces, source.vocabulary)
        example.item = item
        return example


def check_are_names(labels: Sequence[str], where: str, example: str) -> None:
    """Raises UserError unless `labels` is a list of strings."""
    listed = isinstance(labels, Sequence) and not isinstance(labels, str)
    if not (listed and all(isinstance(name, str) for name in labels)):
        raise UserError(f"{where}: expected a list of names, such as {example}, got {labels!r:.60}")


@dataclass(frozen=True, kw_only=True)
class ClassesTask(TextTask):
    """A text task with class names as labels."""

    labels: Several[str] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Class names in order; by default those in the training rows, numbers in numerical order, then
    others alphabetically."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_are_names(self.labels, f"{self.where}.labels", "['0', '1']")

    def check_label_names(self) -> None:
        """Raises UserError if `labels` has a duplicate, or a name that no table cell can
        contain."""
        if len(set(self.labels)) < len(self.labels):
            raise UserError(f"{self.where}.labels: duplicate name")
        for name in self.labels:
            if not name.strip():
                raise UserError(f"{self.where}.labels: {name!r} is empty; name each class")
            if name != name.strip():
                raise UserError(
                    f"{self.where}.labels: {name!r} has spaces around it; those of tables have none"
                )

    def resolved(self: LabeledTask, source: TableSource) -> LabeledTask:
        """With the labels of the training rows, if the recipe gives none."""
        if self.labels:
            return self
        source.need(self.label_column, self.where)
        names = distinct(self.names_in(source))
        if not names:
            raise UserError(
                f"{self.where}: {source.name} has no label in column {self.label_column!r}"
            )
        if len(names) > MOST_LABELS:
            raise UserError(
                f"{self.where}: {len(names)} different labels in column {self.label_column!r} of "
                f"{source.name}; is this the right column? If so, list them in `labels`"
            )
        return replace(self, labels=tuple(names))

    def with_head_of(self, origin: Task) -> Task:
        """With the labels of the task that owns the shared head."""
        super().with_head_of(origin)
        assert isinstance(origin, ClassesTask)
        if self.labels and self.labels != origin.labels:
            raise UserError(
                f"{self.where}.labels: differ from those of tasks.{origin.name}, which owns the "
                "shared head; leave them out here"
            )
        return replace(self, labels=origin.labels)

    def names_in(self, source: TableSource) -> set[str]:
        """All labels in the source."""
        return {name for names in self.row_labels(source) for name in names}

    def row_labels(self, source: TableSource) -> Iterator[list[str]]:
        """The labels of each row."""
        values = source.single_values(self.label_column)
        return ([] if value is None else [str(value)] for value in values)

    def names_predicted(self, prediction: Mapping[str, Any]) -> set[str]:
        """The labels in a prediction."""
        return {str(prediction["label"])}

    def for_scoring(
        self: LabeledTask, source: TableSource, predictions: Mapping[int, dict[str, Any]]
    ) -> LabeledTask:
        """With all labels in the rows and predictions appended to its own."""
        source.need(self.label_column, self.where)
        names = set().union(*map(self.names_predicted, predictions.values()))
        return replace(self, labels=tuple(distinct(self.names_in(source) | names, self.labels)))

    def describe_labels(self, source: TableSource) -> str:
        if self.label_column not in source.columns:
            return ""
        numbers = class_numbers(self.labels)
        counts = Counter(numbers.get(name) for names in self.row_labels(source) for name in names)
        known = [f"{name} {counts[i]:,}" for i, name in enumerate(self.labels) if i in counts]
        more = f", ... ({len(self.labels)} labels)" if len(self.labels) > _COUNTED else ""
        return ", ".join(known[:_COUNTED]) + more if known else ""

    def describe(self, source: TableSource) -> str:
        """Notes on odd class names, and on a question that is not read; may be empty."""
        if self.label_column not in source.columns:
            return ""
        notes = label_notes(self.names_in(source), rows=len(source))
        lines = [f"{self.name}: labels: {note}" for note in notes]
        if "question" in source.columns and "question" not in self.columns_of(source):
            lines.append(
                f"{self.name}: the column question is not read; `texts: [question, text_a]` reads "
                "it, too"
            )
        return "\n".join(lines)

    def unknown_label(self, name: str, source: TableSource, item: int) -> UserError:
        """The error of a row whose label is none of the task's."""
        known = ", ".join(self.labels[:8]) + (", ..." if len(self.labels) > 8 else "")
        return UserError(
            f"{source.where(item)}: {self.label_column}: unknown label {name!r}"
            f"{did_you_mean(name, self.labels)}; {self.where} has {known}"
        )


def level(lengths: np.ndarray, most: int | np.ndarray) -> np.ndarray:
    """Truncated lengths (n, texts) of texts with `lengths` (n, texts) tokens, at most `most` per
    row.

    The longest text is truncated first, of equally long ones the later: BERT's truncation, for any
    number of texts.

    >>> level(np.array([[3, 9], [9, 9], [2, 2]]), 11)
    array([[3, 8], [6, 5], [2, 2]])
    """
    most = np.broadcast_to(np.asarray(most, np.int64), len(lengths))
    if (lengths.sum(1) <= most).all():  # as one text that somebody waits for usually does
        return lengths.astype(np.int64)
    low, high = np.zeros(len(lengths), np.int64), lengths.max(1, initial=0)
    while (low < high).any():  # binary search for the largest cap with which the row fits
        middle = (low + high + 1) // 2
        fits = np.minimum(lengths, middle[:, None]).sum(1) <= most
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    kept = np.minimum(lengths, low[:, None])
    left = most - kept.sum(1)
    longer = lengths > low[:, None]
    return kept + (longer & (np.cumsum(longer, 1) <= left[:, None]))


def missing(values: Sequence[Any], source: TableSource, what: str) -> None:
    """Raises UserError at the first row without a value."""
    for item, value in enumerate(values):
        if value is None or value == "":
            raise UserError(f"{source.where(item)}: {what} is empty")


@dataclass(frozen=True, kw_only=True)
class RowTexts:
    """The texts of all rows of a source."""

    tokens: TokenizedColumn
    starts: np.ndarray  # (rows + 1,) the first text of each row
    called: str
    """What messages call them: `texts`, `choices`."""

    @cached_property
    def counts(self) -> np.ndarray:
        """(rows,) the number of texts."""
        return np.diff(self.starts)

    def of(self, item: int) -> range:
        """The places of a row's texts in `tokens`."""
        return range(self.starts[item], self.starts[item + 1])

    def cut(
        self,
        items: np.ndarray,
        added: np.ndarray,
        source: TableSource,
        most: int | np.ndarray,
        max_length: int | np.ndarray,
    ) -> np.ndarray:
        """(items, most texts) int64: tokens of each text of these rows, 0 where there is none.

        `added` (items,): tokens that come with each text. A text has at most `most` tokens with
        them, and those of a row have `max_length` together, for which the longest are cut; numbers,
        or (items,) each. Raises UserError if too little is left."""
        most, max_length = (np.broadcast_to(x, len(items)) for x in (most, max_length))
        number = self.counts[items]
        places = np.arange(self.counts.max(initial=1)) < number[:, None]
        nth = self.starts[items][:, None] + np.arange(places.shape[1])
        lengths = self.tokens.lengths[np.minimum(nth, len(self.tokens.lengths) - 1)]
        whole = np.where(places, np.minimum(lengths + added[:, None], most[:, None]), 0)
        kept = level(whole, max_length)
        for row in np.flatnonzero(((kept < np.minimum(whole, SHORTEST)) & places).any(1)):
            raise UserError(
                f"{source.where(items[row])}: {number[row]} {self.called} leave fewer than "
                f"{SHORTEST} tokens for each in a row of {max_length[row]}; raise "
                "`length`"
            )
        return kept


def tokenize(rows: Sequence[Sequence[str]], source: TableSource, called: str) -> RowTexts:
    """The texts of the rows of a source."""
    starts = np.cumsum([0, *map(len, rows)])
    tokens = encode([text for row in rows for text in row], source.tokenizer)
    return RowTexts(tokens=tokens, starts=starts, called=called)


@dataclass(frozen=True, kw_only=True)
class PositiveClassTask(ClassesTask):
    """A task of which one class is scored by its probability, besides what is predicted."""

    recall_at_precision: Share = 0.0
    """Also report, as `recall_at_precision`, the highest recall of the positive class at which its
    precision reaches this; 0: do not."""
    precision_at_threshold: Share = 0.0
    """Also report, as `precision_at_threshold`, the precision of the positive class over the rows
    where its probability exceeds this; 0: do not."""

    @property
    def scored_at(self) -> str:
        """The first of these keys that is set; empty: none."""
        keys = ("recall_at_precision", "precision_at_threshold")
        return next((key for key in keys if getattr(self, key)), "")

    def true_labels(self, source: TableSource) -> list[Any]:
        if self.label_column not in source.columns:
            return super().true_labels(source)
        return source.single_values(self.label_column)

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        """Its label as the name of a class, which other programs write as a number; and `ordered`:
        whether it is known which classes its `probs` are of. Labels found in a table are all
        classes, but maybe not in the order of the task that predicted them."""
        made = super().read_prediction(stored)
        return {**made, "label": str(made["label"]), "ordered": bool(self.labels)}
