"""Paragraphs cut into segments, for the tasks about the order of a text.

    document ──paragraphs──> runs of sentences ──lay_out──> lengths ──segments──> starts and ends

A text is a paragraph, or the part of a long one that fits a row: across paragraphs there is much
less order to learn. With more room it grows within its paragraph, first forwards, then backwards.
The room rarely ends at a sentence boundary, so a random segment is shortened; a fixed choice would
reveal the order.
"""

from __future__ import annotations

import math

import numpy as np

from palm_ds.common.rng import derive_key, keyed_uniform
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import layouts


def count_orders(most: int) -> np.ndarray:
    """(most,) the number of classes of texts of up to 1, 2, ... segments."""
    return np.cumsum([math.factorial(n) for n in range(1, most + 1)])


def paragraphs(source: CorpusSource, size: int, shortest: float) -> np.ndarray:
    """(texts, 4) sentences [first, last), and [begin, end) of their paragraph. A text is a whole
    paragraph or, if that is longer than half of `size` tokens, a run of its sentences (texts of 0.5
    to 1 rows would pack badly; they grow back where a row has room).

    Each run has a random target length of `shortest` to 1 times `size` tokens, so that rows pack
    well and the model sees texts of every length. A single sentence longer than `size` is
    skipped."""
    offsets, whole = source.corpus.sentence_starts, source.paragraphs
    fits = offsets[whole[:, 1]] - offsets[whole[:, 0]] <= size / 2
    runs = [np.tile(whole[fits], 2)]
    begin, end = whole[~fits].T
    sentence = begin.copy()
    while (going := sentence < end).any():
        first = sentence[going]
        draw = keyed_uniform(derive_key("paragraph"), first, 1)[:, 0]
        target = ((shortest + (1 - shortest) * draw) * size).astype(np.int64)
        last = source.sentence_end(first, end[going], target)
        runs.append(np.column_stack([first, last, begin[going], end[going]]))
        sentence[going] = last
    table = np.concatenate(runs)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return table[offsets[table[:, 1]] - offsets[table[:, 0]] <= size]


def lay_out(
    texts: np.ndarray, parts: np.ndarray, label: np.ndarray, source: CorpusSource, max_length: int
) -> np.ndarray:
    """Layouts of texts that are cut into `parts` (n,) segments: the sentences [`first`, `last`) of
    each, its `label`, and the tokens of its paragraph `after` it."""
    first, last, begin, end = source.corpus.sentence_starts[texts].T
    length = last - first + source.vocabulary.around(parts)
    spare = np.minimum(max_length - length, first - begin + end - last)
    return layouts(
        length, spare, first=texts[:, 0], last=texts[:, 1], label=label, after=end - last
    )


def segments(
    layout: np.void, parts: int, source: CorpusSource, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The starts and ends of the segments of one layout, as corpus offsets in text order; the text
    is cut at random sentence boundaries."""
    length, first = int(layout["length"]), int(layout["first"])
    last, after = int(layout["last"]), int(layout["after"])
    starts = source.corpus.sentence_starts
    tokens = length - source.vocabulary.around(parts)
    end = min(int(starts[first]) + tokens, int(starts[last]) + after)
    last = max(last, int(np.searchsorted(starts, end)))
    first = min(first, int(np.searchsorted(starts, end - tokens, side="right")) - 1)
    inner = np.sort(rng.choice(np.arange(first + 1, last), parts - 1, replace=False))
    cuts = starts[np.array([first, *inner, last])]
    return cuts[:-1], _shortened(cuts, int(cuts[-1] - cuts[0]) - tokens, rng)


def _shortened(cuts: np.ndarray, excess: int, rng: np.random.Generator) -> np.ndarray:
    """The ends of the segments, with `excess` tokens dropped at the end of a random one. If it were
    always the last, a missing full stop would reveal the order."""
    ends, sizes = cuts[1:].copy(), np.diff(cuts)
    if excess:
        able = np.flatnonzero(sizes > excess)
        ends[rng.choice(able)] -= excess
    return ends
