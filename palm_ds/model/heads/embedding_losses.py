"""Losses of vectors of texts. A loss is computed in fp32 from all vectors of a step.

scores            (a, b) cosines or dot products, divided by a temperature
info_nce          a query's positive among the texts of all queries (van den Oord et al. 2018)
kl, margin_mse    a teacher's scores of a query's own candidates
cosine_error      squared difference of a cosine and a target
cosent            pairs in the order of their targets (Su 2022)
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F  # noqa: N812


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
    found = scores.masked_fill(~present, -math.inf).log_softmax(-1)
    difference = (target - found).masked_fill(~present, 0.0)  # -inf minus -inf is NaN
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
