"""Rounded numbers of predictions: readable, and still in order."""

from __future__ import annotations

import numpy as np
import pytest

from palm_ds.tasks.metrics.probabilities import rounded, rounded_number, softmax, whole_share


@pytest.mark.parametrize(
    ("number", "kept"),
    [
        (0.12345678, 0.123457),
        (-12.3456789, -12.345679),
        (123456.7891234, 123456.789123),
        (0.01234567, 0.0123457),
        (-1.2345678e-9, -1.23457e-9),
        (0.0999999999, 0.1),
        (5e-324, 5e-324),
        (0.0, 0.0),
        (1.0, 1.0),
        (np.inf, np.inf),
    ],
)
def test_small_numbers_keep_six_digits(number: float, kept: float) -> None:
    assert rounded(np.array([number])) == [kept]


def test_a_unit_says_how_many_decimals_matter() -> None:
    assert rounded_number(2.0000001234567, 1e-7) == 2.000000123457
    assert rounded_number(1.2345678e-9, 0.5) == 0.0
    assert np.isnan(rounded_number(np.nan))


def test_rounded_probabilities_near_1_are_told_apart_by_the_others() -> None:
    logits = np.array([[0.0, 17.5, -3.0], [0.0, 19.0, -3.0], [0.0, -19.0, -3.0]])
    probs = np.array([softmax(row) for row in logits])
    written = np.array([rounded(row) for row in probs])
    assert written[0, 1] == written[1, 1] == 1.0
    assert 1 - whole_share(written, 1) == pytest.approx(1 - probs[:, 1], rel=1e-5)
    assert whole_share(written, 1)[2] == pytest.approx(probs[2, 1], rel=1e-5)
    assert whole_share(np.zeros((1, 2)), 1).tolist() == [0.0]
