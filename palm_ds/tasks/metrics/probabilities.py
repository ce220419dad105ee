"""Probabilities from a head's scores, in NumPy."""

from __future__ import annotations

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities (n,) of scores (n,), as float64."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    return exponentials / exponentials.sum()


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Probabilities (n,) of scores (n,), as float64; no score overflows."""
    return 0.5 * (1 + np.tanh(0.5 * logits.astype(np.float64)))


def rounded(values: np.ndarray) -> list[float]:
    """Numbers as a predictions file has them: 6 decimals."""
    return [round(float(value), 6) for value in values]
