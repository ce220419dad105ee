"""Which permutation of its segments is this paragraph? (ERNIE 2.0, section 4.2.2)

A paragraph is cut at sentence boundaries into 1..`most` segments, which are put in a random order;
the class says which of the sum of n! orders it is (m = 3: 9 classes, m = 4: 33, as in ERNIE-Doc).
Classes are drawn uniformly among those that the paragraph's number of sentences allows.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from palm_ds import keyed
from palm_ds.errors import UserError
from palm_ds.example import Example, arrange
from palm_ds.source import Source
from palm_ds.task import Task

if TYPE_CHECKING:
    from torch import nn

    from palm_ds.backbone import Backbone


@dataclass(frozen=True, kw_only=True)
class SentenceReordering(Task):
    most: int = 3
    """The largest number of segments; the backbone needs as many segment types."""
    shortest: float = 0.2
    """Paragraphs are drawn between this share of the row length and the whole of it."""

    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 2 <= self.most <= 6:
            raise UserError(f"tasks.{self.name}.most: {self.most} is not from 2 to 6")
        if not 0 < self.shortest <= 1:
            raise UserError(f"tasks.{self.name}.shortest: {self.shortest} is not in (0, 1]")

    @cached_property
    def orders(self) -> list[tuple[int, ...]]:
        """Every class's order, in the order of the classes: (0), (0 1), (1 0), (0 1 2), ..."""
        return [
            order
            for segments in range(1, self.most + 1)
            for order in itertools.permutations(range(segments))
        ]

    def items(self, source: Source, room: int) -> np.ndarray:
        """(paragraphs, 2): runs of whole sentences [first, last), at least two of them."""
        runs = paragraphs(source, room - 1 - self.most, self.shortest)
        return runs[runs[:, 1] - runs[:, 0] >= 2]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: Source, room: int
    ) -> np.ndarray:
        allowed = np.cumsum([math.factorial(n) for n in range(1, self.most + 1)])
        classes = allowed[np.minimum(items[:, 1] - items[:, 0], self.most) - 1]
        label = (uniform[:, 0] * classes).astype(np.int64)
        segments = np.searchsorted(allowed, label, side="right") + 1
        offsets = source.corpus.sentence_starts
        length = 1 + offsets[items[:, 1]] - offsets[items[:, 0]] + segments
        before, after = source.tokens_around(offsets[items[:, 0]], offsets[items[:, 1]])
        spare = np.minimum(room - length, before + after)
        return np.column_stack([length, spare, items, label, after])

    def example(self, layout: np.ndarray, source: Source, rng: np.random.Generator) -> Example:
        length, _, first, last, label, after = (int(x) for x in layout)
        order = self.orders[label]
        starts, tokens = source.corpus.sentence_starts, length - 1 - len(order)
        # Free space of the row is filled with the sentences after the paragraph, then those before.
        end = min(int(starts[first]) + tokens, int(starts[last]) + after)
        last = max(last, int(np.searchsorted(starts, end)))
        first = min(first, int(np.searchsorted(starts, end - tokens, side="right")) - 1)
        inner = np.sort(rng.choice(np.arange(first + 1, last), len(order) - 1, replace=False))
        cuts = starts[np.array([first, *inner, last])]
        begins, ends = cuts[:-1], _shortened(cuts, int(cuts[-1] - cuts[0]) - tokens, rng)
        pieces = [source.read(begins[i], ends[i]) for i in order]
        example = arrange(pieces, source.vocabulary)
        example.labels[self.name] = np.array([0]), np.array([label])
        return example

    def head(self, backbone: Backbone) -> nn.Module:
        from palm_ds.heads import ClassHead

        return ClassHead(backbone.config.width, classes=len(self.orders), pooled=True)

    def baseline(self, targets: np.ndarray, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """The number of segments is plain to see; which of its n! orders it is, is the question."""
        orders = np.array([math.factorial(len(order)) for order in self.orders])[targets]
        return np.log(orders), 1 / orders


def _shortened(cuts: np.ndarray, excess: int, rng: np.random.Generator) -> np.ndarray:
    """Where the segments end, `excess` tokens left out at the end of one of them.

    A row's free space seldom ends with a sentence, so one segment is cut short. If it were always
    the last one of the text, a missing full stop would tell the order; so it is any."""
    ends, sizes = cuts[1:].copy(), np.diff(cuts)
    if excess:
        able = np.flatnonzero(sizes > excess)
        ends[rng.choice(able)] -= excess
    return ends


def paragraphs(source: Source, size: int, shortest: float) -> np.ndarray:
    """(paragraphs, 2) sentences [first, last): every document cut into runs of whole sentences.

    Each run is drawn a target between `shortest` and 1 times `size` tokens, so that rows pack well
    and the model sees texts of every length. Runs longer than `size` (one sentence that is) are
    left out."""
    sentence, limit = source.first_sentences.copy(), source.last_sentences
    runs = []
    while (going := sentence < limit).any():
        first = sentence[going]
        draw = keyed.uniform(keyed.key("paragraph"), first, 1)[:, 0]
        target = ((shortest + (1 - shortest) * draw) * size).astype(np.int64)
        last = source.sentence_end(first, limit[going], target)
        runs.append(np.column_stack([first, last]))
        sentence[going] = last
    table = np.concatenate(runs) if runs else np.empty((0, 2), np.int64)
    table = table[np.argsort(table[:, 0], kind="stable")]
    offsets = source.corpus.sentence_starts
    return table[offsets[table[:, 1]] - offsets[table[:, 0]] <= size]
