"""Documents cut into windows, which an encoder with memories reads one after another.

    document    [CLS] a b c d e f g [SEP]        one text, built and labelled as a whole
    window 0    a b c d [SEP] [CLS]              each a row: its last token is [CLS]
    window 1    c d e f [SEP] [CLS]
    window 2    e f g [SEP] padding [CLS]        what is left; padding stands before the last token
    again       window 0, 1, 2                   the second reading remembers the whole document

Since a document is labelled before it is cut, a token that is masked is masked in every window and
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
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import SourceT
from palm_ds.model.inputs.batch import Batch
from palm_ds.text.tokens import SpecialTokens

LONGEST = 1 << 40
"""Tokens of a document: no limit."""
_AROUND = 2  # [SEP] and [CLS] of a window, and of a document
_SAMPLE = 4096
_KEPT = 256


@dataclass(frozen=True, kw_only=True)
class DocumentSettings(Settings):
    """The way in which an encoder with memories reads documents."""

    stride: NonNegativeInt = 0
    """Tokens from the beginning of a window to that of the next, as many as a window has at most;
    0: as many as the encoder's memory, as in ERNIE's reader, so that most tokens are in several
    windows."""
    readings: Annotated[int, Field(ge=1, le=2)] = 2
    """How often a document is read; the second time each window remembers what the whole document
    was (ERNIE-Doc's retrospective feed)."""
    counted: Literal["last", "all"] = "last"
    """Which readings have labels of tokens, and of texts where every window has one."""
    remembers: Literal["document", "slot", "nothing"] = "document"
    """Of what a window knows: of the earlier windows of its document; of all that was in its slot
    before, other documents too, as in ERNIE's scripts; or nothing, to compare with."""


@dataclass(frozen=True, kw_only=True)
class DocumentWindows:
    """Rows that documents are cut into."""

    length: int
    """Tokens of a row."""
    stride: int
    settings: DocumentSettings

    @classmethod
    def of(cls, settings: DocumentSettings, length: int, memory: int) -> DocumentWindows:
        return cls(
            length=length,
            stride=min(settings.stride or memory, length - _AROUND),
            settings=settings,
        )

    @property
    def room(self) -> int:
        """Tokens of a document in a window, at most."""
        return self.length - _AROUND

    def count(self, tokens: np.ndarray) -> np.ndarray:
        """(n,) windows of documents of these numbers of tokens, in one reading."""
        return 1 + np.maximum(-(-(tokens - self.room) // self.stride), 0)

    def place(self, number: int, tokens: int) -> tuple[int, int]:
        """The tokens [start, end) of a window of a document with that number of tokens."""
        start = number * self.stride
        return start, min(start + self.room, tokens)

    def cut(
        self, document: Example, number: int, vocabulary: SpecialTokens, every: Mapping[str, bool]
    ) -> Example:
        """The window `number` of all readings, with the document's labels in it. `every`: whether
        a task's label of the whole text is in every window that counts."""
        tokens = len(document) - _AROUND
        windows = int(self.count(np.array([tokens]))[0])
        reading, within = divmod(number, windows)
        start, end = self.place(within, tokens)
        last = reading == self.settings.readings - 1
        window = self._text(document, start, end, vocabulary)
        if last or self.settings.counted == "all":
            ends = last and within == windows - 1
            for task, (where, targets) in document.labels.items():
                whole = where == 0
                inside = (where > start) & (where <= end)
                kept = inside | (whole & (ends or every.get(task, False)))
                at = np.where(whole, self.length - 1, where - 1 - start)[kept]
                window.labels[task] = at, np.asarray(targets)[kept]
        return window

    def _text(self, document: Example, start: int, end: int, vocabulary: SpecialTokens) -> Example:
        """A row without labels."""
        inside, size = slice(start + 1, end + 1), end - start

        def row(values: np.ndarray, fill: int) -> np.ndarray:
            out = np.full(self.length, fill, values.dtype)
            out[:size] = values[inside]
            return out

        def ids(values: np.ndarray) -> np.ndarray:
            out = row(values, vocabulary.pad)
            out[size], out[-1] = vocabulary.sep, vocabulary.cls
            return out

        window = Example(
            input_ids=ids(document.input_ids),
            token_type_ids=row(document.token_type_ids, 0),
            source_offsets=row(document.source_offsets, -1),
            annotations={name: row(values, 0) for name, values in document.annotations.items()},
            item=document.item,
        )
        window.unmasked_ids = ids(document.unmasked_ids)
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
            windows=windows,
        )

    def layouts(self, n: np.ndarray) -> np.ndarray:
        """Those of whole documents, each with its first window."""
        whole = super().layouts(n)
        table = np.zeros(len(whole), [*whole.dtype.descr, ("window", np.int64)])
        for name in whole.dtype.names or ():
            table[name] = whole[name]
        return table

    def counts(self, layouts: np.ndarray) -> np.ndarray:
        """(n,) windows of documents, in all readings."""
        return self.windows.count(layouts["length"] - _AROUND) * self.windows.settings.readings

    def example(self, n: int, layout: np.void, rate: float | None = None) -> Example:
        """A window of the n-th document."""
        whole = self._documents.get((n, rate), lambda: self._whole(n, layout, rate))
        every = {task.name: task.labels_windows == "every" for task in self.tasks}
        number, vocabulary = int(layout["window"]), self.source.vocabulary
        return self.windows.cut(whole, number, vocabulary, every)

    def _whole(self, n: int, layout: np.void, rate: float | None) -> Example:
        example, vocabulary = super().example(n, layout, rate), self.source.vocabulary
        ends = example.input_ids[[0, -1]].tolist()
        if example.sub_lengths or ends != [vocabulary.cls, vocabulary.sep]:
            raise UserError(
                f"tasks.{self.tasks[0].name}: its examples are no single texts, as documents are"
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
        tokens = int(sampled["length"].sum()) - _AROUND * len(sampled)
        rows = int(self.counts(sampled).sum())
        line = (
            f"{self.name}: documents of {tokens / len(sampled):,.0f} tokens on average in "
            f"{rows / len(sampled):,.1f} windows of up to {own.room} tokens, every {own.stride}, "
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
