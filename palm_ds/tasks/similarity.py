"""Similarity: the vectors of two texts are as similar as their score says.

[CLS] text_a [SEP] | [CLS] text_b [SEP]; the label is a number. CoSENT puts all pairs of a step in
the order of their labels; `cosine` fits the similarity to the label. Predictions: `value`, the
similarity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import PositiveFloat

from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.interfaces import PAIR
from palm_ds.data.tasks.task import Task
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.embedding import SimilarityHead
from palm_ds.tasks.metrics.numbers import pearson, spearman
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.embedding_task import DenseEmbeddingTask, need_text


@dataclass(frozen=True, kw_only=True)
class Similarity(labels.NumberTask, DenseEmbeddingTask):
    """Trains vectors whose similarity follows scored pairs."""

    loss: Literal["cosent", "cosine"] = "cosent"
    """cosent: the order of all pairs of a step (CoSENT, Su 2022); cosine: the squared difference of
    similarity and label, with labels scaled to be from 0 to 1."""
    temperature: PositiveFloat = 0.05
    """CoSENT divides similarities by it."""
    low: float | None = None
    """The label of texts that have nothing in common; default: the lowest of the training rows."""
    high: float | None = None
    """The label of texts that mean the same; default: the highest of the training rows."""

    about_pair = "Gives the similarity of two texts."
    pair_roles = PAIR

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(self.low, self.high)

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        columns = tuple(self.texts) or ("text_a", "text_b")
        if len(columns) != 2:
            raise UserError(f"{self.where}.texts: {counted(len(columns), 'column')}; name two")
        for column in columns:
            source.need(column, self.where)
        return columns

    def check(self, source: TableSource, *, labeled: bool) -> None:
        for item in range(len(source)):
            self.row_texts(source, item)
        super().check(source, labeled=labeled)

    def check_step(self, source: TableSource, examples: int) -> None:
        if self.loss == "cosent" and examples < 2:
            raise UserError(
                f"{self.where}: one row per step: CoSENT compares rows; raise `batch`, or choose "
                "`loss: cosine`"
            )

    def row_texts(self, source: TableSource, item: int) -> list[str]:
        columns = self.columns_of(source)
        return [need_text(source.column(c)[item], source, item, c) for c in columns]

    def with_head_of(self, origin: Task) -> Similarity:
        """With the scale of the task that owns the shared head."""
        task = super().with_head_of(origin)
        assert isinstance(origin, Similarity)
        return replace(task, low=origin.low, high=origin.high)

    def resolved(self, source: TableSource) -> Similarity:
        """With the lowest and the highest label of the training rows."""
        if self.low is not None and self.high is not None:
            return self
        known = labels.numbers(self, source, strict=True)
        low = float(known.min()) if self.low is None else self.low
        high = float(known.max()) if self.high is None else self.high
        if not low < high:
            raise UserError(f"{self.where}: all labels are {low:g}; there is nothing to learn")
        return replace(self, low=low, high=high)

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        low = 0.0 if self.low is None else self.low
        high = 1.0 if self.high is None else self.high
        target = (self.targets(source)[example.item] - low) / (high - low)
        self.add_labels(example, np.repeat(np.nan_to_num(target), 2))

    def head(self, backbone: Encoder) -> SimilarityHead:
        return SimilarityHead(
            self.vector_settings(backbone), loss=self.loss, temperature=self.temperature
        )

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        one, other = self.compare(scores)
        return {"value": round(float(one @ other), 6)}

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Correlations over the rows with a number; empty if there are none."""
        both = self.pairs(predictions, source)
        if not len(both[0]):
            return {}
        return {"spearman": spearman(*both), "pearson": pearson(*both)}
