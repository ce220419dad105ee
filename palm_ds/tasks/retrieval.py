"""Retrieval: the vector of a query is closer to that of its positive than to those of other texts.

[CLS] query [SEP] | [CLS] positive [SEP] | [CLS] negative [SEP] ...; InfoNCE over all positives and
negatives of a step, in whatever micro-batch and process they are. A text that is a positive of the
same query elsewhere, or the query itself, is no negative. A row without a query is a further text
to search in at evaluation, and is not trained on. Predictions: `score`, of the query and its
positive, and `scores`, of the positive and each negative. Metrics search all texts of the
evaluated rows for every query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import PositiveFloat

from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.embedding import ContrastiveHead
from palm_ds.tasks.shared.embedding_task import DenseEmbeddingTask
from palm_ds.tasks.shared.retrieval_task import RetrievalTask


@dataclass(frozen=True, kw_only=True)
class Retrieval(DenseEmbeddingTask, RetrievalTask):
    """Trains vectors to find texts by queries."""

    temperature: PositiveFloat = 0.05
    """Similarities are divided by it: the smaller, the more the hardest negatives count."""

    def head(self, backbone: Encoder) -> ContrastiveHead:
        return ContrastiveHead(
            self.vector_settings(backbone),
            temperature=self.temperature,
            margin=self.margin,
            distillation=self.distillation,
            distillation_share=self.distillation_share,
        )

    def stacked(self, vectors: Sequence[Any]) -> np.ndarray:
        return np.array(vectors)
