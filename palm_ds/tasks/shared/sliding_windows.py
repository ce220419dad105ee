"""Windows over texts that are longer than a row, and the best answers within one.

tokens 0 ................................................ length
[first, first + size)
        [first + step, ...)          every token is in one window at least,
                [..., length)        and has the most context in just one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Windows(NamedTuple):
    """Windows of several texts, text by text from left to right; each (windows,) int64."""

    text: np.ndarray
    first: np.ndarray
    last: np.ndarray  # the token after the last
    size: np.ndarray
    step: np.ndarray


def cut(lengths: np.ndarray, sizes: np.ndarray, stride: int) -> Windows:
    """Windows of at most `sizes` (texts,) tokens, each beginning `stride` tokens after the one
    before, or as many as that one holds. A text without tokens has one window without any."""
    step = np.minimum(stride, sizes)
    count = 1 + np.maximum(-(-(lengths - sizes) // step), 0)
    text = np.repeat(np.arange(len(lengths)), count)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    first = number * step[text]
    last = np.minimum(first + sizes[text], lengths[text])
    return Windows(text, first, last, sizes[text], step[text])


def most_context(first: int, last: int, *, size: int, step: int, length: int) -> np.ndarray:
    """(last - first,) bool: which tokens of a window have no more context in another window of
    their text.

    BERT's measure (run_squad.py): tokens on the poorer side, and 0.01 a token of the window; of
    equal windows the first has it."""
    ends = max(-(-(length - size) // step), 0)
    near = np.arange(max((first - size) // step + 1, 0), min((last - 1) // step, ends) + 1)
    starts = near * step
    stops = np.minimum(starts + size, length)
    at = np.arange(first, last)[:, None]
    poorer = np.minimum(at - starts, stops - 1 - at)  # negative outside of a window
    score = np.where(poorer < 0, -np.inf, poorer + 0.01 * (stops - starts))
    return near[score.argmax(1)] * step == first


def best_spans(
    start: np.ndarray, end: np.ndarray, *, longest: int, most: int, allowed: np.ndarray
) -> np.ndarray:
    """(spans, 2) first and last token of the `most` spans with the highest sum of the scores
    (tokens,) of both, the best first, of equal ones the earlier and shorter. They are at most
    `longest` tokens long and begin at `allowed` (tokens,) ones; there may be fewer."""
    tokens = len(start)
    if not tokens or not allowed.any():
        return np.empty((0, 2), np.int64)
    longest = min(longest, tokens)
    padded = np.concatenate([end, np.full(longest - 1, -np.inf)])
    sums = np.lib.stride_tricks.sliding_window_view(padded, longest) + start[:, None]
    # A span among the best begins where the best span from there is among the best such.
    rows = np.flatnonzero(allowed)
    rows = rows[_largest(sums[rows].max(1), most)]
    places = np.stack(np.nonzero(np.isfinite(sums[rows])), 1)
    scores = sums[rows[places[:, 0]], places[:, 1]]
    kept = _largest(scores, most)
    firsts = rows[places[kept, 0]]
    spans = np.column_stack([firsts, firsts + places[kept, 1]])
    return spans[np.lexsort((spans[:, 1], spans[:, 0], -scores[kept]))][:most]


def _largest(values: np.ndarray, most: int) -> np.ndarray:
    """Where the largest are, in no order; all that equal the least of them as well."""
    if most >= len(values):
        return np.arange(len(values))
    least = np.partition(values, len(values) - most)[len(values) - most]
    return np.flatnonzero(values >= least)


def different(texts: Sequence[str], most: int) -> list[int]:
    """Where the first `most` different texts stand; those without a character are left out."""
    found: dict[str, int] = {}
    for place, text in enumerate(texts):
        if len(found) == most:
            break
        if text:
            found.setdefault(text, place)
    return list(found.values())
