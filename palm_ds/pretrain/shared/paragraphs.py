"""Paragraphs cut into segments, for the tasks about the order of a text.

    document ──paragraphs──> runs of sentences ──lay_out──> lengths ──segments──> starts and ends

A text is a paragraph, or the part of a long one that fits a row: across paragraphs there is much
less order to learn. With more room it grows within its paragraph. The room rarely ends at a
sentence boundary, so a random segment is shortened; a fixed choice would reveal the order.

So would one direction. What does not fit is longer than most sentences: cut from the beginning of a
paragraph, parts begin with longer sentences than they end with, and a text that grows forwards has
a long last sentence, which is then shortened. Half of the paragraphs are cut from their end, and
half of the texts grow backwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    long = whole[~fits]
    forwards = keyed_uniform(derive_key("direction"), long[:, 0], 1)[:, 0] < 0.5
    runs = [
        np.tile(whole[fits], 2),
        *_runs(source, long[forwards], size, shortest, forwards=True),
        *_runs(source, long[~forwards], size, shortest, forwards=False),
    ]
    table = np.concatenate(runs)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return table[offsets[table[:, 1]] - offsets[table[:, 0]] <= size]


def _runs(
    source: CorpusSource, whole: np.ndarray, size: int, shortest: float, *, forwards: bool
) -> Iterator[np.ndarray]:
    """The rows of `paragraphs` for runs of these (n, 2), cut from their beginnings or ends."""
    begin, end = whole.T
    start, limit = (begin, end) if forwards else (end, begin)
    edge, reach = start.copy(), source.sentence_end if forwards else source.sentence_begin
    while (going := edge != limit).any():
        here = edge[going]
        draw = keyed_uniform(derive_key("paragraph"), here - (not forwards), 1)[:, 0]
        target = ((shortest + (1 - shortest) * draw) * size).astype(np.int64)
        there = reach(here, limit[going], target)
        first, last = np.minimum(here, there), np.maximum(here, there)
        yield np.column_stack([first, last, begin[going], end[going]])
        edge[going] = there


def lay_out(
    texts: np.ndarray, parts: np.ndarray, label: np.ndarray, source: CorpusSource, max_length: int
) -> np.ndarray:
    """Layouts of texts that are cut into `parts` (n,) segments: the sentences [`first`, `last`) of
    each, its `label`, and the tokens of its paragraph `before` and `after` it."""
    first, last, begin, end = source.corpus.sentence_starts[texts].T
    length = last - first + source.vocabulary.around(parts)
    before, after = first - begin, end - last
    return layouts(
        length,
        np.minimum(max_length - length, before + after),
        first=texts[:, 0],
        last=texts[:, 1],
        label=label,
        before=before,
        after=after,
    )


def segments(
    layout: np.void, parts: int, source: CorpusSource, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The starts and ends of the segments of one layout, as corpus offsets in text order; the text
    is cut at random sentence boundaries."""
    first, last = int(layout["first"]), int(layout["last"])
    starts = source.corpus.sentence_starts
    begin, end = int(starts[first]), int(starts[last])
    tokens = int(layout["length"]) - source.vocabulary.around(parts)
    if tokens > end - begin and rng.random() < 0.5:
        begin = max(end - tokens, begin - int(layout["before"]))
    else:
        begin = min(begin + tokens, end + int(layout["after"])) - tokens
    first = min(first, int(np.searchsorted(starts, begin, side="right")) - 1)
    last = max(last, int(np.searchsorted(starts, begin + tokens)))
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
