"""A task whose labels say nothing, for the control arm of study.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.pretrain.sentence_distance import SentenceDistance


@dataclass(frozen=True, kw_only=True)
class RandomDistance(SentenceDistance):
    """The pairs of sentence_distance, each with a class that is drawn for it."""

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        example = super().example(layout, source, rng)
        where, label = example.labels[self.name]
        example.labels[self.name] = where, rng.integers(len(self.labels), size=label.shape)
        return example
