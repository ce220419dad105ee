"""Are these two texts in order, or were they swapped? (ALBERT, section 3.1; ERNIE's dygraph demo,
which calls it next-sentence prediction)

A paragraph is cut in two at a random sentence boundary. 1: in order; 0: swapped; half of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palm_ds.common.settings import PositiveShare
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, build_input
from palm_ds.pretrain.shared.paragraphs import lay_out, paragraphs, segments
from palm_ds.pretrain.shared.predictions import ClassPrediction

SWAPPED, IN_ORDER = range(2)


@dataclass(frozen=True, kw_only=True)
class SentenceOrder(ClassPrediction):
    shortest: PositiveShare = 0.2
    """Paragraphs longer than half a row are cut to a random length between this share of a row and
    a whole row."""

    segments = 2
    labels = ("swapped", "in order")
    num_uniforms = 1

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(texts, 4): at least two whole sentences, and their paragraph."""
        texts = paragraphs(source, max_length - source.vocabulary.around(2), self.shortest)
        return texts[texts[:, 1] - texts[:, 0] >= 2]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        label = np.where(uniform[:, 0] < 0.5, SWAPPED, IN_ORDER)
        return lay_out(items, np.full(len(items), 2), label, source, max_length)

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        label = int(layout["label"])
        begins, ends = segments(layout, 2, source, rng)
        order = (0, 1) if label == IN_ORDER else (1, 0)
        pieces = [source.read(begins[i], ends[i]) for i in order]
        example = build_input(pieces, source.vocabulary, range(2))
        example.labels[self.name] = np.array([0]), np.array([label])
        return example
