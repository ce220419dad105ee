"""Regression metrics of (n,) numbers: Pearson and Spearman correlation, mean squared error; and the
cosine of (n, d) vectors.

SciPy is not used: importing it takes ten times as long, and it returns NaN for a constant, which an
untrained model may predict. The tests compare with it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from palm_ds.tasks.metrics.counts import mean, paired


def pearson(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Pearson correlation of (n,), in -1..1.

    0 if all predictions or all labels are equal (SciPy warns and returns NaN; an untrained model
    may predict a constant). NaN without numbers, or if one of them is not finite.
    """
    predictions, labels = _floats(predictions, labels)
    if not predictions.size or not np.isfinite([predictions, labels]).all():
        return float("nan")
    # Range instead of variance: the mean of equal numbers may differ from them by rounding.
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    product = np.dot(_unit(predictions), _unit(labels))
    return float(np.clip(product, -1.0, 1.0))


def _unit(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(n,) with mean 0 and norm 1; scaled first, so that squares neither overflow nor underflow."""
    values = values / np.abs(values).max()
    values = values - values.mean()
    values /= np.abs(values).max()
    return values / np.linalg.norm(values)


def spearman(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Spearman correlation of (n,), in -1..1: the Pearson correlation of the ranks, where equal
    numbers share their mean rank, as in SciPy. 0 and NaN as for `pearson`."""
    predictions, labels = _floats(predictions, labels)
    if not predictions.size or not np.isfinite([predictions, labels]).all():
        return float("nan")
    return pearson(ranks(predictions), ranks(labels))


def ranks(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Ranks (n,) of values (n,), starting at 1; equal values share their mean rank."""
    _, which, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]


def pearson_and_spearman(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, float]:
    """GLUE's scores for STS-B: both correlations of (n,) and their mean."""
    linear, of_ranks = pearson(predictions, labels), spearman(predictions, labels)
    return {
        "pearson_and_spearman": (linear + of_ranks) / 2,
        "pearson": linear,
        "spearman": of_ranks,
    }


def mse(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Mean squared error of (n,); NaN without numbers."""
    predictions, labels = _floats(predictions, labels)
    return mean((predictions - labels) ** 2)


def rmse(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Root mean squared error of (n,), in the unit of the labels; NaN without numbers."""
    return float(np.sqrt(mse(predictions, labels)))


def _floats(
    predictions: npt.ArrayLike, labels: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    predictions, labels = paired(predictions, labels)
    return predictions.astype(np.float64), labels.astype(np.float64)


def cosine(predictions: npt.ArrayLike, references: npt.ArrayLike) -> float:
    """Mean cosine of the vectors (n, d) and their references, in -1..1; 0 for a pair with a zero
    vector, as in scikit-learn, NaN without vectors."""
    predictions, references = _floats(predictions, references)
    norms = np.linalg.norm(predictions, axis=-1) * np.linalg.norm(references, axis=-1)
    products = (predictions * references).sum(-1)
    return mean(np.divide(products, norms, out=np.zeros_like(norms), where=norms > 0))
