"""One class of several, or several at once: accuracy, precision, recall, F1, Matthews.

Predictions and labels (n,) are classes, as numbers or as names; those of a multi-label task are
(n, classes) of 0 and 1. A ranking's F1 (ERNIE's DBQA) is `f1` of its argmax. Not scikit-learn: that
takes ten times as long to import as these, and warns or differs where nothing was predicted; the
tests compare every figure with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from palm_ds.common.errors import UserError
from palm_ds.tasks.metrics.counts import Averages, Counts, averages, mean, paired


def accuracy(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """The share of (n,) predictions that are right, in 0..1; nan of none."""
    predictions, labels = paired(predictions, labels)
    return mean(predictions == labels)


def binary(predictions: npt.ArrayLike, labels: npt.ArrayLike, positive: Any = 1) -> Counts:
    """Precision, recall and F1 of the class `positive` among (n,); all 0 where it never occurs."""
    predictions, labels = paired(predictions, labels)
    predicted, expected = predictions == positive, labels == positive
    return Counts(int((predicted & expected).sum()), int(predicted.sum()), int(expected.sum()))


def f1(predictions: npt.ArrayLike, labels: npt.ArrayLike, positive: Any = 1) -> float:
    """F1 of the class `positive` among (n,), in 0..1; 0 where it never occurs."""
    return binary(predictions, labels, positive).f1


def micro(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[Any] | None = None
) -> Counts:
    """The counts of all `classes` added up (default: all there are, when precision, recall and F1
    are the accuracy). Leave a class out, such as "none", to score the others. 0 of none."""
    return sum(_of_each(predictions, labels, classes), Counts())


def macro(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[Any] | None = None
) -> Averages:
    """The mean over `classes` (default: all that occur in predictions or labels (n,), as
    scikit-learn does) of each one's precision, recall and F1; nan of none."""
    return averages(_of_each(predictions, labels, classes))


def _of_each(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[Any] | None
) -> list[Counts]:
    predictions, labels = paired(predictions, labels)
    there = np.unique(np.concatenate([predictions, labels])) if classes is None else classes
    return [binary(predictions, labels, each) for each in there]


def acc_and_f1(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, positive: Any = 1
) -> dict[str, float]:
    """GLUE's figures for MRPC and QQP: the accuracy of (n,), the F1 of `positive`, their mean.
    Of no rows: nan, 0, nan."""
    right, of_positive = accuracy(predictions, labels), f1(predictions, labels, positive)
    return {"acc_and_f1": (right + of_positive) / 2, "accuracy": right, "f1": of_positive}


def confusion(
    predictions: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[Any]
) -> npt.NDArray[np.int64]:
    """How often each label (row) was predicted as each class (column): (classes, classes), in
    the order of `classes`. A class outside them is a UserError. Zeros of no rows."""
    predictions, labels = paired(predictions, labels)
    number = {name: i for i, name in enumerate(classes)}
    size = len(number)
    try:
        rows = [number[name] for name in labels.tolist()]
        columns = [number[name] for name in predictions.tolist()]
    except KeyError as error:
        raise UserError(
            f"class {error.args[0]!r} is none of {', '.join(map(repr, classes))}"
        ) from error
    cells = np.array(rows, np.int64) * size + np.array(columns, np.int64)
    return np.bincount(cells, minlength=size * size).reshape(size, size)


def matthews(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Matthews correlation of (n,), of any number of classes (Gorodkin 2004), in -1..1. As in
    scikit-learn: 0 where all predictions or all labels are the same class, and of none."""
    predictions, labels = paired(predictions, labels)
    there = np.unique(np.concatenate([predictions, labels])).tolist()
    # Python's integers: products of counts pass 2**63 from some 55,000 rows on.
    table = confusion(predictions, labels, there).astype(object)
    expected, predicted, total = table.sum(axis=1), table.sum(axis=0), table.sum()
    covariance = np.trace(table) * total - (expected * predicted).sum()
    squares = (total**2 - (predicted**2).sum()) * (total**2 - (expected**2).sum())
    return covariance / math.sqrt(squares) if squares else 0.0


def multilabel_micro(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> Counts:
    """Precision, recall and F1 over all cells of (n, classes) 0/1 tables; 0 without a 1."""
    predictions, labels = _cells(predictions, labels)
    return Counts(int((predictions & labels).sum()), int(predictions.sum()), int(labels.sum()))


def multilabel_macro(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> Averages:
    """The mean over the classes of (n, classes) 0/1 tables; a class without a 1 counts as 0 (as
    in scikit-learn), and so does every class of no rows."""
    predictions, labels = _cells(predictions, labels)
    return averages([binary(p, y, True) for p, y in zip(predictions.T, labels.T, strict=True)])


def exact_match(predictions: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """The share of rows of (n, classes) 0/1 tables with every cell right; nan of no rows."""
    predictions, labels = _cells(predictions, labels)
    return mean((predictions == labels).all(axis=1))


def _cells(
    predictions: npt.ArrayLike, labels: npt.ArrayLike
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    predictions, labels = paired(predictions, labels)
    if predictions.ndim != 2:
        raise UserError(
            f"a multi-label table has rows and classes, this one the shape {predictions.shape}"
        )
    return predictions.astype(bool), labels.astype(bool)
