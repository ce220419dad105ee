"""Is this the same sentence, seen through other dropout masks? (SimCSE: Gao, Yao and Chen 2021,
section 3)

    [CLS] sentence [SEP] | [CLS] the same sentence [SEP]

The two texts share a row and do not attend to each other. Their masks differ, since masks follow
from the place in a row. Negatives are all other sentences of the step, in whatever micro-batch and
process they are. Without dropout there is nothing to learn. At evaluation, which has no dropout,
the loss measures how far apart other sentences are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, build_input, join, layouts, text_numbers
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.embedding import ContrastiveHead, VectorSettings
from palm_ds.model.pooling import TextPooling


@dataclass(frozen=True, kw_only=True)
class Simcse(CorpusTask):
    """Trains vectors of sentences without labels."""

    pooling: Literal["mean", "cls"] = "cls"
    """A sentence's vector: that of [CLS], or the mean over its tokens."""
    temperature: PositiveFloat = 0.05
    """Cosines are divided by it."""
    shortest: PositiveInt = 4
    """Sentences of fewer tokens are left out."""

    needs_dropout = True

    @classmethod
    def labels_others(cls) -> bool:
        return False

    def text_pooling(self) -> TextPooling:
        return TextPooling(pooling=self.pooling, normalize=True, trained=True)

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(sentences, 2): start and end; of a long sentence only the first half of a row."""
        count = source.last_sentences - source.first_sentences
        nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        number = np.repeat(source.first_sentences, count) + nth
        offsets = np.asarray(source.corpus.sentence_starts)
        start = offsets[number]
        following = np.append(offsets, source.ends[-1:])[number + 1]
        end = np.minimum(following, np.repeat(source.ends, count))
        end = np.minimum(end, start + max_length // 2 - 2)
        return np.column_stack([start, end])[end - start >= self.shortest]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        start, end = items.T
        return layouts(2 * (end - start + 2), start=start, end=end)

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        piece = source.read(layout["start"], layout["end"])
        once = build_input([piece], source.vocabulary)
        example = join([once, once])
        targets = np.zeros((2, 3), np.int64)
        targets[:, 0], targets[:, 1] = (0, 1), text_numbers(example)
        example.labels[self.name] = np.array([0, len(once)]), targets
        example.grouped_labels.add(self.name)
        return example

    def head(self, backbone: Encoder) -> ContrastiveHead:
        vectors = VectorSettings(pooling=self.pooling)
        return ContrastiveHead(vectors, temperature=self.temperature)
