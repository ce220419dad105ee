"""Ranking metrics of candidates in groups (answers to a question, documents for a query): MRR, MAP,
nDCG, precision, recall and hits at k, and the ratio of pairs in order to pairs out of order.

    ranking = rank(groups, scores, labels)      # once
    mrr(ranking), average_precision(ranking), ndcg(ranking, 10), ranking.left_out

Groups without a positive are skipped and counted. Among candidates with equal scores the less
relevant one ranks first: ties earn nothing, and the order of the rows does not matter. (ERNIE keeps
the order of the file; trec_eval orders by document name.) NaN scores rank last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics.counts import mean, nan_lowest

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RankedCandidates:
    """Candidates (n,) sorted by group, then by descending score."""

    group: Integers  # (n,) 0..groups-1
    place: Integers  # (n,) 1, 2, ... within the group
    gain: Floats  # (n,) the labels
    groups: int
    """Number of groups with a positive; the others are not included."""
    left_out: int
    """Number of groups without a positive."""

    def sums(self, values: npt.ArrayLike) -> Floats:
        """Sums (groups,) of values (n,) by group."""
        weights = np.asarray(values, np.float64)
        return np.bincount(self.group, weights, self.groups).astype(np.float64, copy=False)


def rank(groups: npt.ArrayLike, scores: npt.ArrayLike, labels: npt.ArrayLike) -> RankedCandidates:
    """Ranks candidates (n,) within their groups. Rows may be in any order and group ids of any
    type; labels are 0 or 1, or grades from 0. A label above 0 is a positive."""
    groups, gain = np.asarray(groups), np.asarray(labels, np.float64)
    scores = nan_lowest(scores)
    if not groups.shape == scores.shape == gain.shape or gain.ndim != 1:
        raise UserError(
            f"groups, scores and labels have shapes {groups.shape}, {scores.shape} and"
            f" {gain.shape}; expected one value per candidate in each"
        )
    if not (gain >= 0).all():
        raise UserError("a label of a candidate is negative or not a number; expected 0 or more")
    ids, group = np.unique(groups, return_inverse=True)
    positives = np.bincount(group, gain > 0, len(ids))
    number = np.cumsum(positives > 0) - 1  # index among the groups with a positive
    kept = positives[group] > 0
    group, gain = number[group[kept]].astype(np.int64), gain[kept]
    order = np.lexsort((gain, -scores[kept], group))
    group, gain = group[order], gain[order]
    first = np.searchsorted(group, group)  # start of each candidate's group
    return RankedCandidates(
        group=group,
        place=np.arange(len(group)) - first + 1,
        gain=gain,
        groups=int((positives > 0).sum()),
        left_out=int((positives == 0).sum()),
    )


def mrr(ranking: RankedCandidates) -> float:
    """Mean over groups of 1 / place of the first positive, in 0..1; NaN without groups (Voorhees
    1999)."""
    best = np.zeros(ranking.groups)
    np.maximum.at(best, ranking.group, (ranking.gain > 0) / ranking.place)
    return mean(best)


def average_precision(ranking: RankedCandidates) -> float:
    """MAP: mean over groups of the mean precision at each of its positives, in 0..1; NaN without
    groups (Manning et al. 2008, 8.4)."""
    positive = ranking.gain > 0
    so_far = np.cumsum(positive)
    before = np.concatenate([[0.0], np.cumsum(ranking.sums(positive))[:-1]])[ranking.group]
    precision = (so_far - before) / ranking.place
    return mean(ranking.sums(precision * positive) / ranking.sums(positive))


def ndcg(ranking: RankedCandidates, k: int | None = None) -> float:
    """Mean over groups of the discounted gain of the first `k` candidates (default: all) divided by
    that of the ideal order, in 0..1; NaN without groups. The discounted gain is the sum of
    label / log2(place + 1) (Järvelin and Kekäläinen 2002, with labels as gains, as in
    scikit-learn)."""
    ideal = rank(ranking.group, ranking.gain, ranking.gain)
    return mean(_discounted(ranking, k) / _discounted(ideal, k))


def _discounted(ranking: RankedCandidates, k: int | None) -> Floats:
    return ranking.sums(ranking.gain * _top(ranking, k) / np.log2(ranking.place + 1))


def precision_at(ranking: RankedCandidates, k: int) -> float:
    """Mean over groups of the positives among the first `k` candidates divided by k, also for
    groups with fewer candidates, as in trec_eval; in 0..1, NaN without groups."""
    return mean(_positives_at(ranking, k) / k)


def recall_at(ranking: RankedCandidates, k: int) -> float:
    """Mean over groups of the positives among the first `k` candidates divided by all positives; in
    0..1, NaN without groups."""
    return mean(_positives_at(ranking, k) / ranking.sums(ranking.gain > 0))


def hit_at(ranking: RankedCandidates, k: int) -> float:
    """Share of groups with a positive among the first `k` candidates, in 0..1; NaN without
    groups."""
    return mean(_positives_at(ranking, k) > 0)


def recalls_of(wanted: str, ranking: RankedCandidates) -> dict[str, float]:
    """`hit_at` 1, 5 and 10, as image retrieval is scored, by name: {wanted}_recall@1 and so on."""
    return {f"{wanted}_recall@{k}": hit_at(ranking, k) for k in (1, 5, 10)}


def pn_ratio(groups: npt.ArrayLike, scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Positive-negative ratio of ERNIE's Propeller: of the pairs of candidates of one group with
    different labels, those whose scores are in the same order, divided by those in the opposite
    one; equal scores are in neither. All arrays are (n,).

    Where none is in the opposite order, it is divided by 1, so that a better order never has a
    lower value (Propeller returns 0). NaN without such pairs."""
    _, group, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    order, ends = np.argsort(group, kind="stable"), np.cumsum(sizes)
    values, grades = nan_lowest(scores)[order], np.asarray(labels, np.float64)[order]
    counts = np.zeros(3, np.int64)  # pairs in order, out of order, in all
    for first, end in zip(ends - sizes, ends, strict=True):
        counts += _pairs(values[first:end], grades[first:end])
    return float(counts[0] / max(counts[1], 1)) if counts[2] else float("nan")


def _pairs(scores: Floats, labels: Floats) -> npt.NDArray[np.int64]:
    """Of the pairs with different labels of a group (n,): how many are in order, out of order, and
    in all."""
    counts = np.zeros(3, np.int64)
    for label in np.unique(labels)[1:]:
        lower, mine = np.sort(scores[labels < label]), scores[labels == label]
        below = np.searchsorted(lower, mine, "left").sum()
        above = len(lower) * len(mine) - np.searchsorted(lower, mine, "right").sum()
        counts += below, above, len(lower) * len(mine)
    return counts


def _positives_at(ranking: RankedCandidates, k: int) -> Floats:
    return ranking.sums((ranking.gain > 0) & _top(ranking, k))


def _top(ranking: RankedCandidates, k: int | None) -> npt.NDArray[np.bool_]:
    if k is not None and k < 1:
        raise UserError(f"k is {k}; it must be 1 or more")
    return ranking.place <= (len(ranking.place) if k is None else k)
