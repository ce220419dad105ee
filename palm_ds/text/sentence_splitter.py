"""Splits text into sentences, from the flags of its words, which depend on its language.

A sentence ends after a full stop, question mark or exclamation mark and any closing quotes and
brackets; at an empty line; and at a line end, unless the document's lines are wrapped. A full stop
does not end a sentence after an abbreviation, an initial or a list number, or before a word in
lower case. A quotation mark such as « or “ opens in some languages and closes in others: one with a
space on one side belongs to the other side, and French » to the text before it.
"""

from __future__ import annotations

import numpy as np

from palm_ds.text.word_features import Flag, has

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
    ends = np.flatnonzero(flags & Flag.END)
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
    starts = has(flags, Flag.BLANK)
    lines = has(flags, Flag.NEWLINE)
    if wrapped:
        before = np.roll(flags, 1)
        lines &= has(flags, Flag.BULLET) | has(before, Flag.HAN)
    starts |= lines
    if len(starts):
        starts[0] = True
    return starts


def _in_context(flags: np.ndarray) -> np.ndarray:
    """The flags, corrected where they depend on neighbors: quotation marks open or close, and a
    letter before a full stop is an initial."""
    following = np.append(flags[1:], Flag.SPACE)
    quote, spaced = has(flags, Flag.QUOTE), has(flags, Flag.SPACE)
    ended = has(following, Flag.SPACE | Flag.INNER | Flag.END)  # no word touches it on the right
    opener = has(flags, Flag.OPENER)
    turned = quote & np.where(opener, ~spaced & ended, spaced & ~ended)  # „so“, »so«
    flags = np.where(turned, flags ^ (Flag.OPENER | Flag.CLOSER), flags)
    apart = quote & ~opener & spaced & ended & ~has(flags, Flag.NEWLINE)  # « so »
    flags = np.where(apart, flags & ~Flag.SPACE, flags)
    initial = has(flags, Flag.LONE) & has(following, Flag.PERIOD) & ~has(following, Flag.SPACE)
    return np.where(initial, flags & ~Flag.STARTER, flags)


def _after_closers(flags: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """For each sentence end, the next word after its closing punctuation: `?!`, `.")`."""
    joined = has(flags, Flag.END | Flag.CLOSER) & ~has(flags, Flag.SPACE)
    others = np.append(np.flatnonzero(~joined), len(flags))
    return others[np.searchsorted(others, ends + 1)]


def _splits(
    flags: np.ndarray, ends: np.ndarray, after: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """(ends,) bool: whether a sentence ends there."""
    end, following = flags[ends], flags[after]
    previous = np.where(ends > 0, flags[ends - 1], 0)
    beyond = np.where(after + 1 < len(flags), flags[np.minimum(after + 1, len(flags) - 1)], 0)
    word = np.where(following & Flag.OPENER, beyond, following)  # the first word after the end
    spaced = has(following, Flag.SPACE)
    chinese = has(previous | word, Flag.HAN)
    continues = has(word, Flag.LOWER) | has(following, Flag.INNER) & ~has(following, Flag.OPENER)
    closed = after > ends + 1
    continues |= closed & has(word, Flag.QUOTATIVE)

    split = has(end, Flag.CHINESE_END) & ~continues
    split |= has(end, Flag.STRONG) & (spaced | chinese) & ~continues
    period = has(end, Flag.PERIOD) & (spaced | chinese | has(end, Flag.HAN)) & ~continues
    split |= period & ~_abbreviated(flags, ends, previous, word, starts)
    ellipsis = has(end, Flag.ELLIPSIS)
    split |= ellipsis & spaced & has(word, Flag.CAPITAL) & ~continues
    return split | (ellipsis & chinese & closed & ~continues)


def _abbreviated(
    flags: np.ndarray,
    ends: np.ndarray,
    previous: np.ndarray,
    word: np.ndarray,
    starts: np.ndarray,
) -> np.ndarray:
    """(ends,) bool: whether the full stop belongs to the word before it."""
    begins = has(word, Flag.STARTER)
    attached = ~has(flags[ends], Flag.SPACE)
    no = has(previous, Flag.TITLE)
    no |= has(previous, Flag.BEFORE_NUMBER) & has(word, Flag.DIGIT | Flag.ROMAN)
    no |= has(previous, Flag.ABBREVIATION | Flag.INITIAL) & ~begins
    # the m of "a.m." and the g of "e.g.": a letter right after another full stop
    two_before = np.where(ends > 1, flags[ends - 2], 0)
    dotted = has(two_before, Flag.PERIOD) & ~has(previous, Flag.SPACE)
    dotted &= ~has(previous, Flag.DIGIT | Flag.ENDING) & ~has(flags[ends], Flag.HAN)
    no |= dotted & ~begins
    # "1. Introduction", "a. the first": a list number or letter at the start of a line
    numbered = starts[np.maximum(ends - 1, 0)] & has(previous, Flag.DIGIT | Flag.INITIAL)
    return (no | numbered) & attached
