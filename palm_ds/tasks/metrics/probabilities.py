"""Probabilities from a head's scores, in NumPy."""

from __future__ import annotations

import math

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities (n,) of scores (n,), as float64."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    return exponentials / exponentials.sum()


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Probabilities (n,) of scores (n,), as float64; no score overflows."""
    return 0.5 * (1 + np.tanh(0.5 * logits.astype(np.float64)))


def rounded(values: np.ndarray) -> list[float]:
    """Numbers as a predictions file has them, which metrics are computed from: `rounded_number`."""
    return [rounded_number(float(value)) for value in values]


def rounded_number(value: float, unit: float = 0.0) -> float:
    """A number of 6 decimals, or of more for 6 digits of its own if it is small, or of `unit`, the
    size of a difference that matters.

    >>> rounded_number(0.12345678), rounded_number(1.2345678e-9)
    (0.123457, 1.23457e-09)
    >>> rounded_number(2.0000001234567, unit=1e-7)
    2.000000123457
    """
    size = abs(unit or value)
    return round(value, 5 - math.floor(math.log10(size)) if 0 < size < 0.1 else 6)


def whole_share(probs: np.ndarray, number: int) -> np.ndarray:
    """(n,) probabilities of the class `number` from rounded ones (n, classes): of those that were
    rounded to 1, the others' say by how much they are less."""
    own, total = probs[:, number], probs.sum(1)
    return np.divide(own, total, out=own.copy(), where=total > 0)
