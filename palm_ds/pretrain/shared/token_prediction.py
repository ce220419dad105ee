"""Prediction of the tokens of running text by a masked-LM head, and where a token is predicted.

    masked     at its own place, which does not show it            BERT
    shifted    at the place before, its own masked (MNTP)          BehnamGhader et al. 2024
    causal     at the place before, from the text up to there      GPT

Such tasks can `share` one head. A `shifted` head is a `causal` one that sees the rest of the text,
too: both kinds of examples in one stage train one head for both (GPT-BERT, Charpentier and Samuel
2024). Stages may also follow one another, in either order, with one head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.masking import unigram_baseline
from palm_ds.data.tasks.task import CorpusTask, Task
from palm_ds.model.heads.outputs import HeadOutputs, Reading

if TYPE_CHECKING:
    from torch import nn

    from palm_ds.model.encoder.encoder import Encoder


@dataclass(frozen=True, kw_only=True)
class TokenPrediction(CorpusTask):
    """A task with a masked-LM head."""

    @property
    def reading(self) -> Reading:
        """Where its head predicts a token."""
        return "masked"

    def head(self, backbone: Encoder) -> nn.Module:
        from palm_ds.model.heads.heads import MaskedLMHead

        return MaskedLMHead(backbone)

    def head_outputs(self) -> HeadOutputs:
        return HeadOutputs(reading=self.reading)

    def with_head_of(self, origin: Task) -> Task[CorpusSource]:
        """Any two such tasks can share a head."""
        return self if isinstance(origin, TokenPrediction) else super().with_head_of(origin)

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """The corpus's unigram frequencies."""
        return unigram_baseline(targets, source.unigrams)
