"""Where sentences begin, in English, Chinese and both, from the flags of the words.

A sentence ends at its full stop, question or exclamation mark and the quotes and brackets that
close after it; at an empty line; and at a line end, unless the document's lines are wrapped. The
full stop of an abbreviation, an initial or a list's number does not end it, nor does one whose
next word is in lower case.
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
    HAN,
    INITIAL,
    INNER,
    LOWER,
    NEWLINE,
    OPENER,
    PERIOD,
    SPACE,
    STARTER,
    STRONG,
    TITLE,
)

WRAPPED_AT = (50, 100)  # characters: the longest line of a text wrapped by hand


def is_wrapped(text: str) -> bool:
    """Whether the line ends inside paragraphs are there for the page's width alone: most lines
    that another follows are nearly as long as the longest, and none is long."""
    lines = text.split("\n")
    lengths = [
        len(line) for line, after in zip(lines, lines[1:], strict=False) if line and after.strip()
    ]
    if not lengths or not WRAPPED_AT[0] <= max(map(len, lines)) <= WRAPPED_AT[1]:
        return False
    return float(np.median(lengths)) >= 0.6 * max(lengths)


def sentence_starts(flags: np.ndarray, *, wrapped: bool) -> np.ndarray:
    """(words,) bool: whether a sentence begins at the word. `flags`: (words,) of `lexemes`."""
    starts = paragraph_starts(flags, wrapped=wrapped)
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
    """(words,) bool: whether a paragraph begins at the word: the first one, words after an empty
    line, and after a line end that is not a wrap."""
    starts = (flags & BLANK) != 0
    lines = (flags & NEWLINE) != 0
    if wrapped:
        before = np.roll(flags, 1)
        lines &= ((flags & BULLET) != 0) | ((before & HAN) != 0)
    starts |= lines
    if len(starts):
        starts[0] = True
    return starts


def _after_closers(flags: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each end of a sentence the word after it and after what closes with it: `?!`, `.")`."""
    joined = ((flags & (END | CLOSER)) != 0) & ((flags & SPACE) == 0)
    others = np.append(np.flatnonzero(~joined), len(flags))
    return others[np.searchsorted(others, ends + 1)]


def _splits(
    flags: np.ndarray, ends: np.ndarray, after: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """(ends,) bool: whether a sentence really ends there."""
    end, following = flags[ends], flags[after]
    previous = np.where(ends > 0, flags[ends - 1], 0)
    beyond = np.where(after + 1 < len(flags), flags[np.minimum(after + 1, len(flags) - 1)], 0)
    word = np.where(following & OPENER, beyond, following)  # the first word of what follows
    spaced = (following & SPACE) != 0
    chinese = ((previous | word) & HAN) != 0
    goes_on = ((word & LOWER) != 0) | ((following & INNER) != 0) & ((following & OPENER) == 0)
    closed = after > ends + 1

    split = ((end & CHINESE_END) != 0) & ~goes_on
    split |= ((end & STRONG) != 0) & (spaced | chinese) & ~goes_on
    period = ((end & PERIOD) != 0) & (spaced | chinese) & ~goes_on
    split |= period & ~_abbreviated(flags, ends, previous, word, starts)
    ellipsis = (end & ELLIPSIS) != 0
    split |= ellipsis & spaced & ((word & CAPITAL) != 0) & ~goes_on
    return split | (ellipsis & chinese & closed & ~goes_on)


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
    no |= ((previous & BEFORE_NUMBER) != 0) & ((word & DIGIT) != 0)
    no |= ((previous & (ABBREVIATION | INITIAL)) != 0) & ~begins
    # the p of "a.m." and "e.g.": a letter, another full stop right before it
    two_before = np.where(ends > 1, flags[ends - 2], 0)
    dotted = ((two_before & PERIOD) != 0) & ((previous & SPACE) == 0)
    no |= dotted & ((previous & DIGIT) == 0) & ~begins
    # "1. Introduction", "a. the first": a list's number or letter, first on its line
    numbered = starts[np.maximum(ends - 1, 0)] & ((previous & (DIGIT | INITIAL)) != 0)
    return (no | numbered) & attached
