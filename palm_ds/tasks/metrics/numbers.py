"""Regression: Pearson's and Spearman's correlation, and squared error, of (n,) numbers.

Not scipy: importing it takes ten times as long as this, and it gives nan for a constant, which a
model predicts at its start; the tests compare with it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from palm_ds.tasks.metrics.counts import mean, paired


def pearson(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Pearson's correlation of (n,), in -1..1.

    0 where all predictions or all labels are one number, which tells nothing of the other (scipy
    warns and gives nan; a model at its start does predict one number); nan of no numbers, or
    where one of them is not finite.
    """
    predictions, labels = _floats(predictions, labels)
    if not predictions.size or not np.isfinite([predictions, labels]).all():
        return float("nan")
    # By extremes, not by variance: the mean of equal numbers may be rounded off them.
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    product = np.dot(_unit(predictions), _unit(labels))
    return float(np.clip(product, -1.0, 1.0))


def _unit(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(n,) with mean 0 and norm 1; scaled first, so that no square over- or underflows."""
    values = values / np.abs(values).max()
    values = values - values.mean()
    values /= np.abs(values).max()
    return values / np.linalg.norm(values)


def spearman(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Spearman's correlation of (n,), in -1..1: Pearson's of the ranks, equal numbers sharing the
    mean of theirs (as scipy's). 0 and nan as for `pearson`."""
    predictions, labels = _floats(predictions, labels)
    if not predictions.size or not np.isfinite([predictions, labels]).all():
        return float("nan")
    return pearson(ranks(predictions), ranks(labels))


def ranks(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The ranks (n,), from 1, of values (n,); equal ones share the mean of theirs."""
    _, which, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]


def pearson_and_spearman(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, float]:
    """GLUE's figures for STS-B: both correlations of (n,) and their mean."""
    linear, of_ranks = pearson(predictions, labels), spearman(predictions, labels)
    return {
        "pearson_and_spearman": (linear + of_ranks) / 2,
        "pearson": linear,
        "spearman": of_ranks,
    }


def mse(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """The mean squared error of (n,), 0 or more; nan of no numbers."""
    predictions, labels = _floats(predictions, labels)
    return mean((predictions - labels) ** 2)


def rmse(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """The root of the mean squared error of (n,), in the labels' own unit; nan of no numbers."""
    return float(np.sqrt(mse(predictions, labels)))


def _floats(
    predictions: npt.ArrayLike, labels: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    predictions, labels = paired(predictions, labels)
    return predictions.astype(np.float64), labels.astype(np.float64)
