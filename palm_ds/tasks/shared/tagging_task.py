"""Base class of tasks that tag words: reads words and tags from tables.

    tokens, tags      lists in a row
    text_a, spans     a text, split into words or characters, and spans of its characters

Training may use another tagging scheme than the table (palm_ds/tasks/metrics/chunks.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import numpy as np

from palm_ds.common.config import Several
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.messages import counted
from palm_ds.common.settings import one_of
from palm_ds.data.sources.table import UNITS, TableSource, TokenizedWords, chinese_share
from palm_ds.data.tasks.task import Task
from palm_ds.tasks.metrics.chunks import (
    LETTERS_OF_OTHERS,
    Chunk,
    as_tag,
    check_scheme,
    chunks,
    convert,
    split_tag,
    tags_of,
)
from palm_ds.tasks.shared import tag_schemes
from palm_ds.tasks.shared.label_notes import alike_notes
from palm_ds.tasks.shared.text_task import MOST_LABELS, TextTask, check_are_names

SPANS = "spans"

Tagged = TypeVar("Tagged", bound="TagsTask")


@dataclass(frozen=True, kw_only=True)
class TagsTask(TextTask):
    """A text task with a tag for every word."""

    label_column: str = "tags"
    """Tag column; if the table has no `tags`, `spans` are read."""
    labels: Several[str] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Tags of the head; by default all tags of the scheme for the types in the training rows,
    grouped by type, O last."""
    scheme: str = ""
    """Scheme of the tags in the table and in predictions: BIO, IOB1, IOE1, IOE2, BIOES, IO, or
    `none` for tags that are not chunks; by default detected."""
    trained_scheme: str = ""
    """Scheme used for training; by default `scheme`."""
    units: Annotated[str, one_of(UNITS, "")] = ""
    """How to split a text without `tokens`: words or characters; by default characters if the
    training texts are mostly Chinese."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("scheme", "trained_scheme"):
            if value := getattr(self, key):
                try:
                    tag_schemes.named(value)
                except UserError as error:
                    raise UserError(f"{self.where}.{key}: {error}") from None
        if len(self.texts) > 1:
            raise UserError(f"{self.where}.texts: {len(self.texts)} columns; tagging reads one")
        check_are_names(self.labels, f"{self.where}.labels", "['B-PER', 'I-PER', 'O']")
        if len(set(self.labels)) < len(self.labels):
            raise UserError(f"{self.where}.labels: duplicate tag")

    # ---- columns ----

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        """The column of the words."""
        listed = "tokens" in source.columns and self.labeled_by(source) != SPANS
        (column,) = tuple(self.texts) or ("tokens" if listed else "text_a",)
        source.need(column, self.where)
        return (column,)

    def labeled_by(self, source: TableSource) -> str:
        """The label column; empty if the table has none."""
        if self.label_column in source.columns:
            return self.label_column
        return SPANS if self.label_column == "tags" and SPANS in source.columns else ""

    def label_roles(self) -> tuple[str, ...]:
        spans = (SPANS,) if self.label_column == "tags" else ()
        return (self.label_column, *spans)

    def true_labels(self, source: TableSource) -> list[Any]:
        """The tags, or the spans, of each row."""
        column = self.labeled_by(source)
        return source.column(column) if column else [None] * len(source)

    def labeled(self, source: TableSource) -> np.ndarray:
        """(rows,) bool: a row has tags or spans, perhaps none in its text."""
        if not (column := self.labeled_by(source)):
            return np.zeros(len(source), bool)
        return np.array([label is not None for label in source.column(column)], bool)

    def places(self, source: TableSource) -> list[np.ndarray]:
        """(words, 2) per row: the characters of its words."""
        return source.word_places(self.columns_of(source)[0], self.units or "words")

    def words(self, source: TableSource) -> TokenizedWords:
        """The words of all rows, encoded."""
        return source.cached(
            f"words {self.name} {self.units}",
            lambda: source.words(self.columns_of(source)[0], self.units or "words"),
        )

    @property
    def written(self) -> str:
        """The scheme of the rows and the predictions."""
        return tag_schemes.named(self.scheme or "BIO")

    @property
    def trained(self) -> str:
        """The scheme of the head's tags."""
        return tag_schemes.named(self.trained_scheme or self.scheme or "BIO")

    # ---- settings resolved from the training rows ----

    def resolved(self: Tagged, source: TableSource) -> Tagged:
        """With the scheme, units and tags of the training rows."""
        task = replace(self, units=self.units or _usual_unit(source, self.columns_of(source)[0]))
        if self.labeled_by(source):
            source = replace(source, numbers=source.numbers[self.labeled(source)])
        if self.labeled_by(source) == SPANS:
            types = {span["type"] for row in source.column(SPANS) for span in row or []}
        else:
            task, types = task._with_scheme(source)
        task = replace(task, scheme=task.written, trained_scheme=task.trained)
        if (scheme := task.trained) != tag_schemes.NONE:
            try:
                tag_schemes.check_tags(task.labels, scheme)
            except UserError as error:
                raise UserError(f"{self.where}.labels: {error}") from None
            task = replace(task, labels=tuple(as_tag(*split_tag(tag)) for tag in task.labels))
        return task if task.labels else replace(task, labels=task._labels(types, source))

    def _with_scheme(self: Tagged, source: TableSource) -> tuple[Tagged, set[str]]:
        """The task with the scheme of the rows, and the types in them."""
        rows = [self._row(source, item) for item in range(len(source))]
        scheme = self.scheme or ("" if tag_schemes.of_chunks(rows) else tag_schemes.NONE)
        if not self.scheme and scheme and (odd := tag_schemes.in_other_notation(rows)):
            raise UserError(
                f"{self.where}: {source.name}: {odd!r} seems to be a tag of chunks; write B-TYPE, "
                "I-TYPE and O, or give `scheme: none` if such tags are classes"
            )
        if tag_schemes.named(scheme or "BIO") == tag_schemes.NONE:
            return replace(self, scheme=tag_schemes.NONE), {tag for row in rows for tag in row}
        for item in range(len(source)):
            self._check_tags(source, item, tag_schemes.named(scheme) if scheme else "")
        task = replace(self, scheme=scheme or tag_schemes.found_scheme(rows))
        return task, {chunk.type for row in rows for chunk in chunks(row)}

    def for_scoring(
        self: Tagged, source: TableSource, predictions: Mapping[int, dict[str, Any]]
    ) -> Tagged:
        """With the scheme of the rows and without a fixed set of tags."""
        unit = self.units or _usual_unit(source, self.columns_of(source)[0])
        task = replace(self, units=unit, labels=())
        return task if self.labeled_by(source) == SPANS else task._with_scheme(source)[0]

    def with_head_of(self: Tagged, origin: Task) -> Tagged:
        """With the tags and the training scheme of the task that owns the shared head; the scheme
        of the rows may differ."""
        super().with_head_of(origin)
        assert isinstance(origin, TagsTask)
        for key in ("labels", "trained_scheme"):
            if getattr(self, key) not in ((), "", getattr(origin, key)):
                raise UserError(
                    f"{self.where}.{key}: differs from that of tasks.{origin.name}, which owns "
                    "the shared head; leave it out here"
                )
        return replace(self, labels=origin.labels, trained_scheme=origin.trained_scheme)

    def _labels(self, types: set[str], source: TableSource) -> tuple[str, ...]:
        if not types:
            column = self.labeled_by(source)
            raise UserError(f"{self.where}: {source.name} has no tag but O in column {column!r}")
        none = self.trained == tag_schemes.NONE
        labels = tuple(sorted(types)) if none else tag_schemes.labels_of(types, self.trained)
        if len(labels) > MOST_LABELS:
            raise UserError(
                f"{self.where}: {len(labels)} different tags in column "
                f"{self.labeled_by(source)!r} of {source.name}; is this the right column?"
            )
        return labels

    def describe(self, source: TableSource) -> str:
        """Describe what is odd about the tags, and those that training changes or leaves out; empty
        if nothing is."""
        if self.labeled_by(source) == SPANS:
            items = np.flatnonzero(self.labeled(source)).tolist()
            found = [self._chunks(source, item) for item in items]
            notes = _span_notes(self.name, [each[1:] for each in found])
            return _joined(notes, _merge_note(self.name, [row for row, *_ in found], self.trained))
        if not self.labeled_by(source):
            return ""
        rows = source.column(self.labeled_by(source))
        notes = _name_notes(self.name, rows, self.written)
        notes = notes or _violation_note(self.name, rows, self.written, source)
        found = [] if self.written == tag_schemes.NONE else [chunks(row or []) for row in rows]
        return _joined(notes, _merge_note(self.name, found, self.trained))

    # ---- labels ----

    def check(self, source: TableSource, *, labeled: bool) -> None:
        self.words(source)
        if labeled:
            self.check_labels(source)

    def check_labels(self, source: TableSource) -> None:
        if not self.labeled_by(source):
            source.need(self.label_column, self.where)
        for item in range(len(source)):
            self.known_tags(source, item)

    def targets(self, source: TableSource) -> np.ndarray:
        """(words of all rows,) int64 tags; -1 in rows without known labels."""
        return source.cached(
            f"tags {self.trained} {self.name} {self.labels}", lambda: self._targets(source)
        )

    def _targets(self, source: TableSource) -> np.ndarray:
        words = self.words(source)
        number = {label: i for i, label in enumerate(self.labels)}
        targets = np.full(len(words.firsts), -1, np.int64)
        for item in range(len(source) if self.labeled_by(source) else 0):
            try:
                tags = self.known_tags(source, item)
            except UserError:  # `check` reports these
                continue
            targets[words.of(item)] = [number[tag] for tag in tags]
        return targets

    def known_tags(self, source: TableSource, item: int) -> list[str]:
        """The tags of a row in the scheme of the head. Raises UserError if a tag is missing or
        unknown; a task without `labels` accepts all tags."""
        expected = self.expected(source, item, self.trained)
        for place, tag in enumerate(expected, 1):
            if self.labels and tag not in self.labels:
                raise UserError(
                    f"{source.where(item)}: {self.labeled_by(source)}, word {place}: unknown tag "
                    f"{tag!r}{suggest(tag, self.labels)}; {self.where} has "
                    f"{', '.join(self.labels[:12])}{', ...' * (len(self.labels) > 12)}"
                )
        return expected

    def expected(self, source: TableSource, item: int, scheme: str) -> list[str]:
        """The tags of a row in a scheme, not checked against `labels`."""
        column, size = self.labeled_by(source), len(self.places(source)[item])
        if column == SPANS:
            if source.column(SPANS)[item] is None:
                raise UserError(f"{source.where(item)}: {SPANS} is empty")
            return tags_of(self._chunks(source, item)[0], size, scheme)
        row = self._row(source, item)
        if len(row) != size:
            words = counted(size, "word")
            raise UserError(f"{source.where(item)}: {column}: {len(row)}, but the text has {words}")
        if self.written == tag_schemes.NONE:
            return row
        self._check_tags(source, item, self.written)
        return convert(row, scheme)

    def _row(self, source: TableSource, item: int) -> list[str]:
        """The tags of a row as in the table."""
        if not (column := self.labeled_by(source)):
            source.need(self.label_column, self.where)
        row = source.column(column)[item]
        if not isinstance(row, list):
            got = "nothing" if row is None else repr(row)
            raise UserError(f"{source.where(item)}: {column}: expected a list of tags, got {got}")
        return row

    def _check_tags(self, source: TableSource, item: int, scheme: str) -> None:
        try:
            tag_schemes.check_tags(self._row(source, item), scheme)
        except UserError as error:
            where = f"{source.where(item)}: {self.labeled_by(source)}"
            raise UserError(f"{where}: {error}") from None

    def _chunks(self, source: TableSource, item: int) -> tuple[list[Chunk], int, int]:
        row = source.column(SPANS)[item] or []
        return tag_schemes.chunks_of_spans(row, self.places(source)[item])


