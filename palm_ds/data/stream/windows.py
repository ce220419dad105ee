"""Documents cut into windows, which an encoder with memories reads one after another.

    document    [CLS] a b c d e f g [SEP]        one text, built and labeled as a whole
    window 0    a b c d [SEP] [CLS]              each a row: its last token is [CLS]
    window 1    c d e f [SEP] [CLS]
    window 2    e f g [SEP] padding [CLS]        what is left; padding stands before the last token
    again       window 0, 1, 2                   the second reading remembers the whole document

    question and context    [CLS] q [SEP] a b c d e f [SEP]
    window 0                [CLS] a b c d [SEP] q [SEP]
    window 1                [CLS] c d e f [SEP] q [SEP] padding

Since a document is labeled before it is cut, a token that is masked is masked in every window and
reading: no memory has seen it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt

from palm_ds.common.errors import UserError
from palm_ds.common.lru_cache import RecentlyUsed
from palm_ds.common.settings import Settings
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.data.tasks.documents import WindowPlace
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import SourceT
from palm_ds.model.inputs.batch import Batch
from palm_ds.text.tokens import SpecialTokens

LONGEST = 1 << 40
"""Tokens of a document: no limit."""
ALONE = -1
"""Instead of a number of repeated tokens: a document is a single text."""
_AROUND = 2  # [SEP] and [CLS] of a window of a single text, and of that text
_SAMPLE = 4096
_KEPT = 256


@dataclass(frozen=True, kw_only=True)
class DocumentSettings(Settings):
    """Settings for reading documents window by window, with an encoder that has memories."""

    stride: NonNegativeInt = 0
    """Tokens from the start of a window to the start of the next, at most the length of a window.
    0: the length of the encoder's memory, as in ERNIE's reader, so that most tokens are in several
    windows."""
    readings: Annotated[int, Field(ge=1, le=2)] = 2
    """How often a document is read. In the second reading each window remembers the whole document
    (ERNIE-Doc's retrospective feed)."""
    counted: Literal["last", "all"] = "last"
    """Which readings have labels: the last, or all. A label that a document has only once is always
    at the last window of the last reading."""
    remembers: Literal["document", "slot", "nothing"] = "document"
    """What the memory of a window holds. document: the earlier windows of its document; slot: all
    earlier windows in its slot of the batch, those of other documents too, as in ERNIE's scripts;
    nothing: for comparison."""


@dataclass(frozen=True, kw_only=True)
class DocumentWindows:
    """Rows that documents are cut into. `repeated`: the tokens of a text that every window of a
    document has beside its own; ALONE: there is none."""

    length: int
    """Tokens of a row."""
    stride: int
    settings: DocumentSettings
    beside: int = 3
    """[CLS] and [SEP] of two texts."""

    @classmethod
    def of(cls, settings: DocumentSettings, length: int, memory: int) -> DocumentWindows:
        return cls(
            length=length,
            stride=min(settings.stride or memory, length - _AROUND),
            settings=settings,
        )

    def tokens(self, lengths: np.ndarray, repeated: np.ndarray | int) -> np.ndarray:
        """(n,) of the documents that examples of these lengths are of."""
        return lengths - np.where(repeated == ALONE, _AROUND, self.beside + repeated)

    def kept(self, repeated: np.ndarray | int) -> np.ndarray:
        """(n,) tokens of repeated texts in each window: at most half of what is free."""
        return np.minimum(repeated, (self.length - self.beside) // 2)

    def room(self, repeated: np.ndarray | int) -> np.ndarray:
        """(n,) tokens of a document in a window, at most."""
        two = self.length - self.beside - self.kept(repeated)
        return np.where(repeated == ALONE, self.length - _AROUND, two)

    def count(self, tokens: np.ndarray, repeated: np.ndarray | int) -> np.ndarray:
        """(n,) windows of documents of these numbers of tokens, in one reading."""
        room = self.room(repeated)
        return 1 + np.maximum(-(-(tokens - room) // np.minimum(self.stride, room)), 0)

    def place(self, number: int, tokens: int, repeated: int) -> WindowPlace:
        """That of a window of a document with that number of tokens."""
        size = int(self.room(repeated))
        step = min(self.stride, size)
        first = number * step
        return WindowPlace(first, min(first + size, tokens), size, step, tokens)

    def cut(
        self,
        document: Example,
        number: int,
        vocabulary: SpecialTokens,
        every: Mapping[str, bool],
        repeated: int = ALONE,
    ) -> tuple[Example, WindowPlace]:
        """The window `number` of all readings, with the document's labels in it. `every`: whether
        a task's label of the whole text is in every window that counts."""
        tokens = self.tokens(np.array(len(document)), repeated)
        windows = int(self.count(tokens, repeated))
        reading, within = divmod(number, windows)
        place = self.place(within, int(tokens), repeated)
        taken = self._taken(place, len(document), repeated)
        window = _read(document, taken, vocabulary.pad)
        if repeated != ALONE:
            size, beside = int((taken >= 0).sum()), int(self.kept(repeated)) + 1
            types = document.token_type_ids[[0, -1]]
            window.token_type_ids[:size] = np.repeat(types, [size - beside, beside])
        last = reading == self.settings.readings - 1
        if last or self.settings.counted == "all":
            ends = last and within == windows - 1
            at = np.full(len(document), -1)
            at[taken[taken >= 0]] = np.flatnonzero(taken >= 0)
            for task, (where, targets) in document.labels.items():
                kept = (at[where] >= 0) & ((where > 0) | ends | every.get(task, False))
                order = np.argsort(at[where[kept]], kind="stable")
                window.labels[task] = at[where[kept]][order], np.asarray(targets)[kept][order]
        return window, place

    def _taken(self, place: WindowPlace, length: int, repeated: int) -> np.ndarray:
        """(length of a row,) the token of a whole example at each place of a window; -1: padding.
        That of a single text ends in [CLS], which padding stands before."""
        taken = np.full(self.length, -1)
        if repeated == ALONE:
            text = 1 + np.arange(place.first, place.last)
            taken[: len(text) + 1] = [*text, length - 1]
            taken[-1] = 0
            return taken
        begin = length - 1 - place.length
        text = begin + np.arange(place.first, place.last)
        between = np.arange(1 + repeated, begin)
        beside = 1 + np.arange(int(self.kept(repeated)))
        whole = np.concatenate([[0], text, between, beside, [length - 1]])
        taken[: len(whole)] = whole
        return taken


def _read(document: Example, taken: np.ndarray, pad: int) -> Example:
    """The tokens of a document that a window takes, without labels."""

    def row(values: np.ndarray, fill: int) -> np.ndarray:
        return np.where(taken >= 0, values[taken], np.array(fill, values.dtype))

    window = Example(
        input_ids=row(document.input_ids, pad),
        token_type_ids=row(document.token_type_ids, 0),
        source_offsets=row(document.source_offsets, -1),
        annotations={name: row(values, 0) for name, values in document.annotations.items()},
        item=document.item,
        grouped_labels=set(document.grouped_labels),
    )
    window.unmasked_ids = row(document.unmasked_ids, pad)
    return window


@dataclass(frozen=True)
class DocumentDataset(TaskGroupDataset[SourceT]):
    """The windows of documents: a layout says which `window` of the n-th document it is."""

    windows: DocumentWindows = field(kw_only=True)

    @classmethod
    def of(
        cls, dataset: TaskGroupDataset[SourceT], windows: DocumentWindows
    ) -> DocumentDataset[SourceT]:
        """The same task group and source."""
        return cls(
            name=dataset.name,
            tasks=dataset.tasks,
            task_id=dataset.task_id,
            source=dataset.source,
            seed=dataset.seed,
            max_length=LONGEST,
            fixed=dataset.fixed,
            segments=dataset.segments,
            windows=replace(windows, beside=dataset.source.vocabulary.around(2)),
        )

    def layouts(self, n: np.ndarray) -> np.ndarray:
        """Those of whole documents, each with its first window, and how many of its tokens are
        `repeated` in every window."""
        whole = super().layouts(n)
        added = [("window", np.int64), ("repeated", np.int64)]
        table = np.zeros(len(whole), [*whole.dtype.descr, *added])
        for name in whole.dtype.names or ():
            table[name] = whole[name]
        repeated = self.tasks[0].repeated(whole)
        table["repeated"] = ALONE if repeated is None else repeated
        return table

    def tokens(self, layouts: np.ndarray) -> np.ndarray:
        """(n,) of documents, which windows cut."""
        return self.windows.tokens(layouts["length"], layouts["repeated"])

    def counts(self, layouts: np.ndarray) -> np.ndarray:
        """(n,) windows of documents, in all readings."""
        once = self.windows.count(self.tokens(layouts), layouts["repeated"])
        return once * self.windows.settings.readings

    def example(self, n: int, layout: np.void, rate: float | None = None) -> Example:
        """A window of the n-th document."""
        whole = self._documents.get((n, rate), lambda: self._whole(n, layout, rate))
        every = {task.name: task.labels_windows == "every" for task in self.tasks}
        number, repeated = int(layout["window"]), int(layout["repeated"])
        window, place = self.windows.cut(whole, number, self.source.vocabulary, every, repeated)
        for task in self.tasks:
            task.adapt_window(window, place, self.order.source_of(n))
        return window

    def _whole(self, n: int, layout: np.void, rate: float | None) -> Example:
        example, vocabulary = super().example(n, layout, rate), self.source.vocabulary
        ends = example.input_ids[[0, -1]].tolist()
        if example.sub_lengths or ends != [vocabulary.cls, vocabulary.sep]:
            raise UserError(
                f"tasks.{self.tasks[0].name}: its examples are not single texts, as documents must "
                "be"
            )
        return example

    @cached_property
    def _documents(self) -> RecentlyUsed[tuple[int, float | None], Example]:
        return RecentlyUsed(_KEPT)

    @cached_property
    def _sampled(self) -> np.ndarray:
        return self.layouts(np.arange(self.order.up_to(_SAMPLE)))

    @cached_property
    def mean_tokens(self) -> Fraction:
        """Row tokens of a document, on average."""
        windows = int(self.counts(self._sampled).sum())
        return Fraction(windows * self.windows.length, len(self._sampled))

    def describe(self) -> str:
        sampled, own = self._sampled, self.windows
        tokens, rows = int(self.tokens(sampled).sum()), int(self.counts(sampled).sum())
        room = int(own.room(sampled["repeated"]).max())
        line = (
            f"{self.name}: documents of {tokens / len(sampled):,.0f} tokens on average in "
            f"{rows / len(sampled):,.1f} windows of up to {room} tokens, every {own.stride}, "
            f"read {'twice' if own.settings.readings == 2 else 'once'}: "
            f"{tokens / rows:,.1f} fresh tokens a row"
        )
        return "\n".join(filter(None, [super().describe(), line]))


def as_windows(batch: Batch, documents: list[int], pad: int) -> Batch:
    """A batch of windows, one a row, of these documents."""
    padding = batch.input_ids == pad
    return replace(
        batch,
        sequence_ids=batch.sequence_ids.masked_fill(padding, -1),
        documents=torch.tensor(documents, dtype=torch.int64),
    )
