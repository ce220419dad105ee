"""MatchCounts of correct, predicted and expected items, and their precision, recall and F1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from palm_ds.common.errors import UserError


@dataclass(frozen=True)
class MatchCounts:
    """Numbers of predicted items, of expected items, and of items in both (`right`). MatchCounts of
    subsets can be added.

    The ratios are in 0..1, and 0 if the denominator is 0 (van Rijsbergen 1979; scikit-learn's
    `zero_division=0`).
    """

    right: int = 0
    predicted: int = 0
    expected: int = 0

    def __add__(self, other: MatchCounts) -> MatchCounts:
        return MatchCounts(
            self.right + other.right,
            self.predicted + other.predicted,
            self.expected + other.expected,
        )

    @property
    def precision(self) -> float:
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        return self.right / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        both = self.predicted + self.expected
        return 2 * self.right / both if both else 0.0


class Averages(NamedTuple):
    """Means of precision, recall and F1 over classes; each in 0..1, NaN without classes."""

    precision: float
    recall: float
    f1: float


def averages(counts: list[MatchCounts]) -> Averages:
    """Macro averages: every class has the same weight. F1 is the mean of F1s, not the F1 of
    means."""
    return Averages(
        mean([count.precision for count in counts]),
        mean([count.recall for count in counts]),
        mean([count.f1 for count in counts]),
    )


def mean(values: npt.ArrayLike) -> float:
    """Arithmetic mean of values (n,); NaN if there are none, without NumPy's warning."""
    values = np.asarray(values, np.float64)
    return float(values.mean()) if values.size else float("nan")


def nan_lowest(scores: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Scores of which NaN, which NumPy sorts as the highest, is as low as any."""
    values = np.asarray(scores, np.float64)
    return np.where(np.isnan(values), -np.inf, values)


def paired(
    predictions: npt.ArrayLike, labels: npt.ArrayLike
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Both as arrays. Raises UserError if their shapes differ."""
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    if predictions.shape != labels.shape:
        raise UserError(
            f"predictions have shape {predictions.shape}, labels have shape {labels.shape};"
            " expected one prediction for each label"
        )
    return predictions, labels
