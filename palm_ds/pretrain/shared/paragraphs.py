"""Paragraphs, cut into segments: what the tasks about the order of a text share.

    document ──paragraphs──> runs of sentences ──lay_out──> lengths ──segments──> begins and ends

A text is a whole paragraph, or what of a long one fits into a row: across paragraphs there is much
less order to learn. One that is given more room takes in what follows it in its paragraph, then
what goes before. The room seldom ends with a sentence, so one segment is cut short: any of them, so
that the cut says nothing of the order.
"""

from __future__ import annotations

import numpy as np

from palm_ds.common import rng as keyed
from palm_ds.data.corpus_source import Source
from palm_ds.data.layout import layouts


def paragraphs(source: Source, size: int, shortest: float) -> np.ndarray:
    """(texts, 4) sentences [first, last), and [begin, end) of the paragraph they are of: whole
    paragraphs, and runs of whole sentences of those that are longer than half of `size` tokens
    (texts of 0.5 to 1 rows would fit beside nothing; where a row has room they grow back).

    Each run is drawn a target between `shortest` and 1 times `size` tokens, so that rows pack well
    and the model sees texts of every length. A text longer than `size` (one sentence that is) is
    left out."""
    offsets, whole = source.corpus.sentence_starts, source.paragraphs
    fits = offsets[whole[:, 1]] - offsets[whole[:, 0]] <= size / 2
    runs = [np.tile(whole[fits], 2)]
    begin, end = whole[~fits].T
    sentence = begin.copy()
    while (going := sentence < end).any():
        first = sentence[going]
        draw = keyed.uniform(keyed.key("paragraph"), first, 1)[:, 0]
        target = ((shortest + (1 - shortest) * draw) * size).astype(np.int64)
        last = source.sentence_end(first, end[going], target)
        runs.append(np.column_stack([first, last, begin[going], end[going]]))
        sentence[going] = last
    table = np.concatenate(runs)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return table[offsets[table[:, 1]] - offsets[table[:, 0]] <= size]


def lay_out(
    texts: np.ndarray, parts: np.ndarray, label: np.ndarray, source: Source, room: int
) -> np.ndarray:
    """(n, 6) int64 layouts of texts that are cut into so many `parts`: length, how much longer,
    first sentence, one past the last, label, tokens of the paragraph after it."""
    first, last, begin, end = source.corpus.sentence_starts[texts].T
    length = 1 + last - first + parts
    spare = np.minimum(room - length, first - begin + end - last)
    return layouts(
        length, spare, first=texts[:, 0], last=texts[:, 1], label=label, after=end - last
    )


def segments(
    layout: np.void, parts: int, source: Source, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Where the segments of one layout begin and end in the corpus, in the order of the text; they
    are cut at drawn sentences."""
    length, first = int(layout["length"]), int(layout["first"])
    last, after = int(layout["last"]), int(layout["after"])
    starts, tokens = source.corpus.sentence_starts, length - 1 - parts
    end = min(int(starts[first]) + tokens, int(starts[last]) + after)
    last = max(last, int(np.searchsorted(starts, end)))
    first = min(first, int(np.searchsorted(starts, end - tokens, side="right")) - 1)
    inner = np.sort(rng.choice(np.arange(first + 1, last), parts - 1, replace=False))
    cuts = starts[np.array([first, *inner, last])]
    return cuts[:-1], _shortened(cuts, int(cuts[-1] - cuts[0]) - tokens, rng)


def _shortened(cuts: np.ndarray, excess: int, rng: np.random.Generator) -> np.ndarray:
    """Where the segments end, `excess` tokens left out at the end of one of them. If it were always
    the last one of the text, a missing full stop would tell the order."""
    ends, sizes = cuts[1:].copy(), np.diff(cuts)
    if excess:
        able = np.flatnonzero(sizes > excess)
        ends[rng.choice(able)] -= excess
    return ends
