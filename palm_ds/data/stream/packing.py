"""Packs whole examples into rows of a fixed length: best fit decreasing."""

from __future__ import annotations

import numpy as np


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
