"""Right, predicted, expected: three counts, and precision, recall and F1 of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from palm_ds.common.errors import UserError


@dataclass(frozen=True)
class Counts:
    """What was predicted (`predicted`), what there was (`expected`), and how much of both is the
    same (`right`). Counts of parts add up to the counts of all.

    The ratios lie in 0..1; one over nothing is 0 (van Rijsbergen 1979; scikit-learn's
    `zero_division=0`).
    """

    right: int = 0
    predicted: int = 0
    expected: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
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
        """The harmonic mean of precision and recall."""
        both = self.predicted + self.expected
        return 2 * self.right / both if both else 0.0


class Averages(NamedTuple):
    """Means of several classes' precision, recall and F1; each in 0..1, nan of no class."""

    precision: float
    recall: float
    f1: float


def averages(counts: list[Counts]) -> Averages:
    """Every class weighs the same. The F1 is the mean of F1s, not the F1 of the means."""
    return Averages(
        mean([each.precision for each in counts]),
        mean([each.recall for each in counts]),
        mean([each.f1 for each in counts]),
    )


def mean(values: npt.ArrayLike) -> float:
    """The plain mean of values (n,); nan of none, without numpy's warning."""
    values = np.asarray(values, np.float64)
    return float(values.mean()) if values.size else float("nan")


def paired(
    predictions: npt.ArrayLike, labels: npt.ArrayLike
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Both as arrays of one shape, else a UserError: a prediction belongs to every label."""
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    if predictions.shape != labels.shape:
        raise UserError(
            f"predictions have the shape {predictions.shape}, labels {labels.shape};"
            " there must be one prediction for each label"
        )
    return predictions, labels
