"""Rankings of rows: the best of some scores, BM25, and the fusion of several.

best_of(cosines, 10)                          the ten highest, equal ones in their order
bm25([postings of each word], ...)            a score for each row
dot_products(query, [postings of each token]) the same, of sparse vectors
fused([by vectors, by words])                 reciprocal ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log

import numpy as np

from palm_ds.common.sparse_vectors import SparseVector

Ranking = list[tuple[int, float]]
"""(row, score), the best first."""
_K1, _B = 1.2, 0.75
_LEAST = 1e-6  # the weight of a word that at least half of the texts have
_RANK_CONSTANT = 60


def best_of(scores: np.ndarray, top: int, rows: np.ndarray | None = None) -> Ranking:
    """The highest of the scores (n,), which are those of `rows` (n,), ascending; None: of the rows
    from 0 on. Equal ones are in the order of their rows."""
    top = min(top, len(scores))
    if not top:
        return []
    lowest = np.partition(scores, -top)[-top]
    best = np.flatnonzero(scores >= lowest)
    best = best[np.argsort(-scores[best], kind="stable")][:top]
    found = best if rows is None else rows[best]
    return list(zip(found.tolist(), scores[best].tolist(), strict=True))


def bm25(
    postings: Iterable[np.ndarray], lengths: np.ndarray, alive: np.ndarray, total: int
) -> np.ndarray:
    """Robertson's BM25 of every row (rows,) float64, 0 of those with no word of the query: the sum
    over the query's words of

        log((N - n + 0.5) / (n + 0.5)) * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean))

    with k1 = 1.2 and b = 0.75, where a word is f times in the text and in n of N texts; the
    logarithm is 1e-6 instead for a word of at least half of the texts. `postings`: of each word the
    (row, f) of the texts that have it; `lengths` (rows,): their words; of the `total` texts that
    are `alive` (rows,). SQLite's FTS5 gives the same numbers, to the last bit."""
    scores = np.zeros(len(lengths))
    thinned = total < len(lengths)
    words = int(lengths[alive].sum()) if thinned else int(lengths.sum())
    damped = _K1 * (1 - _B + _B * lengths / (words / max(total, 1) or 1.0))
    for pairs in postings:
        rows, f = pairs[:, 0].astype(np.intp), pairs[:, 1].astype(np.float64)
        if thinned:
            there = alive[rows]
            rows, f = rows[there], f[there]
        rare = log((total - len(rows) + 0.5) / (len(rows) + 0.5))
        weight = rare if rare > 0 else _LEAST
        scores[rows] += weight * (f * (_K1 + 1) / (f + damped[rows]))
    return scores


def dot_products(
    query: SparseVector, postings: Iterable[tuple[np.ndarray, np.ndarray]], count: int
) -> np.ndarray:
    """(count,) float64 products of a sparse query with the vectors of rows: of each of its entries,
    `postings` are the rows that have one too, and their weights (float32)."""
    scores = np.zeros(count)
    for weight, (rows, weights) in zip(query.values.astype(np.float64), postings, strict=True):
        scores[rows] += weight * weights
    return scores


def fused(rankings: Sequence[Ranking]) -> Ranking:
    """Reciprocal rank fusion (Cormack, Clarke & Büttcher 2009): a row's score is the sum of
    1 / (60 + its rank) over the rankings that have it, ranks from 1; equal ones by row."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, 1):
            scores[row] = scores.get(row, 0.0) + 1 / (_RANK_CONSTANT + rank)
    return sorted(scores.items(), key=lambda each: (-each[1], each[0]))
