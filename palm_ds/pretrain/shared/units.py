"""The units of a text: its entities, phrases, words and tokens."""

from __future__ import annotations

from typing import Literal

import numpy as np

from palm_ds.data.tasks.example import Example

Unit = Literal["token", "word", "phrase", "entity"]


def units_of(example: Example, annotations: tuple[str, ...]) -> np.ndarray:
    """(tokens,) the number of each token's unit, ascending; -1 for special tokens. `annotations`
    are those of the units; with only "token", or none, every token is a unit."""
    inside = example.source_offsets >= 0
    free = inside.copy()  # not yet in a larger unit
    begins = np.zeros(len(example), bool)
    for mark in ("entity", "phrase"):
        if mark not in annotations:
            continue
        covered = _whole_spans(example.annotations[mark], free)
        begins |= covered & (example.annotations[mark] == 1)
        free &= ~covered
    begins |= free & (example.annotations["word"] == 1) if "word" in annotations else free
    # A unit also starts where the previous one ended: after a special token or a larger unit.
    begins |= inside & ~np.concatenate([[False], inside[:-1]])
    begins |= free & ~np.concatenate([[False], free[:-1]])
    return np.where(inside, np.cumsum(begins) - 1, -1)


def _whole_spans(mark: np.ndarray, free: np.ndarray) -> np.ndarray:
    """(tokens,) bool: tokens of the spans (1 2 2 ...) whose tokens are all free. A 2 after a 0 is
    the rest of a span cut off at the start of a text and does not count."""
    before = np.concatenate([[0], mark[:-1]])
    span = np.cumsum((mark == 1) | ((mark == 2) & (before == 0)))
    broken = (mark > 0) & ~free | (mark == 2) & (before == 0)
    return (mark > 0) & (np.bincount(span, weights=broken)[span] == 0)
