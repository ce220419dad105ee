"""Heads without parameters that train the encoder's vectors of texts, and their losses.

    ContrastiveHead   a query is closer to its positive than to all other texts of the step
    SimilarityHead    the cosine of two texts follows a target

A loss is computed in fp32 from all vectors of a step:

scores            (a, b) cosines or dot products, divided by a temperature
info_nce          a query's positive among the texts of all queries (van den Oord et al. 2018)
kl, margin_mse    a teacher's scores of a query's own candidates
cosine_error      squared difference of a cosine and a target
cosent            pairs in the order of their targets (Su 2022)

`step_losses` gets the vectors of all its texts, from all
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
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.heads.heads import Head


def compared(vectors: torch.Tensor, similarity: str) -> torch.Tensor:
    """(n, hidden) fp32 vectors whose dot products are the similarity, `cosine` or `dot`."""
    return F.normalize(vectors.float(), dim=-1) if similarity == "cosine" else vectors.float()


def info_nce(
    scores: torch.Tensor, positives: torch.Tensor, excluded: torch.Tensor, margin: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries,) loss and whether the positive's score is the highest.

    scores: (queries, texts), positives: (queries,) a text each; excluded: (queries, texts) bool, in
    which a query's own positive does not matter. `margin` is subtracted from the positives' scores
    (Yang et al. 2019, section 2.2)."""
    own = F.one_hot(positives, scores.shape[1]).bool()
    masked = scores.masked_fill(excluded & ~own, -math.inf)
    correct = masked.detach().argmax(-1) == positives
    return F.cross_entropy(masked - margin * own, positives, reduction="none"), correct


def known_pairs(
    queries: torch.Tensor, texts: torch.Tensor, positives: torch.Tensor
) -> torch.Tensor:
    """(queries, texts) bool: the text is a positive of the same query, here or in another row of
    the step, or is the query itself. `queries` (q,) and `texts` (t,) are int64, equal for equal
    texts; positives: (q,) the text that is each row's positive."""
    _, query = torch.unique(queries, return_inverse=True)
    _, text = torch.unique(texts, return_inverse=True)
    known = torch.zeros(len(queries), len(texts), dtype=torch.bool, device=texts.device)
    known[query, text[positives]] = True
    return known[query][:, text] | (queries[:, None] == texts)


def kl(scores: torch.Tensor, teacher: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """(queries,) Kullback-Leibler divergence of the softmax of scores (queries, candidates) from
    that of a teacher's; `present` (queries, candidates) bool."""
    target = teacher.masked_fill(~present, -math.inf).log_softmax(-1)
    log_shares = scores.masked_fill(~present, -math.inf).log_softmax(-1)
    difference = (target - log_shares).masked_fill(~present, 0.0)  # -inf minus -inf is NaN
    return (target.exp() * difference).sum(-1)


def margin_mse(scores: torch.Tensor, teacher: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """(queries,) mean over the negatives of the squared error of the positive's lead over each,
    given a teacher's scores (Hofstätter et al. 2020, equation 5). The first candidate of
    (queries, candidates) is the positive; 0 without a negative."""
    error = (scores[:, :1] - scores) - (teacher[:, :1] - teacher)
    negatives = present[:, 1:]
    squares = error[:, 1:].square().masked_fill(~negatives, 0.0).sum(-1)
    return squares / negatives.sum(-1).clamp(min=1)


def cosine_error(cosines: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(pairs,) squared differences."""
    return (cosines - targets).square()


def cosent(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(pairs,), each the same: log(1 + the sum of exp(score of i - score of j) over all pairs i, j
    of which j has the higher target)."""
    difference = scores[:, None] - scores
    wrong = difference.masked_fill(targets[:, None] >= targets, -math.inf).flatten()
    return F.pad(wrong, (1, 0)).logsumexp(0).expand(len(scores))


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
    global_batch = True

    def __init__(self, vectors: VectorSettings):
        super().__init__()
        self.vectors = vectors
        self.averaged = vectors.pooling == "mean"

    def logits(self, rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """The vectors (n, hidden) themselves."""
        return rows

    def step_losses(
        self,
        vectors: torch.Tensor,
        targets: torch.Tensor,
        groups: torch.Tensor,
        progress: float | None = None,
    ) -> StepLosses:
        """Given vectors (n, hidden), targets (n, ...) and groups (n,) of all texts of a step, the
        losses (examples,). `progress`: the share of the run's steps that were done before; None:
        it is no training step."""
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
