"""Candidates ranked by group (a question's answers, a query's documents): MRR, MAP, nDCG, and
precision, recall and hits at k.

    ranking = rank(groups, scores, labels)      # once
    mrr(ranking), average_precision(ranking), ndcg(ranking, 10), ranking.left_out

Groups without a positive are left out, and counted. Of candidates with the same score the less
relevant stands first: equal scores earn nothing, and the order of the rows never matters. (ERNIE
keeps the order of the file there; trec_eval goes by document name.) A score that is nan stands
last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics.counts import mean

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Candidates (n,) in the order of their groups, and in each the best score first."""

    group: Integers  # (n,) 0..groups-1
    place: Integers  # (n,) 1, 2, ... within the group
    gain: Floats  # (n,) the labels
    groups: int
    """With a positive; the others are not in here."""
    left_out: int
    """Groups without a positive."""

    def sums(self, values: npt.ArrayLike) -> Floats:
        """Values (n,) added up by group: (groups,)."""
        weights = np.asarray(values, np.float64)
        return np.bincount(self.group, weights, self.groups).astype(np.float64, copy=False)


def rank(groups: npt.ArrayLike, scores: npt.ArrayLike, labels: npt.ArrayLike) -> Ranking:
    """Candidates (n,) by group: any ids, rows in any order; labels 0 or 1, or grades from 0 up.
    Anything above 0 is a positive."""
    groups, gain = np.asarray(groups), np.asarray(labels, np.float64)
    scores = np.asarray(scores, np.float64)
    if not groups.shape == scores.shape == gain.shape or gain.ndim != 1:
        raise UserError(
            f"groups, scores and labels have the shapes {groups.shape}, {scores.shape} and"
            f" {gain.shape}; each needs one value a candidate"
        )
    if not (gain >= 0).all():
        raise UserError("a label of a candidate is below 0 or no number; grades are 0 and up")
    ids, group = np.unique(groups, return_inverse=True)
    positives = np.bincount(group, gain > 0, len(ids))
    number = np.cumsum(positives > 0) - 1  # of a group among those with a positive
    kept = positives[group] > 0
    group, gain = number[group[kept]].astype(np.int64), gain[kept]
    lowest = np.where(np.isnan(scores), -np.inf, scores)[kept]
    order = np.lexsort((gain, -lowest, group))
    group, gain = group[order], gain[order]
    first = np.searchsorted(group, group)  # where each one's group begins
    return Ranking(
        group=group,
        place=np.arange(len(group)) - first + 1,
        gain=gain,
        groups=int((positives > 0).sum()),
        left_out=int((positives == 0).sum()),
    )


def mrr(ranking: Ranking) -> float:
    """The mean of 1 / place of each group's first positive, in 0..1; nan of no group (Voorhees
    1999)."""
    best = np.zeros(ranking.groups)
    np.maximum.at(best, ranking.group, (ranking.gain > 0) / ranking.place)
    return mean(best)


def average_precision(ranking: Ranking) -> float:
    """MAP: the mean over groups of the mean, over its positives, of the precision down to each; in
    0..1, nan of no group (Manning et al. 2008, 8.4)."""
    positive = ranking.gain > 0
    so_far = np.cumsum(positive)
    before = np.concatenate([[0.0], np.cumsum(ranking.sums(positive))[:-1]])[ranking.group]
    precision = (so_far - before) / ranking.place
    return mean(ranking.sums(precision * positive) / ranking.sums(positive))


def ndcg(ranking: Ranking, k: int | None = None) -> float:
    """The mean over groups of the gain of the first `k` (default: all), each label divided by
    log2(place + 1), over the same of the best order; in 0..1, nan of no group (Järvelin and
    Kekäläinen 2002, labels as gains, as scikit-learn takes them)."""
    ideal = rank(ranking.group, ranking.gain, ranking.gain)
    return mean(_discounted(ranking, k) / _discounted(ideal, k))


def _discounted(ranking: Ranking, k: int | None) -> Floats:
    return ranking.sums(ranking.gain * _top(ranking, k) / np.log2(ranking.place + 1))


def precision_at(ranking: Ranking, k: int) -> float:
    """The mean over groups of: positives among the first `k`, over k, also where a group has fewer
    candidates (as trec_eval's); in 0..1, nan of no group."""
    return mean(_positives_at(ranking, k) / k)


def recall_at(ranking: Ranking, k: int) -> float:
    """The mean over groups of: positives among the first `k`, over all positives; in 0..1, nan of
    no group."""
    return mean(_positives_at(ranking, k) / ranking.sums(ranking.gain > 0))


def hit_at(ranking: Ranking, k: int) -> float:
    """The share of groups with a positive among the first `k`; in 0..1, nan of no group."""
    return mean(_positives_at(ranking, k) > 0)


def _positives_at(ranking: Ranking, k: int) -> Floats:
    return ranking.sums((ranking.gain > 0) & _top(ranking, k))


def _top(ranking: Ranking, k: int | None) -> npt.NDArray[np.bool_]:
    if k is not None and k < 1:
        raise UserError(f"k is {k}; the first 1 or more are looked at")
    return ranking.place <= (len(ranking.place) if k is None else k)
