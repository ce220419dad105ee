"""Compared with scikit-learn, group by group, and with plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics import ranking as it
from tests.tasks.metrics.patient import patiently

Rows = list[tuple[int, float, int]]
ROWS = some.lists(
    some.tuples(some.integers(0, 4), some.integers(0, 5).map(float), some.integers(0, 3)),
    min_size=1,
    max_size=40,
)


def columns(rows: Rows) -> tuple[list[int], list[float], list[int]]:
    groups, scores, labels = zip(*rows, strict=True)
    return list(groups), list(scores), list(labels)


def without_ties(rows: Rows) -> Rows:
    return [(group, score + i / 100, label) for i, (group, score, label) in enumerate(rows)]


def lists(rows: Rows) -> list[list[int]]:
    """The labels of each group with a positive, best score first; in ties the worst label first."""
    found = []
    for group in sorted({group for group, _, _ in rows}):
        mine = [(-score, label) for name, score, label in rows if name == group]
        if any(label for _, label in mine):
            found.append([label for _, label in sorted(mine)])
    return found


def average(values: list[float]) -> object:
    return pytest.approx(sum(values) / len(values) if values else math.nan, nan_ok=True)


@patiently
@given(ROWS)
def test_every_measure_by_plain_loops(rows: Rows) -> None:
    ranking = it.rank(*columns(rows))
    ranked = lists(rows)
    assert ranking.groups == len(ranked)
    assert ranking.left_out == len({group for group, _, _ in rows}) - len(ranked)
    firsts = [1 / (1 + next(i for i, label in enumerate(each) if label)) for each in ranked]
    assert it.mrr(ranking) == average(firsts)
    for k in (1, 2, 5, 100):
        right = [sum(label > 0 for label in each[:k]) for each in ranked]
        there = [sum(label > 0 for label in each) for each in ranked]
        assert it.precision_at(ranking, k) == average([a / k for a in right])
        recalls = [a / b for a, b in zip(right, there, strict=True)]
        assert it.recall_at(ranking, k) == average(recalls)
        assert it.hit_at(ranking, k) == average([float(a > 0) for a in right])


@patiently
@given(ROWS)
def test_map_and_ndcg_equal_scikit_learns_without_ties(rows: Rows) -> None:
    from sklearn.metrics import average_precision_score, ndcg_score

    rows = without_ties(rows)
    ranking = it.rank(*columns(rows))
    precisions, gains = [], []
    for group in sorted({group for group, _, _ in rows}):
        scores = np.array([score for name, score, _ in rows if name == group])
        labels = np.array([label for name, _, label in rows if name == group])
        if labels.any():
            precisions.append(average_precision_score(labels > 0, scores))
            alone = len(labels) == 1  # scikit-learn refuses to rank one candidate
            gains.append([1.0 if alone else ndcg_score([labels], [scores], k=k) for k in (3, None)])
    assert it.average_precision(ranking) == average(precisions)
    assert it.ndcg(ranking, 3) == average([at_3 for at_3, _ in gains])
    assert it.ndcg(ranking) == average([whole for _, whole in gains])


@patiently
@given(ROWS, some.randoms(use_true_random=False))
def test_neither_the_order_of_rows_nor_the_names_of_groups_matter(rows: Rows, random) -> None:
    mixed = random.sample(rows, len(rows))
    groups, scores, labels = columns(mixed)
    ours = it.rank(*columns(rows))
    theirs = it.rank([f"group {9 - group}" for group in groups], scores, labels)
    for measure in (it.mrr, it.average_precision, it.ndcg):
        assert measure(ours) == pytest.approx(measure(theirs), nan_ok=True)
        assert not ours.groups or 0 < measure(ours) <= 1 + 1e-12


@patiently
@given(ROWS)
def test_ties_score_no_more_than_any_order_of_them(rows: Rows) -> None:
    worst, other = it.rank(*columns(rows)), it.rank(*columns(without_ties(rows)))
    if worst.groups:
        for measure in (it.mrr, it.average_precision, it.ndcg):
            assert measure(worst) <= measure(other) + 1e-12


def test_by_hand() -> None:
    ranking = it.rank(list("aaabbccc"), [3, 2, 1, 1, 2, 5, 5, 1], [0, 1, 1, 1, 0, 0, 0, 0])
    assert (ranking.groups, ranking.left_out) == (2, 1)
    assert it.mrr(ranking) == 0.5
    assert it.average_precision(ranking) == pytest.approx(((1 / 2 + 2 / 3) / 2 + 1 / 2) / 2)
    assert it.precision_at(ranking, 2) == 0.5 and it.recall_at(ranking, 2) == 0.75
    assert it.hit_at(ranking, 1) == 0.0
    graded = it.rank([0, 0, 0], [3, 2, 1], [1, 2, 0])
    assert it.ndcg(graded, 1) == 0.5
    discount = 1 / math.log2(3)
    assert it.ndcg(graded) == pytest.approx((1 + 2 * discount) / (2 + discount))


def test_a_constant_score_gets_the_worst_order() -> None:
    assert it.mrr(it.rank([0] * 4, [0.5] * 4, [1, 0, 0, 0])) == 0.25


def test_a_nan_score_is_ranked_last() -> None:
    assert it.mrr(it.rank([0, 0, 0], [math.nan, -math.inf, -5], [1, 0, 0])) == pytest.approx(1 / 3)
    assert it.mrr(it.rank([0, 0], [math.nan, math.nan], [1, 0])) == 0.5
    assert it.pn_ratio([0, 0, 0], [math.nan, 1, 2], [2, 0, 1]) == 0.5  # one pair is in order
    assert it.pn_ratio([0, 0], [math.nan, math.nan], [1, 0]) == 0


def test_nothing_to_score() -> None:
    for ranking in (it.rank([], [], []), it.rank([1, 1, 2], [1, 2, 3], [0, 0, 0])):
        assert ranking.groups == 0
        for measure in (it.mrr, it.average_precision, it.ndcg):
            assert math.isnan(measure(ranking))
        assert math.isnan(it.hit_at(ranking, 1))
    assert ranking.left_out == 2


def test_mismatches_are_named() -> None:
    with pytest.raises(UserError, match="expected one value per candidate"):
        it.rank([1, 2], [1.0], [0, 1])
    for label in (-1, math.nan):
        with pytest.raises(UserError, match="negative or not a number"):
            it.rank([1], [1.0], [label])
    with pytest.raises(UserError, match="k is 0"):
        it.hit_at(it.rank([1], [1.0], [1]), 0)


@patiently
@given(ROWS)
def test_the_pn_ratio_counts_pairs(rows: Rows) -> None:
    """As ERNIE's Propeller: pairs of a group with different labels; equal scores count for
    neither."""
    right = wrong = pairs = 0
    for i, (group, score, label) in enumerate(rows):
        for other_group, other_score, other_label in rows[:i]:
            if group == other_group and label != other_label:
                product = (score - other_score) * (label - other_label)
                right, wrong, pairs = right + (product > 0), wrong + (product < 0), pairs + 1
    found = it.pn_ratio(*columns(rows))
    assert found == pytest.approx(right / max(wrong, 1) if pairs else math.nan, nan_ok=True)


def test_a_better_order_has_a_higher_pn_ratio() -> None:
    """Also where nothing is out of order; Propeller returns 0 then."""
    orders = ([1, 2, 3, 4], [1, 2, 4, 3], [2, 1, 4, 3], [4, 3, 2, 1])
    values = [it.pn_ratio([0] * 4, order, [0, 1, 2, 3]) for order in orders]
    assert values == [6, 5, 2, 0]
