"""Sentences as windows of words: finds the words in an example, and combines predictions for words
in several windows.

    words   w0 w1 w2 w3 w4 w5 w6 ...
    window [w0 w1 w2 w3 w4]
    window          [w3 w4 w5 w6 w7]     starts at a word and overlaps the previous window

The position of a word is that of its first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from palm_ds.data.sources.table import TokenizedColumn, TokenizedWords
from palm_ds.data.tasks.example import Example


class WindowWords(NamedTuple):
    """The words of a row with their first token in an example."""

    positions: np.ndarray  # (n,) in the example
    words: np.ndarray  # (n,) within the row
    context: (
        np.ndarray
    )  # (n,) tokens on the shorter side; sides that reach the end of the row count as long


def windows(words: TokenizedWords, most: int, overlap: int) -> np.ndarray:
    """(windows, 3) row and tokens [first, last), for all rows.

    Windows have at most `most` tokens, contain the first token of every word, start at a word, and
    overlap by about `overlap` tokens. The last window of a row is as long as possible."""
    places = []
    for row, length in enumerate(words.tokens.lengths):
        if length <= most:
            places.append((row, 0, int(length)))
        else:
            firsts = words.firsts[words.of(row)] - words.tokens.starts[row]
            places += [(row, *place) for place in _cut(firsts, int(length), most, overlap)]
    return np.array(places, np.int64).reshape(-1, 3)


def _cut(firsts: np.ndarray, length: int, most: int, overlap: int) -> list[tuple[int, int]]:
    cuts = [(0, most)]
    while cuts[-1][1] < length and firsts[-1] > cuts[-1][0]:
        before, stop = cuts[-1]
        start = _word_at(firsts, max(stop - overlap, before + 1))
        if start + most > length:  # it would be short: start earlier
            start = _word_at(firsts, max(length - most, before + 1))
        cuts.append((start, min(start + most, length)))
    return cuts


def _word_at(firsts: np.ndarray, place: int) -> int:
    """Start of the first word at or after `place`, else of the last word."""
    return int(firsts[min(np.searchsorted(firsts, place), len(firsts) - 1)])


def words_in_window(example: Example, words: TokenizedWords) -> WindowWords | None:
    """The words in the first text of an example; None if the text does not consist of their
    tokens."""
    origin, ids = _first_text(example)
    row, tokens = example.item, words.tokens
    firsts = words.firsts[words.of(row)] - tokens.starts[row]
    if not len(origin):
        return WindowWords(*np.empty((3, 0), np.int64))
    place = tokens.place(row, origin)
    if not _stands(ids, place, tokens, row):
        return None
    inside = (firsts >= place[0]) & (firsts <= place[-1])
    at = firsts[inside] - place[0]
    far = np.full_like(at, 2 * tokens.lengths[row])
    left = at if place[0] > 0 else far
    right = len(place) - 1 - at if place[-1] < tokens.lengths[row] - 1 else far
    return WindowWords(at + 1, np.flatnonzero(inside), np.minimum(left, right))


def words_in_text(
    example: Example, words: TokenizedWords, whole: TokenizedColumn
) -> WindowWords | None:
    """The words in the first text of an example whose tokens are those of `whole`, the texts
    encoded for another task; None if they are not. Words without a token of their own are left
    out."""
    origin, ids = _first_text(example)
    row = example.item
    place = whole.place(row, origin)
    if not _stands(ids, place, whole, row):
        return None
    spans, places = whole.spans_of(row)[place], words.spans[words.of(row)]
    token = np.searchsorted(spans[:, 1], places[:, 0], "right")
    known = token < len(spans)
    known[known] = spans[token[known], 0] < places[known, 1]
    at, first = np.unique(
        token[known], return_index=True
    )  # a token in two words belongs to the first
    return WindowWords(at + 1, np.flatnonzero(known)[first], np.zeros_like(at))


def _first_text(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Source offsets and ids of the tokens between [CLS] and the first [SEP]."""
    rest = example.source_offsets[1:]
    many = int((rest < 0).argmax()) if (rest < 0).any() else len(rest)
    return rest[:many], example.unmasked_ids[1 : 1 + many]


def _stands(ids: np.ndarray, place: np.ndarray, tokens: TokenizedColumn, row: int) -> bool:
    """Whether a row has these tokens at these places."""
    row_ids = tokens.ids[tokens.starts[row] : tokens.starts[row + 1]]
    inside = place[0] >= 0 and place[-1] < len(row_ids)
    return bool(inside) and np.array_equal(row_ids[place], ids)


def joined(pieces: Sequence[Mapping[str, Any]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Best tag and log probabilities of each word, from the window with the most context.

    pieces: {"words", "context", "best", "shares"} of the windows of one row. Words that are in no
    window get -1 and -inf."""
    context = np.full(size, -1, np.int64)
    best = np.full(size, -1, np.int64)
    shares = np.full((size, *np.shape(pieces[0]["shares"])[1:]), -np.inf)
    for piece in pieces:
        words, margins = np.array(piece["words"], np.int64), np.array(piece["context"], np.int64)
        better = margins > context[words]
        at = words[better]
        context[at] = margins[better]
        best[at] = np.array(piece["best"], np.int64)[better]
        shares[at] = np.array(piece["shares"], np.float64)[better]
    return best, shares
