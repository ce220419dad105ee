"""Calibration: whether predictions of 80 per cent are right in 80 of 100 cases.

Predictions are put into ten bins of equal width by their probability; a bin's mean probability and
its share of right predictions would be equal (a reliability diagram, DeGroot and Fienberg 1983).
The expected calibration error is the mean of their distances, weighted by predictions (Naeini et
al. 2015; Guo et al. 2017). Bins are those of scikit-learn's `calibration_curve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from palm_ds.tasks.metrics.counts import paired

BINS = 10


class CalibrationBin(NamedTuple):
    """Predictions with a probability in (low, high], the lowest bin with 0."""

    low: float
    high: float
    confidence: float
    """Their mean probability."""
    accuracy: float
    """The share of them that is right."""
    rows: int

    @property
    def gap(self) -> float:
        return abs(self.accuracy - self.confidence)


def calibration_bins(
    probabilities: npt.ArrayLike, right: npt.ArrayLike, bins: int = BINS
) -> list[CalibrationBin]:
    """The bins that have predictions, from the lowest. `probabilities` (n,) in 0..1; `right` (n,)
    of 0 and 1. Raises UserError if their shapes differ."""
    probs, correct = paired(probabilities, right)
    edges = np.linspace(0.0, 1.0, bins + 1)
    number = np.searchsorted(edges[1:-1], probs)
    return [
        CalibrationBin(
            low=float(edges[i]),
            high=float(edges[i + 1]),
            confidence=float(probs[number == i].mean()),
            accuracy=float(correct[number == i].mean()),
            rows=int((number == i).sum()),
        )
        for i in np.unique(number).tolist()
    ]


def expected_calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """In 0..1; NaN without predictions."""
    total = sum(each.rows for each in bins)
    return sum(each.gap * each.rows for each in bins) / total if total else float("nan")
