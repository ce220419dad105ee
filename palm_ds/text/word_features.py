"""Orthographic features of a word, independent of context, as bit flags.

    flags = word_flags("\\n\\nMr")      # BLANK | CAPITAL | TITLE ...

Sentence splitting and entity detection work on arrays of these.
"""

from __future__ import annotations

import re
from functools import lru_cache

import regex  # unlike `re`, it knows which marks end a sentence

from palm_ds.text import english_lists as english
from palm_ds.text.tokenizer import CHINESE

# White space before the word
SPACE = 1 << 0
NEWLINE = 1 << 1  # at least one line end
BLANK = 1 << 2  # an empty line
# Punctuation
PERIOD = 1 << 3  # .
STRONG = 1 << 4  # ! ? and the sentence ends of scripts but Chinese: ؟ ।
CHINESE_END = 1 << 5  # 。！？ and runs of them
ELLIPSIS = 1 << 6  # ... … ……
CLOSER = 1 << 7  # a closing bracket or quote, or a straight quote
OPENER = 1 << 8  # an opening bracket or quote, or a straight quote
INNER = 1 << 9  # , ; : and the like: never begins a sentence
BULLET = 1 << 10
# Words
CAPITAL = 1 << 11  # begins with a capital letter
LOWER = 1 << 12
DIGIT = 1 << 13
HAN = 1 << 14  # Chinese characters or Chinese punctuation
INITIAL = 1 << 15  # one capital letter
TITLE = 1 << 16  # Mr
BEFORE_NUMBER = 1 << 17  # No
ABBREVIATION = 1 << 18  # Inc
STARTER = 1 << 19  # often begins a sentence
CONNECTOR = 1 << 20  # of, van
ALL_CAPITALS = 1 << 21
PRONOUN_I = 1 << 22  # I, I'm
LETTER = 1 << 23  # begins with an alphabetic letter
END = PERIOD | STRONG | CHINESE_END | ELLIPSIS

_CLOSERS = frozenset("\"'”’)]}»›」』】）》〉］｣")
_OPENERS = frozenset("\"'“‘([{«‹「『【（《〈［｢")
_INNER = frozenset(",;:，；：、)]}-–—/%*")
_BULLETS = frozenset("*-•·–—")
_SIGNS = ((_CLOSERS, CLOSER), (_OPENERS, OPENER), (_INNER, INNER), (_BULLETS, BULLET))


def word_flags(word: str) -> int:
    """The flags of a word including the white space before it."""
    surface = word.lstrip()
    return leading_space_flags(word[: len(word) - len(surface)]) | surface_flags(surface)


def leading_space_flags(space: str) -> int:
    """The flags of the white space before a word."""
    if not space:
        return 0
    lines = space.count("\n")
    return SPACE | (NEWLINE if lines else 0) | (BLANK if lines > 1 else 0)


def surface_flags(surface: str) -> int:
    """The flags of a word without the white space before it."""
    if not surface:
        return 0
    first = surface[0]
    return _letter_flags(surface) if first.isalnum() else _punctuation_flags(surface, first)


def _punctuation_flags(surface: str, first: str) -> int:
    flags = CONNECTOR if surface.lower() in english.CONNECTORS else 0
    if surface == ".":
        flags |= PERIOD
    elif first in "…⋯" or (first == "." and len(surface) > 1):
        flags |= ELLIPSIS
    elif first in "。！？｡":
        flags |= CHINESE_END
    elif _ends_sentence().match(first):
        flags |= STRONG
    if "\u3000" < first < "\u3040" or "\uff00" < first < "\uff65":
        flags |= HAN
    for characters, flag in _SIGNS:
        if first in characters:
            flags |= flag
    return flags


def _letter_flags(surface: str) -> int:
    first = surface[0]
    if is_han(first):
        return HAN
    if first.isdigit():
        return DIGIT
    lower = surface.lower()
    flags = LETTER | _list_flags(lower)
    if first.isupper():
        flags |= CAPITAL
        if len(surface) == 1:
            flags |= INITIAL
        if surface.isupper():
            flags |= ALL_CAPITALS
        if lower == "i" or lower.startswith(("i'", "i’")):
            flags |= PRONOUN_I
    elif first.islower():
        flags |= LOWER
    return flags


@lru_cache(maxsize=1)
def _lists() -> dict[str, int]:
    lists: dict[str, int] = {}
    for words, flag in (
        (english.TITLES, TITLE),
        (english.BEFORE_NUMBERS, BEFORE_NUMBER),
        (english.ABBREVIATIONS, ABBREVIATION),
        (english.STARTERS, STARTER),
        (english.CONNECTORS, CONNECTOR),
    ):
        for word in words:
            lists[word] = lists.get(word, 0) | flag
    return lists


def _list_flags(lower: str) -> int:
    return _lists().get(lower, 0)


@lru_cache(maxsize=1)
def _ends_sentence() -> regex.Pattern[str]:
    """Unicode's Sentence_Terminal, but for full stops in other widths, which numbers have, too."""
    return regex.compile(r"(?V1)[\p{Sentence_Terminal}--[．﹒․]]")


@lru_cache(maxsize=1)
def _han() -> re.Pattern[str]:
    return re.compile(f"[{CHINESE}]")


def is_han(character: str) -> bool:
    """Whether BERT treats the character as a separate (Chinese) word."""
    return _han().match(character) is not None
