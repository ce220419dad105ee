"""Classification metrics, single-label and multi-label: accuracy, F1, AUC, Matthews, ...; those of
ERNIE's Propeller at a given precision or threshold.

Predictions and labels are (n,) classes, as numbers or names; for multi-label tasks they are
(n, classes) of 0 and 1. The F1 of a ranking (ERNIE's DBQA) is `f1` of its argmax. scikit-learn is
not used: importing it takes ten times as long, and it warns or differs if nothing was predicted.
The tests compare every score with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics.counts import Averages, MatchCounts, averages, mean, nan_lowest, paired


def accuracy(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Share of correct predictions (n,), in 0..1; NaN if there are none."""
    predictions, labels = paired(predictions, labels)
    return mean(predictions == labels)


def binary(predictions: npt.ArrayLike, labels: npt.ArrayLike, positive: object = 1) -> MatchCounts:
    """MatchCounts of the class `positive` among (n,); its scores are 0 if it never occurs."""
    predictions, labels = paired(predictions, labels)
    predicted, expected = predictions == positive, labels == positive
    return MatchCounts(int((predicted & expected).sum()), int(predicted.sum()), int(expected.sum()))


def f1(predictions: npt.ArrayLike, labels: npt.ArrayLike, positive: object = 1) -> float:
    """F1 of the class `positive` among (n,), in 0..1; 0 if it never occurs."""
    return binary(predictions, labels, positive).f1


def auc(scores: npt.ArrayLike, labels: npt.ArrayLike, positive: object = 1) -> float:
    """Area under the ROC curve: the share of pairs of a positive and another row whose scores (n,)
    are in order, equal ones counting half, and NaN the lowest. In 0..1; NaN unless there are
    both."""
    values, actual = paired(nan_lowest(scores), labels)
    mine = actual == positive
    count = int(mine.sum())
    if not 0 < count < len(mine):
        return math.nan
    _, place, ties = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]  # from 1; the mean of equal ones
    return float((ranks[mine].sum() - count * (count + 1) / 2) / (count * (len(mine) - count)))


def recall_at_precision(
    scores: npt.ArrayLike, labels: npt.ArrayLike, precision: float, positive: object = 1
) -> float:
    """The highest recall of the class `positive` among the thresholds of the scores (n,) that have
    at least this precision; 0 if none has. In 0..1; NaN without rows of the class. (Propeller's
    wants more than this precision.)"""
    values, actual = paired(nan_lowest(scores), labels)
    order = np.argsort(-values, kind="stable")
    mine, values = (actual == positive)[order], values[order]
    if not mine.any():
        return math.nan
    last = np.append(values[1:] < values[:-1], True)  # of each run of equal scores
    right, chosen = np.cumsum(mine)[last], np.flatnonzero(last) + 1
    return float(right[right / chosen >= precision].max(initial=0) / mine.sum())


def precision_at_threshold(
    scores: npt.ArrayLike, labels: npt.ArrayLike, threshold: float, positive: object = 1
) -> float:
    """Share of the class `positive` among the rows whose scores (n,) exceed the threshold, as in
    Propeller; in 0..1, 0 if there are none."""
    values, actual = paired(scores, labels)
    return binary(values > threshold, actual == positive, True).precision


def micro(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[Any] | None = None
) -> MatchCounts:
    """Summed counts of `classes`; by default all, which makes precision, recall and F1 equal to the
    accuracy. Leave out a class, such as "none", to score only the others."""
    return sum(_of_each(predictions, labels, classes), MatchCounts())


def macro(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[Any] | None = None
) -> Averages:
    """Means over `classes` of precision, recall and F1; NaN if there are none. By default all
    classes in predictions or labels (n,), as in scikit-learn."""
    return averages(_of_each(predictions, labels, classes))


def _of_each(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[Any] | None
) -> list[MatchCounts]:
    predictions, labels = paired(predictions, labels)
    present = np.unique(np.concatenate([predictions, labels])) if classes is None else classes
    return [binary(predictions, labels, label) for label in present]


def acc_and_f1(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, positive: object = 1
) -> dict[str, float]:
    """GLUE's scores for MRPC and QQP: accuracy of (n,), F1 of `positive`, and their mean. Without
    rows these are NaN, 0 and NaN."""
    right, of_positive = accuracy(predictions, labels), f1(predictions, labels, positive)
    return {"acc_and_f1": (right + of_positive) / 2, "accuracy": right, "f1": of_positive}


def confusion(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[Any]
) -> npt.NDArray[np.int64]:
    """Confusion matrix (classes, classes) in the order of `classes`: labels are rows, predictions
    columns. Raises UserError for a class that is not in `classes`."""
    predictions, labels = paired(predictions, labels)
    number = {name: i for i, name in enumerate(classes)}
    size = len(number)
    try:
        rows = [number[name] for name in labels.tolist()]
        columns = [number[name] for name in predictions.tolist()]
    except KeyError as error:
        raise UserError(
            f"class {error.args[0]!r} is not one of {', '.join(map(repr, classes))}"
        ) from error
    cells = np.array(rows, np.int64) * size + np.array(columns, np.int64)
    return np.bincount(cells, minlength=size * size).reshape(size, size)


def matthews(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Matthews correlation of (n,) for any number of classes (Gorodkin 2004), in -1..1.

    As in scikit-learn, 0 if all predictions or all labels are the same class, or without rows."""
    predictions, labels = paired(predictions, labels)
    present = np.unique(np.concatenate([predictions, labels])).tolist()
    # Python integers: products of counts exceed 2**63 from about 55,000 rows.
    table = confusion(predictions, labels, present).astype(object)
    expected, predicted, total = table.sum(axis=1), table.sum(axis=0), table.sum()
    covariance = np.trace(table) * total - (expected * predicted).sum()
    squares = (total**2 - (predicted**2).sum()) * (total**2 - (expected**2).sum())
    return covariance / math.sqrt(squares) if squares else 0.0


def multilabel_micro(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> MatchCounts:
    """MatchCounts over all cells of (n, classes) 0/1 tables."""
    predictions, labels = _cells(predictions, labels)
    return MatchCounts(int((predictions & labels).sum()), int(predictions.sum()), int(labels.sum()))


def multilabel_macro(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> Averages:
    """Means over the classes of (n, classes) 0/1 tables; a class without a 1 counts as 0, as in
    scikit-learn."""
    predictions, labels = _cells(predictions, labels)
    return averages([binary(p, y, True) for p, y in zip(predictions.T, labels.T, strict=True)])


def exact_match(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Share of rows of (n, classes) 0/1 tables with every cell correct; NaN without rows."""
    predictions, labels = _cells(predictions, labels)
    return mean((predictions == labels).all(axis=1))


def _cells(
    predictions: npt.ArrayLike, labels: npt.ArrayLike
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    predictions, labels = paired(predictions, labels)
    if predictions.ndim != 2:
        raise UserError(
            f"multi-label predictions have shape {predictions.shape}; expected (rows, classes)"
        )
    return predictions.astype(bool), labels.astype(bool)
