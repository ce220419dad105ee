"""Splits text into sentences, from the flags of its words, which depend on its language.

A sentence ends after a full stop, question mark or exclamation mark and any closing quotes and
brackets; at an empty line; and at a line end, unless the document's lines are wrapped. A full stop
does not end a sentence after an abbreviation, an initial or a list number, or before a word in
lower case. A quotation mark such as « or “ opens in some languages and closes in others: one with a
space on one side belongs to the other side, and French » to the text before it.
"""

from __future__ import annotations

import numpy as np

from palm_ds.text.word_features import (
    ABBREVIATION,
    BEFORE_NUMBER,
    BLANK,
    BULLET,
    CAPITAL,
    CHINESE_END,
    CLOSER,
    DIGIT,
    ELLIPSIS,
    END,
    ENDING,
    HAN,
    INITIAL,
    INNER,
    LONE,
    LOWER,
    NEWLINE,
    OPENER,
    PERIOD,
    QUOTATIVE,
    QUOTE,
    ROMAN,
    SPACE,
    STARTER,
    STRONG,
    TITLE,
)

WRAPPED_AT = (50, 100)  # characters: range of the longest line in hand-wrapped text


def is_wrapped(text: str) -> bool:
    """Whether line ends inside paragraphs only wrap the text: most lines followed by another are
    nearly as long as the longest, and no line is long."""
    lines = text.split("\n")
    lengths = [
        len(line) for line, after in zip(lines, lines[1:], strict=False) if line and after.strip()
    ]
    if not lengths or not WRAPPED_AT[0] <= max(map(len, lines)) <= WRAPPED_AT[1]:
        return False
    return float(np.median(lengths)) >= 0.6 * max(lengths)


def sentence_starts(flags: np.ndarray, *, wrapped: bool) -> np.ndarray:
    """(words,) bool: whether a sentence begins at the word. `flags`: (words,) `word_flags`."""
    starts = paragraph_starts(flags, wrapped=wrapped)
    flags = _in_context(flags)
    ends = np.flatnonzero(flags & END)
    if not len(ends):
        return starts
    after = _after_closers(flags, ends)
    inside = after < len(flags)
    ends, after = ends[inside], after[inside]
    split = _splits(flags, ends, after, starts)
    starts[after[split]] = True
    return starts


def paragraph_starts(flags: np.ndarray, *, wrapped: bool) -> np.ndarray:
    """(words,) bool: whether a paragraph begins at the word: the first word, and words after an
    empty line or after a line end that does not merely wrap."""
    starts = (flags & BLANK) != 0
    lines = (flags & NEWLINE) != 0
    if wrapped:
        before = np.roll(flags, 1)
        lines &= ((flags & BULLET) != 0) | ((before & HAN) != 0)
    starts |= lines
    if len(starts):
        starts[0] = True
    return starts


def _in_context(flags: np.ndarray) -> np.ndarray:
    """The flags, corrected where they depend on neighbors: quotation marks open or close, and a
    letter before a full stop is an initial."""
    following = np.append(flags[1:], SPACE)
    quote, spaced = (flags & QUOTE) != 0, (flags & SPACE) != 0
    ended = (following & (SPACE | INNER | END)) != 0  # no word touches it on the right
    opener = (flags & OPENER) != 0
    turned = quote & np.where(opener, ~spaced & ended, spaced & ~ended)  # „so“, »so«
    flags = np.where(turned, flags ^ (OPENER | CLOSER), flags)
    apart = quote & ~opener & spaced & ended & ((flags & NEWLINE) == 0)  # « so »
    flags = np.where(apart, flags & ~SPACE, flags)
    initial = ((flags & LONE) != 0) & ((following & PERIOD) != 0) & ((following & SPACE) == 0)
    return np.where(initial, flags & ~STARTER, flags)


def _after_closers(flags: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each sentence end, the next word after its closing punctuation: `?!`, `.")`."""
    joined = ((flags & (END | CLOSER)) != 0) & ((flags & SPACE) == 0)
    others = np.append(np.flatnonzero(~joined), len(flags))
    return others[np.searchsorted(others, ends + 1)]


def _splits(
    flags: np.ndarray, ends: np.ndarray, after: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """(ends,) bool: whether a sentence ends there."""
    end, following = flags[ends], flags[after]
    previous = np.where(ends > 0, flags[ends - 1], 0)
    beyond = np.where(after + 1 < len(flags), flags[np.minimum(after + 1, len(flags) - 1)], 0)
    word = np.where(following & OPENER, beyond, following)  # the first word after the end
    spaced = (following & SPACE) != 0
    chinese = ((previous | word) & HAN) != 0
    continues = ((word & LOWER) != 0) | ((following & INNER) != 0) & ((following & OPENER) == 0)
    closed = after > ends + 1
    continues |= closed & ((word & QUOTATIVE) != 0)

    split = ((end & CHINESE_END) != 0) & ~continues
    split |= ((end & STRONG) != 0) & (spaced | chinese) & ~continues
    period = ((end & PERIOD) != 0) & (spaced | chinese | ((end & HAN) != 0)) & ~continues
    split |= period & ~_abbreviated(flags, ends, previous, word, starts)
    ellipsis = (end & ELLIPSIS) != 0
    split |= ellipsis & spaced & ((word & CAPITAL) != 0) & ~continues
    return split | (ellipsis & chinese & closed & ~continues)


def _abbreviated(
    flags: np.ndarray,
    ends: np.ndarray,
    previous: np.ndarray,
    word: np.ndarray,
    starts: np.ndarray,
) -> np.ndarray:
    """(ends,) bool: whether the full stop belongs to the word before it."""
    begins = (word & STARTER) != 0
    attached = (flags[ends] & SPACE) == 0
    no = (previous & TITLE) != 0
    no |= ((previous & BEFORE_NUMBER) != 0) & ((word & (DIGIT | ROMAN)) != 0)
    no |= ((previous & (ABBREVIATION | INITIAL)) != 0) & ~begins
    # the m of "a.m." and the g of "e.g.": a letter right after another full stop
    two_before = np.where(ends > 1, flags[ends - 2], 0)
    dotted = ((two_before & PERIOD) != 0) & ((previous & SPACE) == 0)
    dotted &= ((previous & (DIGIT | ENDING)) == 0) & ((flags[ends] & HAN) == 0)
    no |= dotted & ~begins
    # "1. Introduction", "a. the first": a list number or letter at the start of a line
    numbered = starts[np.maximum(ends - 1, 0)] & ((previous & (DIGIT | INITIAL)) != 0)
    return (no | numbered) & attached
