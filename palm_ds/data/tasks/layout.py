"""Layouts: structured arrays that say what an example is made of before it is built.

    layouts(length, spare, start=start, tokens=tokens)["start"]    (n,) int64

Every layout has a `length` and by how many tokens the example could be longer (`spare`); the other
fields are the task's. Rows are packed from the lengths alone.
"""

from __future__ import annotations

import numpy as np


def layouts(length: np.ndarray, spare: np.ndarray | int = 0, **fields: np.ndarray) -> np.ndarray:
    """(n,) structured int64: one field per argument; an (n, k) argument becomes a field of shape
    (k,)."""
    columns = {"length": length, "spare": spare, **fields}
    dtype = [(name, np.int64, np.shape(values)[1:]) for name, values in columns.items()]
    found = np.empty(len(length), dtype)
    for name, values in columns.items():
        found[name] = values
    return found


def lengthened(layout: np.void, tokens: int) -> np.void:
    """A copy of one layout that is longer by some of its spare tokens."""
    longer = layout.copy()
    longer["length"] += tokens
    longer["spare"] -= tokens
    return longer
