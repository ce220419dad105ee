"""Compared with scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics import classes
from tests.tasks.metrics.patient import patiently

ZERO: dict[str, Any] = {"zero_division": 0}
PAIRS = some.lists(some.tuples(some.integers(0, 3), some.integers(0, 3)), min_size=1, max_size=40)
TABLES = some.integers(1, 8).flatmap(
    lambda rows: some.tuples(*[some.lists(some.integers(0, 1), min_size=12, max_size=12)] * rows)
)


@patiently
@given(PAIRS)
def test_classes_are_scored_as_scikit_learn_does(pairs: list[tuple[int, int]]) -> None:
    from sklearn import metrics as sklearn

    predictions, labels = np.array(pairs).T
    assert classes.accuracy(predictions, labels) == pytest.approx(
        sklearn.accuracy_score(labels, predictions)
    )
    one = classes.binary(predictions, labels, 1)
    theirs = sklearn.precision_recall_fscore_support(
        labels, predictions, labels=[1], average="micro", **ZERO
    )
    assert (one.precision, one.recall, one.f1) == pytest.approx(theirs[:3])
    assert classes.f1(predictions, labels, 1) == one.f1
    for chosen in (None, [1, 2]):
        for average, ours in (("micro", classes.micro), ("macro", classes.macro)):
            theirs = sklearn.precision_recall_fscore_support(
                labels, predictions, labels=chosen, average=average, **ZERO
            )
            found = ours(predictions, labels, chosen)
            assert (found.precision, found.recall, found.f1) == pytest.approx(theirs[:3])
            assert 0 <= found.f1 <= 1


@patiently
@given(PAIRS)
def test_confusion_matrices_equal_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    from sklearn import metrics as sklearn

    predictions, labels = np.array(pairs).T
    ours = classes.confusion(predictions, labels, range(4))
    assert (ours == sklearn.confusion_matrix(labels, predictions, labels=range(4))).all()


@patiently
@given(PAIRS)
@pytest.mark.filterwarnings("ignore:A single label was found")
def test_matthews_correlation_equals_scikit_learns(pairs: list[tuple[int, int]]) -> None:
    from sklearn import metrics as sklearn

    predictions, labels = np.array(pairs).T
    found = classes.matthews(predictions, labels)
    assert found == pytest.approx(sklearn.matthews_corrcoef(labels, predictions))
    assert classes.matthews(labels, predictions) == pytest.approx(found)


@patiently
@given(TABLES)
def test_multi_label_scores_equal_those_of_scikit_learn(rows: tuple[list[int]]) -> None:
    from sklearn import metrics as sklearn

    both = np.array(rows).reshape(len(rows), 2, 6)
    predictions, labels = both[:, 0], both[:, 1]
    for average, ours in (("micro", classes.multilabel_micro), ("macro", classes.multilabel_macro)):
        theirs = sklearn.precision_recall_fscore_support(
            labels, predictions, average=average, **ZERO
        )
        found = ours(predictions, labels)
        assert (found.precision, found.recall, found.f1) == pytest.approx(theirs[:3])
    assert classes.exact_match(predictions, labels) == pytest.approx(
        sklearn.accuracy_score(labels, predictions)
    )


@patiently
@given(some.lists(some.tuples(some.integers(0, 5), some.booleans()), min_size=1, max_size=30))
def test_auc_equals_scikit_learns(rows: list[tuple[int, bool]]) -> None:
    from sklearn import metrics as sklearn

    scores, actual = [a / 7 for a, _ in rows], [int(b) for _, b in rows]
    found = classes.auc(scores, actual)
    if len(set(actual)) < 2:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(sklearn.roc_auc_score(actual, scores), abs=1e-12)


def test_a_nan_score_is_the_lowest() -> None:
    assert classes.auc([math.nan, 0.5], [1, 0]) == 0
    assert classes.auc([math.nan, math.nan], [1, 0]) == 0.5
    assert classes.auc([math.nan, -math.inf, 0.5], [1, 0, 0]) == 0.25
    # The threshold of 0.5 has one row, that of NaN all three.
    assert classes.recall_at_precision([0.5, math.nan, math.nan], [1, 1, 0], 0.9) == 0.5


@patiently
@given(
    some.lists(some.tuples(some.integers(0, 5), some.booleans()), min_size=1, max_size=30),
    some.sampled_from([0.3, 0.5, 0.7, 0.9, 1.0]),
)
def test_precision_and_recall_at_thresholds(rows: list[tuple[int, bool]], level: float) -> None:
    """The best of scikit-learn's curve, and its precision of what exceeds the threshold."""
    from sklearn import metrics as sklearn

    scores, actual = np.array([a / 7 for a, _ in rows]), np.array([int(b) for _, b in rows])
    chosen = classes.precision_at_threshold(scores, actual, level)
    assert chosen == pytest.approx(sklearn.precision_score(actual, scores > level, **ZERO))
    found = classes.recall_at_precision(scores, actual, level)
    if not actual.any():
        assert math.isnan(found)
        return
    precision, recall, _ = sklearn.precision_recall_curve(actual, scores)
    assert found == pytest.approx(recall[precision >= level].max())


