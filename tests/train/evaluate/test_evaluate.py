"""The statistics of a score."""

from __future__ import annotations

import math

import pytest

from palm_ds.train.evaluate.evaluate import TaskScore


def score(accuracy: float, baseline: float, count: int = 100) -> TaskScore:
    return TaskScore(
        count=count,
        loss=1.0,
        accuracy=accuracy,
        baseline_loss=2.0,
        baseline_accuracy=baseline,
    )


def test_standard_errors_above_the_baseline() -> None:
    assert score(0.6, 0.5).standard_error == pytest.approx(math.sqrt(0.24 / 100))
    assert score(0.6, 0.5).standard_errors_above == pytest.approx(0.1 / math.sqrt(0.0024))


@pytest.mark.parametrize(
    ("accuracy", "baseline", "above"), [(0.0, 0.2, -5.0), (1.0, 0.5, 10.0), (1.0, 1.0, 0.0)]
)
def test_an_accuracy_of_0_or_1_does_not_divide_by_zero(accuracy, baseline, above) -> None:
    assert score(accuracy, baseline).standard_errors_above == pytest.approx(above)


def test_the_perplexity_of_a_huge_loss_is_finite() -> None:
    values = vars(score(0.5, 0.5)) | {"loss": 1e6}
    assert math.isfinite(TaskScore(**values).perplexity)
