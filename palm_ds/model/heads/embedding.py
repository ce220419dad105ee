"""Heads without parameters that train the encoder's vectors of texts.

    ContrastiveHead   a query is closer to its positive than to all other texts of the step
    SimilarityHead    the cosine of two texts follows a target

Their loss is over a whole step: `step_losses` gets the vectors of all its texts, from all
micro-batches and processes (palm_ds/runtime/step/grad_cache.py). The loss of each is the sum over
the whole vector and its first numbers, if the task trains these too (Matryoshka representation
learning, Kusupati et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from palm_ds.model.heads.embedding_losses import (
    compared,
    cosent,
    cosine_error,
    info_nce,
    kl,
    known_pairs,
    margin_mse,
)
from palm_ds.model.heads.heads import Head

QUERY, POSITIVE, NEGATIVE = range(3)
ROLE, TEXT, TEACHER = range(3)
"""Columns of the targets of a ContrastiveHead."""


@dataclass(frozen=True, kw_only=True)
class VectorSettings:
    """Definition of a text's vector, and of the similarity of two."""

    pooling: Literal["mean", "cls"] = "mean"
    similarity: Literal["cosine", "dot"] = "cosine"
    matryoshka: Mapping[int, float] = field(default_factory=dict)
    """{numbers kept of a vector: weight of the loss}, besides the whole vector with weight 1."""


class StepLosses(NamedTuple):
    """(examples,) the loss of each, and whether it is predicted correctly (NaN: no such thing).
    Texts without a query have none."""

    losses: torch.Tensor
    correct: torch.Tensor


class EmbeddingHead(Head):
    """Base class: a label is a text, at its first token; the labels of an example are a group."""

    grouped = True
    whole_step = True

    def __init__(self, vectors: VectorSettings):
        super().__init__()
        self.vectors = vectors
        self.averaged = vectors.pooling == "mean"

    def logits(self, rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """The vectors (n, hidden) themselves."""
        return rows

    def step_losses(
        self, vectors: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> StepLosses:
        """Given vectors (n, hidden), targets (n, ...) and groups (n,) of all texts of a step, the
        losses (examples,)."""
        whole = self._losses(compared(vectors, self.vectors.similarity), targets, groups)
        losses = whole.losses
        for size, weight in self.vectors.matryoshka.items():
            part = compared(vectors[:, :size], self.vectors.similarity)
            losses = losses + weight * self._losses(part, targets, groups).losses
        return StepLosses(losses, whole.correct.float())

    def _losses(
        self, vectors: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> StepLosses:
        raise NotImplementedError


class ContrastiveHead(EmbeddingHead):
    """InfoNCE with all texts of a step as negatives, and a teacher's scores of a query's own
    candidates.

    Targets (n, 3) int64: QUERY, POSITIVE or NEGATIVE; a number that is equal for equal texts; the
    bits of the teacher's score as fp32. The first two texts of an example are its query and its
    positive; one without a query has negatives only."""

    def __init__(
        self,
        vectors: VectorSettings,
        *,
        temperature: float = 0.05,
        margin: float = 0.0,
        distillation: Literal["", "kl", "margin_mse"] = "",
        distillation_share: float = 1.0,
    ):
        """`margin` is in units of the similarity."""
        super().__init__(vectors)
        self.temperature, self.margin = temperature, margin
        self.distill = {"kl": kl, "margin_mse": margin_mse}.get(distillation)
        self.distillation_share = distillation_share if distillation else 0.0

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, 3, dtype=torch.int64, device=device)

    def _losses(
        self, vectors: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> StepLosses:
        asks = targets[:, ROLE] == QUERY
        texts = vectors[~asks]
        scores = vectors[asks] @ texts.T / self.temperature
        positives = (targets[~asks, ROLE] == POSITIVE).nonzero()[:, 0]
        known = known_pairs(targets[asks, TEXT], targets[~asks, TEXT], positives)
        margin = self.margin / self.temperature
        losses, correct = info_nce(scores, positives, known, margin)
        if self.distill:
            own, present = (x[groups[asks]] for x in _own_candidates(groups[~asks]))
            teacher = targets[~asks, TEACHER].to(torch.int32).view(torch.float32)[own]
            taught = self.distill(scores.gather(1, own), teacher, present)
            losses = losses * (1 - self.distillation_share) + taught * self.distillation_share
        return StepLosses(losses, correct)


def _own_candidates(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(examples, most candidates) the numbers of each example's texts, and whether there are as
    many; `groups` (texts,) ascends from 0."""
    counts = torch.bincount(groups)
    nth = torch.arange(int(counts.max()), device=groups.device)
    first = counts.cumsum(0) - counts
    present = nth < counts[:, None]
    return torch.where(present, first[:, None] + nth, first[:, None]), present


class SimilarityHead(EmbeddingHead):
    """The similarity of the two texts of an example. Targets (n,) float: the example's target at
    both texts."""

    def __init__(
        self,
        vectors: VectorSettings,
        *,
        loss: Literal["cosent", "cosine"] = "cosent",
        temperature: float = 0.05,
    ):
        super().__init__(vectors)
        self.loss, self.temperature = loss, temperature

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, device=device)

    def _losses(
        self, vectors: torch.Tensor, targets: torch.Tensor, groups: torch.Tensor
    ) -> StepLosses:
        similarity, wanted = (vectors[::2] * vectors[1::2]).sum(-1), targets[::2]
        if self.loss == "cosent":
            losses = cosent(similarity / self.temperature, wanted)
        else:
            losses = cosine_error(similarity, wanted)
        return StepLosses(losses, torch.full_like(similarity.detach(), math.nan))
