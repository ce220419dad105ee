"""Retrieval: the vector of a query is closer to that of its positive than to those of other texts.

Rows, predictions and metrics: palm_ds/tasks/shared/retrieval_task.py.
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
