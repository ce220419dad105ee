"""Which permutation of its segments is this paragraph? (ERNIE 2.0, section 4.2.2)

A paragraph (or a part of one longer than half a row) is cut at sentence boundaries into 1..`most`
segments, which are shuffled. The class is one of the sum of n! orders (m = 3: 9 classes, m = 4: 33,
as in ERNIE-Doc), drawn uniformly among those that the paragraph's number of sentences allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from palm_ds.common.settings import PositiveShare
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, build_input
from palm_ds.pretrain.shared.paragraphs import count_orders, lay_out, paragraphs, segments
from palm_ds.pretrain.shared.predictions import SegmentOrderTask


@dataclass(frozen=True, kw_only=True)
class SentenceReordering(SegmentOrderTask):
    most: Annotated[int, Field(ge=2, le=6)] = 3
    """Maximum number of segments; the backbone needs as many token types."""
    shortest: PositiveShare = 0.2
    """Paragraphs longer than half a row are cut to a random length between this share of a row and
    a whole row."""

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(texts, 4): at least two whole sentences, and their paragraph."""
        size = max_length - source.vocabulary.around(self.most)
        texts = paragraphs(source, size, self.shortest)
        return texts[texts[:, 1] - texts[:, 0] >= 2]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        allowed = count_orders(self.most)
        classes = allowed[np.minimum(items[:, 1] - items[:, 0], self.most) - 1]
        label = (uniform[:, 0] * classes).astype(np.int64)
        parts = np.searchsorted(allowed, label, side="right") + 1
        return lay_out(items, parts, label, source, max_length)

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        label = int(layout["label"])
        order = self.orders[label]
        begins, ends = segments(layout, len(order), source, rng)
        pieces = [source.read(begins[i], ends[i]) for i in order]
        example = build_input(pieces, source.vocabulary, range(len(order)))
        example.labels[self.name] = np.array([0]), np.array([label])
        return example

    @property
    def segments(self) -> int:  # type: ignore[override]
        return self.most

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """Knows the number of segments n, which is visible, and guesses one of the n! orders."""
        possible = np.array([math.factorial(len(order)) for order in self.orders])[targets]
        return np.log(possible), 1 / possible
