"""Sparse retrieval: the vector of a text weighs the words of the vocabulary that it is about.

SPLADE (Formal, Piwowarski & Clinchant 2021, arXiv 2107.05720; v2 with the maximum over tokens,
arXiv 2109.10086): log(1 + relu(logits of the masked-LM head)), the largest over the tokens of a
text. Two vectors are compared by their dot product. Most of their numbers become 0, by a penalty on
the mean vector of all queries and that of all texts of a step. Rows, predictions and metrics are
those of retrieval, and `query_active_dims` and `document_active_dims`, the mean number of non-zero
entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Share
from palm_ds.common.sparse_vectors import DenseOrSparse, SparseVectors
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.embedding import ContrastiveHead, VectorSettings
from palm_ds.model.heads.splade import FlopsRegularizer, SpladeHead
from palm_ds.model.pooling import SPLADE, TextPooling
from palm_ds.tasks.shared.retrieval_task import RetrievalTask


@dataclass(frozen=True, kw_only=True)
class SparseRetrieval(RetrievalTask):
    """Trains sparse vectors (SPLADE) to find texts by queries."""

    temperature: PositiveFloat = 1.0
    """Dot products are divided by it."""
    query_regularizer_weight: NonNegativeFloat = 5.0e-5
    """Weight of the FLOPS loss of the step's queries: the sum of squares of their mean vector
    (Paria et al. 2020). The higher, the sparser the vectors of queries."""
    document_regularizer_weight: NonNegativeFloat = 3.0e-5
    """The same for all positives and negatives."""
    initial_bias: float = 0.0
    """Added once, at the start of the run, to the bias of the masked-LM head. Its softmax does not
    depend on a constant, but the number of logits above 0 does. Give a negative number if most are
    above 0, as in a head that was trained for few steps."""
    regularizer_warmup: Share = 0.33
    """Share of the run's steps over which both weights rise, quadratically."""

    def head(self, backbone: Encoder) -> SpladeHead:
        ranking = ContrastiveHead(
            VectorSettings(similarity="dot"),
            temperature=self.temperature,
            margin=self.margin,
            distillation=self.distillation,
            distillation_share=self.distillation_share,
        )
        regularizer = FlopsRegularizer(
            queries=self.query_regularizer_weight,
            documents=self.document_regularizer_weight,
            warmup=self.regularizer_warmup,
        )
        if self.initial_bias and not backbone.masked_lm_bias:
            raise UserError(
                f"{self.where}.initial_bias: the masked-LM head of {backbone.config.kind} has no "
                "bias; leave it out"
            )
        return SpladeHead(backbone, ranking, regularizer, initial_bias=self.initial_bias)

    def text_pooling(self) -> TextPooling:
        return TextPooling(
            pooling=SPLADE, similarity="dot", max_length=self.max_length, trained=True
        )

    # -- predictions --

    def compare(self, vectors: np.ndarray) -> np.ndarray:
        return vectors

    def kept(self, vectors: np.ndarray) -> SparseVectors:
        return SparseVectors.of(vectors)

    def stacked(self, vectors: Sequence[Any]) -> SparseVectors:
        size = 1 + max((int(each.indices.max(initial=0)) for each in vectors), default=0)
        return SparseVectors.stack(vectors, size)

    def facts(self, queries: DenseOrSparse, texts: DenseOrSparse) -> dict[str, float]:
        """The mean number of non-zero entries of a query and of a text."""
        assert isinstance(queries, SparseVectors) and isinstance(texts, SparseVectors)
        pairs = {"query_active_dims": queries, "document_active_dims": texts}
        return {name: float(each.active.mean()) for name, each in pairs.items() if len(each)}
