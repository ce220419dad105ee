"""Overlapping windows over texts longer than a row, and the best answer spans in a window.

tokens 0 ................................................ length
[first, first + size)
        [first + step, ...)          every token is in at least one window
                [..., length)        and has the most context in exactly one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Windows(NamedTuple):
    """Windows of several texts, in the order of texts and tokens; all fields (windows,) int64."""

    text: np.ndarray
    first: np.ndarray
    last: np.ndarray  # exclusive
    size: np.ndarray
    step: np.ndarray


def cut(lengths: np.ndarray, sizes: np.ndarray, stride: int) -> Windows:
    """Windows of at most `sizes` (texts,) tokens, each starting `stride` tokens (at most the window
    size) after the previous one. An empty text has one empty window."""
    step = np.minimum(stride, sizes)
    count = 1 + np.maximum(-(-(lengths - sizes) // step), 0)
    text = np.repeat(np.arange(len(lengths)), count)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    first = number * step[text]
    last = np.minimum(first + sizes[text], lengths[text])
    return Windows(text, first, last, sizes[text], step[text])


def most_context(first: int, last: int, *, size: int, step: int, length: int) -> np.ndarray:
    """(last - first,) bool: whether this window gives a token more context than all other windows
    of the text.

    As in BERT's run_squad.py, context is the number of tokens on the shorter side plus 0.01 times
    the length of the window; the first of equal windows wins."""
    ends = max(-(-(length - size) // step), 0)
    near = np.arange(max((first - size) // step + 1, 0), min((last - 1) // step, ends) + 1)
    starts = near * step
    stops = np.minimum(starts + size, length)
    at = np.arange(first, last)[:, None]
    shorter = np.minimum(at - starts, stops - 1 - at)  # negative outside the window
    score = np.where(shorter < 0, -np.inf, shorter + 0.01 * (stops - starts))
    return near[score.argmax(1)] * step == first


def best_spans(
    start: np.ndarray, end: np.ndarray, *, longest: int, most: int, allowed: np.ndarray
) -> np.ndarray:
    """(spans, 2) first and last token of the `most` best spans, best first.

    The score of a span is the sum of its `start` and `end` scores (tokens,); of equal spans the
    earlier and shorter comes first. Spans have at most `longest` tokens and start at `allowed`
    (tokens,) ones. There may be fewer than `most`."""
    tokens = len(start)
    if not tokens or not allowed.any():
        return np.empty((0, 2), np.int64)
    longest = min(longest, tokens)
    padded = np.concatenate([end, np.full(longest - 1, -np.inf)])
    sums = np.lib.stride_tricks.sliding_window_view(padded, longest) + start[:, None]
    # One of the best spans starts where the best span from that start is one of the best.
    rows = np.flatnonzero(allowed)
    rows = rows[_largest(sums[rows].max(1), most)]
    places = np.stack(np.nonzero(np.isfinite(sums[rows])), 1)
    scores = sums[rows[places[:, 0]], places[:, 1]]
    kept = _largest(scores, most)
    firsts = rows[places[kept, 0]]
    spans = np.column_stack([firsts, firsts + places[kept, 1]])
    return spans[np.lexsort((spans[:, 1], spans[:, 0], -scores[kept]))][:most]


def _largest(values: np.ndarray, most: int) -> np.ndarray:
    """Unordered indices of the largest values, including all that equal the smallest of these."""
    if most >= len(values):
        return np.arange(len(values))
    least = np.partition(values, len(values) - most)[len(values) - most]
    return np.flatnonzero(values >= least)


def different(texts: Sequence[str], most: int) -> list[int]:
    """Indices of the first `most` distinct texts; empty texts are skipped."""
    best: dict[str, int] = {}
    for place, text in enumerate(texts):
        if len(best) == most:
            break
        if text:
            best.setdefault(text, place)
    return list(best.values())
