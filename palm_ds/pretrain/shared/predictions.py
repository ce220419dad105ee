"""Tasks over running text that predict one of their classes, or tokens, and where these are
predicted.

    masked     at its own place, which does not show it            BERT
    shifted    at the place before, its own masked (MNTP)          BehnamGhader et al. 2024
    causal     at the place before, from the text up to there      GPT

Tasks that predict tokens can `share` one head. A `shifted` head is a `causal` one that sees the
rest of the text, too: both kinds of examples in one stage train one head for both (GPT-BERT,
Charpentier and Samuel 2024). Stages may also follow one another, in either order, with one head.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.masking import unigram_baseline
from palm_ds.data.tasks.task import CorpusTask, Task
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.heads.outputs import HeadOutputs, Reading


@dataclass(frozen=True, kw_only=True)
class ClassPrediction(CorpusTask):
    """A task that predicts one of its classes."""

    of_texts: ClassVar[bool] = True
    """Whether a label is that of a text; else that of a token."""

    @property
    def class_count(self) -> int:
        """Number of classes of the head."""
        return len(self.labels)

    def head(self, backbone: Encoder) -> ClassHead:
        width = backbone.config.hidden_size
        return ClassHead(width, classes=self.class_count, pooled=self.of_texts, truncated=True)

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """Guesses one of the classes."""
        chance = np.full(len(targets), 1 / self.class_count)
        return -np.log(chance), chance


@dataclass(frozen=True, kw_only=True)
class SegmentOrderTask(ClassPrediction):
    """A task whose classes are the orders of 1 to `most` segments of a text."""

    most: Annotated[int, Field(ge=2, le=6)]
    """Maximum number of segments."""

    num_uniforms = 1
    head_settings = ("most",)

    @cached_property
    def orders(self) -> list[tuple[int, ...]]:
        """The permutation of every class: (0), (0 1), (1 0), (0 1 2), ..."""
        sizes = range(1, self.most + 1)
        return [order for size in sizes for order in itertools.permutations(range(size))]

    @property
    def class_count(self) -> int:
        return len(self.orders)

    def class_name(self, label: int) -> str:
        """`2 1 3`: the text's second segment comes first."""
        return " ".join(str(segment + 1) for segment in self.orders[label])


@dataclass(frozen=True, kw_only=True)
class TokenPrediction(CorpusTask):
    """A task with a masked-LM head."""

    @property
    def reading(self) -> Reading:
        """Where its head predicts a token."""
        return "masked"

    def head(self, backbone: Encoder) -> MaskedLMHead:
        return MaskedLMHead(backbone)

    def head_outputs(self) -> HeadOutputs:
        return HeadOutputs(reading=self.reading)

    def with_head_of(self, origin: Task) -> Task[CorpusSource]:
        """Any two such tasks can share a head."""
        return self if isinstance(origin, TokenPrediction) else super().with_head_of(origin)

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """The corpus's unigram frequencies."""
        return unigram_baseline(targets, source.unigrams)