def test_classes_may_be_names() -> None:
    predictions, labels = ["yes", "no", "yes", "no"], ["yes", "yes", "no", "no"]
    assert classes.f1(predictions, labels, "yes") == 0.5
    assert classes.macro(predictions, labels) == (0.5, 0.5, 0.5)
    assert classes.confusion(predictions, labels, ["yes", "no"]).tolist() == [[1, 1], [1, 1]]
    assert classes.matthews(predictions, labels) == 0.0


def test_acc_and_f1_is_their_mean() -> None:
    found = classes.acc_and_f1([1, 1, 0, 0], [1, 0, 0, 0])
    assert found == pytest.approx(
        {"acc_and_f1": (3 / 4 + 2 / 3) / 2, "accuracy": 3 / 4, "f1": 2 / 3}
    )
    assert next(iter(found)) == "acc_and_f1"


def test_excluding_a_class_scores_the_others() -> None:
    predictions, labels = [0, 0, 1, 2], [0, 1, 1, 1]
    assert classes.micro(predictions, labels).f1 == classes.accuracy(predictions, labels) == 0.5
    others = classes.micro(predictions, labels, [1, 2])
    assert (others.precision, others.recall) == (1 / 2, 1 / 3)


def test_matthews_correlation_of_a_million_rows_does_not_overflow() -> None:
    labels = np.arange(1_000_000) % 2
    predictions = np.where(np.arange(1_000_000) % 4 == 0, 1, labels)
    # [[a, b], [0, 2a]] with a = b = 250,000, by the two-class formula.
    assert classes.matthews(predictions, labels) == pytest.approx(1 / math.sqrt(3))
    assert classes.matthews(labels, labels) == 1.0
    assert classes.matthews(1 - labels, labels) == -1.0


def test_nothing_to_score() -> None:
    assert math.isnan(classes.accuracy([], []))
    assert classes.f1([], []) == classes.matthews([], []) == classes.micro([], []).f1 == 0.0
    assert math.isnan(classes.macro([], []).f1)
    assert classes.confusion([], [], "ab").tolist() == [[0, 0], [0, 0]]
    nothing = np.zeros((0, 3))
    assert math.isnan(classes.exact_match(nothing, nothing))
    assert classes.multilabel_macro(nothing, nothing).f1 == 0.0


def test_mismatches_are_named() -> None:
    with pytest.raises(UserError, match=r"shape \(2,\), labels have shape \(3,\)"):
        classes.accuracy([1, 2], [1, 2, 3])
    with pytest.raises(UserError, match="class 'maybe' is not one of 'yes', 'no'"):
        classes.confusion(["maybe"], ["no"], ["yes", "no"])
    with pytest.raises(UserError, match=r"have shape \(2,\); expected \(rows, classes\)"):
        classes.multilabel_micro([1, 0], [1, 1])
