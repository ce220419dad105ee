"""Packing: whole texts into rows of a fixed length (best fit decreasing), and into batches without
padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch

from palm_ds.model.attention.tiles import TILE

T = TypeVar("T")


def pack(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """Rows of indices into `lengths`; the lengths of a row add up to at most `max_length`.

    The free spaces of open rows are bits of one integer, so that the fullest row that still fits
    is found without a search. Equal lengths keep their order.
    """
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= max_length:
        raise ValueError(
            f"lengths from {lengths.min()} to {lengths.max()} do not fit rows of {max_length}"
        )
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(max_length + 1)]  # by free space
    spaces = 0  # bit s: some row has s free
    for index in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[index])
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                spaces ^= 1 << space
            rows[row].append(index)
        else:
            space, row = max_length, len(rows)
            rows.append([index])
        left = space - size
        if left:
            open_rows[left].append(row)
            spaces |= 1 << left
    return rows


def micro_batches(
    rows: Sequence[list[T]], *, size: int, rank: int, world: int
) -> Iterator[list[list[T]]]:
    """This process's share of packed rows, `size` at a time. All processes get equally many parts;
    the last ones may have empty rows."""
    count = -(-len(rows) // (world * size))
    padded = [*rows, *([] for _ in range(count * world * size - len(rows)))]
    own = padded[rank::world]
    yield from (own[first : first + size] for first in range(0, len(own), size))


_SHORT_ROWS = (64, TILE)
_UNIT = 8  # on a GPU, rows are padded to a multiple of this


def batch_tokens_for(device: torch.device) -> int:
    """On a CPU, few enough that the activations of a layer stay in cache: of 512 to 4096 the
    fastest for layers of 256 and of 768."""
    return 2048 if device.type == "cpu" else 16384


def row_capacity(attention: str, longest: int) -> int:
    """Tokens of a row: short texts go into short rows of equal length; long ones all into one row
    (0) if attention costs the same then."""
    short = [row for row in _SHORT_ROWS if longest <= row]
    if attention == "triton" or (attention == "tiles" and not short):
        return 0
    return short[0] if short else longest


def rows_to_predict(lengths: np.ndarray, attention: str) -> list[np.ndarray]:
    """The rows of a batch for predictions, each the numbers of its texts, given the lengths of all.
    One row, equal lengths next to one another, unless attention costs less in several."""
    capacity = 0 if attention == "tiles" else row_capacity(attention, int(lengths.max()))
    if not capacity:
        return [np.argsort(-lengths, kind="stable")]
    return [np.array(row) for row in pack(lengths, capacity)]


def padded_length(longest: int, device: torch.device) -> int:
    """The length of the rows of a batch, given that of the longest."""
    unit = 1 if device.type == "cpu" else _UNIT
    return -(-longest // unit) * unit


def even_parts(lengths: np.ndarray, most: int) -> list[np.ndarray]:
    """Split examples into consecutive parts of at most about `most` tokens, evenly.

    >>> even_parts(np.array([5, 5, 5, 5]), 10)
    [array([0, 1]), array([2, 3])]
    """
    ends = np.cumsum(lengths)
    parts = -(-int(ends[-1]) // most)
    part_of = (ends - lengths) * parts // ends[-1]
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(part_of)) + 1)
