"""Compared with scipy and scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics import numbers
from tests.tasks.metrics.patient import patiently

FLOATS = some.floats(-10, 10).map(lambda x: round(x, 3))
PAIRS = some.lists(some.tuples(FLOATS, FLOATS), min_size=2, max_size=40)
Correlation = Callable[[list[float], list[float]], float]
BOTH = pytest.mark.parametrize("correlation", [numbers.pearson, numbers.spearman])


@patiently
@given(PAIRS)
def test_correlations_equal_scipys(pairs: list[tuple[float, float]]) -> None:
    from scipy import stats

    predictions, labels = np.array(pairs).T
    found = numbers.pearson_and_spearman(predictions, labels)
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        assert set(found.values()) == {0.0}
        return
    linear, _ = np.array(stats.pearsonr(predictions, labels))
    ranked, _ = np.array(stats.spearmanr(predictions, labels))
    assert found["pearson"] == pytest.approx(linear, abs=1e-9)
    assert found["spearman"] == pytest.approx(ranked, abs=1e-9)
    assert found["pearson_and_spearman"] == pytest.approx((linear + ranked) / 2, abs=1e-9)
    assert all(-1 <= value <= 1 for value in found.values())


@patiently
@given(some.lists(some.integers(0, 5), max_size=30))
def test_equal_numbers_share_a_rank_as_in_scipy(values: list[int]) -> None:
    from scipy import stats

    assert numbers.ranks(values).tolist() == stats.rankdata(values).tolist()


@patiently
@given(PAIRS)
def test_squared_errors_equal_scikit_learns(pairs: list[tuple[float, float]]) -> None:
    from sklearn.metrics import mean_squared_error, root_mean_squared_error

    predictions, labels = np.array(pairs).T
    assert numbers.mse(predictions, labels) == pytest.approx(
        mean_squared_error(labels, predictions)
    )
    assert numbers.rmse(predictions, labels) == pytest.approx(
        root_mean_squared_error(labels, predictions)
    )


@BOTH
def test_constant_values_have_no_correlation(correlation: Correlation) -> None:
    assert correlation([0.1] * 3, [1, 2, 3]) == 0.0  # whose mean is not 0.1 to the last bit
    assert correlation([1, 2, 3], [0.1] * 3) == 0.0
    assert correlation([2], [3]) == 0.0


@BOTH
def test_empty_and_non_finite_input_gives_nan_without_a_warning(correlation: Correlation) -> None:
    assert math.isnan(correlation([], []))
    assert math.isnan(correlation([1, math.nan, 3], [1, 2, 3]))
    assert math.isnan(correlation([1, math.inf, 3], [1, 2, 3]))
    assert math.isnan(numbers.mse([], [])) and math.isnan(numbers.rmse([], []))


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1e9, 1e300])
def test_the_scale_of_predictions_does_not_matter(scale: float) -> None:
    predictions, labels = np.array([1, 3, 2, 5.0]), [1, 2, 3, 4]
    expected = numbers.pearson(predictions, labels)
    assert numbers.pearson(predictions * scale, labels) == pytest.approx(expected)
    assert numbers.pearson(-predictions * scale, labels) == pytest.approx(-expected)


def test_predictions_and_labels_must_have_equal_length() -> None:
    with pytest.raises(UserError, match="one prediction for each label"):
        numbers.pearson([[1.0], [2.0]], [1.0, 2.0])


@patiently
@given(some.lists(some.lists(FLOATS, min_size=6, max_size=6), min_size=1, max_size=10))
def test_cosines_equal_scikit_learns(rows: list[list[float]]) -> None:
    from sklearn.metrics.pairwise import cosine_similarity

    one, other = np.array(rows)[:, :3], np.array(rows)[:, 3:]
    theirs = np.diag(cosine_similarity(one, other)).mean()
    assert numbers.cosine(one, other) == pytest.approx(theirs, abs=1e-12)
    assert numbers.cosine(np.zeros((1, 3)), np.ones((1, 3))) == 0.0
    assert math.isnan(numbers.cosine(np.zeros((0, 3)), np.zeros((0, 3))))
