"""The part that a task takes in documents, which an encoder with memories reads in windows.

    document   [CLS] a b c d e [SEP]              its windows   a b c [SEP] [CLS], c d e [SEP] [CLS]
    document   [CLS] q [SEP] a b c d e [SEP]      of a task     [CLS] a b c [SEP] q [SEP],
                                                  that repeats  [CLS] c d e [SEP] q [SEP]

A document is built and labeled as a whole, and then cut (data/stream/windows.py). Of two texts, a
task may repeat the first in every window, as a question stands beside each window of its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example

SourceT = TypeVar("SourceT", bound=CorpusSource | TableSource)


class WindowPlace(NamedTuple):
    """The place of a window in its document, whose tokens it has from `first` to `last`."""

    first: int
    last: int  # exclusive
    size: int
    """Tokens of the document that windows have at most."""
    step: int
    """Tokens from the beginning of a window to that of the next."""
    length: int
    """Tokens of the document."""


class ReadsDocuments(Generic[SourceT]):
    """The part of a task for windows of documents; by default it reads no documents."""

    documents: ClassVar[Literal["no", "also", "only"]] = "no"
    """Whether its texts may be documents that an encoder with memories reads in windows."""
    labels_windows: ClassVar[Literal["last", "every"]] = "last"
    """The windows that have the label of a whole document: the last of all, or those that count."""
    packed_settings: ClassVar[Sequence[str]] = ()
    """Settings for texts in packed rows, which a task of documents leaves as they are."""

    @property
    def repeats(self) -> bool:
        """Whether windows have the first text of each document."""
        return type(self).repeated is not ReadsDocuments.repeated

    def repeated(self, layouts: np.ndarray) -> np.ndarray | None:
        """(n,) tokens of the first text of each document, which every window has; None: all tokens
        of a document are read one after another."""
        return None

    def adapt_window(self, window: Example, place: WindowPlace, source: SourceT) -> None:
        """Changes a window of a document that it labeled, after it was cut."""
