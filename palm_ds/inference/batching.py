"""Division of texts into batches without padding."""

from __future__ import annotations

import numpy as np
import torch

from palm_ds.model.attention.tiles import TILE

_SHORT_ROWS = (64, TILE)


def batch_tokens_for(device: torch.device) -> int:
    """On a CPU, few enough that the activations of a layer stay in cache."""
    return 1024 if device.type == "cpu" else 16384


def row_capacity(attention: str, longest: int) -> int:
    """Tokens of a row: short texts go into short rows of equal length; long ones all into one row
    (0) if attention costs the same then."""
    short = [row for row in _SHORT_ROWS if longest <= row]
    if attention == "triton" or (attention == "tiles" and not short):
        return 0
    return short[0] if short else longest


def even_parts(lengths: np.ndarray, most: int) -> list[np.ndarray]:
    """Split examples into consecutive parts of at most about `most` tokens, evenly.

    >>> even_parts(np.array([5, 5, 5, 5]), 10)
    [array([0, 1]), array([2, 3])]
    """
    ends = np.cumsum(lengths)
    parts = -(-int(ends[-1]) // most)
    part_of = (ends - lengths) * parts // ends[-1]
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(part_of)) + 1)