def _name_notes(task: str, rows: Sequence[Sequence[str] | None], scheme: str) -> str:
    """Notes on the tags of rows by their names, a line each."""
    names, others = {tag for row in rows for tag in row or []}, []
    if scheme != tag_schemes.NONE:
        others = _other_letters(names)
        names = {tag[2:] for tag in names if tag != "O"}
    notes = [*others, *alike_notes(names), *_number_notes(names)]
    return "\n".join(f"{task}: tags: {note}" for note in notes)


def _span_notes(task: str, changes: Sequence[tuple[int, int]]) -> str:
    """A note on the spans that are left out and on those that are extended, by rows."""
    out, moved = (sum(change[i] for change in changes) for i in (0, 1))
    notes = [f"{out:,} spans overlap a longer one and are left out"] * (out > 0)
    notes += [f"{moved:,} spans are extended to whole words"] * (moved > 0)
    return f"{task}: {'; '.join(notes)}" if notes else ""


def _violation_note(
    task: str, rows: Sequence[Sequence[str] | None], scheme: str, source: TableSource
) -> str:
    """A note on the rows that violate their scheme."""
    if scheme == tag_schemes.NONE:
        return ""
    faults = ((i, check_scheme(row, scheme)) for i, row in enumerate(rows) if row)
    broken = [(i, fault) for i, fault in faults if fault]
    if not broken:
        return ""
    first, wrong = broken[0]
    return (
        f"{task}: {len(broken):,} rows violate {scheme} and are read by conlleval's rules; the "
        f"first: {source.where(first)}, tag {wrong.position + 1}: {wrong.tag} for {wrong.right}"
    )


