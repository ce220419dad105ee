"""Sentences as windows of words: which words an example holds, and what is known of a word that
stands in several.

    words   w0 w1 w2 w3 w4 w5 w6 ...
    window [w0 w1 w2 w3 w4]
    window          [w3 w4 w5 w6 w7]     begins with a word, shares some tokens with the one before

A word is where its first token is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from palm_ds.data.example import Example
from palm_ds.data.table_source import Encoded, Words


class Seen(NamedTuple):
    """The words of a row whose first tokens stand in an example."""

    positions: np.ndarray  # (n,) in the example
    words: np.ndarray  # (n,) within the row
    context: np.ndarray  # (n,) tokens on the poorer side; a side where the row ends is no poor one


def windows(words: Words, most: int, overlap: int) -> np.ndarray:
    """(windows, 3) row, tokens [first, last) of it: all rows, each in windows of at most `most`
    tokens that hold the first token of every word and share `overlap` tokens where words allow it.
    The last one of a row is as long as it may be."""
    found = []
    for row, length in enumerate(words.tokens.lengths):
        if length <= most:
            found.append((row, 0, int(length)))
        else:
            firsts = words.firsts[words.of(row)] - words.tokens.starts[row]
            found += [(row, *place) for place in _cut(firsts, int(length), most, overlap)]
    return np.array(found, np.int64).reshape(-1, 3)


def _cut(firsts: np.ndarray, length: int, most: int, overlap: int) -> list[tuple[int, int]]:
    found = [(0, most)]
    while found[-1][1] < length and firsts[-1] > found[-1][0]:
        before, stop = found[-1]
        start = _word_at(firsts, max(stop - overlap, before + 1))
        if start + most > length:  # it would end early: begin earlier
            start = _word_at(firsts, max(length - most, before + 1))
        found.append((start, min(start + most, length)))
    return found


def _word_at(firsts: np.ndarray, place: int) -> int:
    """The first word that begins there or later, or the last one."""
    return int(firsts[min(np.searchsorted(firsts, place), len(firsts) - 1)])


def seen(example: Example, words: Words) -> Seen | None:
    """Those of the example's first text, if it is made of these words' tokens; else None."""
    origin, ids = _first_text(example)
    row, tokens = example.item, words.tokens
    firsts = words.firsts[words.of(row)] - tokens.starts[row]
    if not len(origin):
        return Seen(*np.empty((3, 0), np.int64))
    place = tokens.place(row, origin)
    if not _stands(ids, place, tokens, row):
        return None
    inside = (firsts >= place[0]) & (firsts <= place[-1])
    at = firsts[inside] - place[0]
    far = np.full_like(at, 2 * tokens.lengths[row])
    left = at if place[0] > 0 else far
    right = len(place) - 1 - at if place[-1] < tokens.lengths[row] - 1 else far
    return Seen(at + 1, np.flatnonzero(inside), np.minimum(left, right))


def seen_in_text(example: Example, words: Words, whole: Encoded) -> Seen | None:
    """The same, if the first text is made of `whole`: the texts that the words make, as another
    task reads them. A word has no place there when it has no token of its own."""
    origin, ids = _first_text(example)
    row = example.item
    place = whole.place(row, origin)
    if not _stands(ids, place, whole, row):
        return None
    spans, places = whole.spans_of(row)[place], words.spans[words.of(row)]
    token = np.searchsorted(spans[:, 1], places[:, 0], "right")
    known = token < len(spans)
    known[known] = spans[token[known], 0] < places[known, 1]
    at, first = np.unique(token[known], return_index=True)  # that of two words is the first one's
    return Seen(at + 1, np.flatnonzero(known)[first], np.zeros_like(at))


def _first_text(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """The origins and the ids of the tokens between [CLS] and the first [SEP]."""
    rest = example.origin[1:]
    many = int((rest < 0).argmax()) if (rest < 0).any() else len(rest)
    return rest[:many], example.original[1 : 1 + many]


def _stands(ids: np.ndarray, place: np.ndarray, tokens: Encoded, row: int) -> bool:
    """Whether these tokens stand at these places of a row."""
    mine = tokens.ids[tokens.starts[row] : tokens.starts[row + 1]]
    inside = place[0] >= 0 and place[-1] < len(mine)
    return bool(inside) and np.array_equal(mine[place], ids)


def joined(pieces: Sequence[Mapping[str, Any]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the windows of one row {"words", "context", "best", "shares"}: for each of its words the
    best tag (-1: it stands in none) and its shares (-inf), from where it has most context."""
    context = np.full(size, -1, np.int64)
    best = np.full(size, -1, np.int64)
    shares = np.full((size, *np.shape(pieces[0]["shares"])[1:]), -np.inf)
    for piece in pieces:
        words, found = np.array(piece["words"], np.int64), np.array(piece["context"], np.int64)
        better = found > context[words]
        at = words[better]
        context[at] = found[better]
        best[at] = np.array(piece["best"], np.int64)[better]
        shares[at] = np.array(piece["shares"], np.float64)[better]
    return best, shares