def _merge_note(task: str, rows: Sequence[Sequence[Chunk]], scheme: str) -> str:
    """A note on the chunks that the scheme of the head merges."""
    if scheme != "IO":
        return ""
    merged = sum(
        before.end == chunk.start and before.type == chunk.type
        for row in rows
        for before, chunk in pairwise(row)
    )
    if not merged:
        return ""
    return (
        f"{task}: {merged:,} chunks directly follow another of their type; the head learns IO, "
        "which merges the two, and scores count both as not found"
    )


def _joined(*notes: str) -> str:
    return "\n".join(filter(None, notes))


def _other_letters(names: Collection[str]) -> list[str]:
    """A note on letters of BILOU and BMES."""
    found = [
        (x, ours) for x, ours in LETTERS_OF_OTHERS.items() if any(f"{x}-" == n[:2] for n in names)
    ]
    read = ", ".join(f"{letter} as {ours}" for letter, ours in found)
    return [f"{read} (BIOES), also in predictions"] if found else []


def _number_notes(names: Collection[str]) -> list[str]:
    """A note on tags that are numbers, probably of a dataset that lost their names."""
    numbers = [name for name in names if name.isdecimal()]
    some = ", ".join(sorted(numbers)[:3])
    return [f"numbers ({some}) are classes of their own; give their names"] if numbers else []


def _usual_unit(source: TableSource, column: str) -> str:
    return "characters" if chinese_share(source.column(column)) > 0.5 else "words"
