"""What a word is, wherever it stands: one number of flags a word.

    flags = flags_of("\\n\\nMr")      # BLANK | CAPITAL | TITLE ...

Sentence splitting and entities work on arrays of these.
"""

from __future__ import annotations

import re
from functools import lru_cache

from palm_ds.text import english_lists as english
from palm_ds.text.tokenizer import CHINESE

# The white space before the word
SPACE = 1 << 0
NEWLINE = 1 << 1  # one line end at least
BLANK = 1 << 2  # an empty line
# Punctuation
PERIOD = 1 << 3  # .
STRONG = 1 << 4  # ! ?
CHINESE_END = 1 << 5  # 。！？ and their runs
ELLIPSIS = 1 << 6  # ... … ……
CLOSER = 1 << 7  # a bracket or quote that closes, or a straight quote
OPENER = 1 << 8  # a bracket or quote that opens, or a straight quote
INNER = 1 << 9  # , ; : and such: a sentence does not begin with it
BULLET = 1 << 10
# Words
CAPITAL = 1 << 11  # begins with a capital letter
LOWER = 1 << 12
DIGIT = 1 << 13
HAN = 1 << 14  # Chinese characters or their punctuation
INITIAL = 1 << 15  # one capital letter
TITLE = 1 << 16  # Mr
BEFORE_NUMBER = 1 << 17  # No
ABBREVIATION = 1 << 18  # Inc
STARTER = 1 << 19  # often begins a sentence
CONNECTOR = 1 << 20  # of, van
ALL_CAPITALS = 1 << 21
PRONOUN_I = 1 << 22  # I, I'm
LETTER = 1 << 23  # begins with a letter of an alphabet
END = PERIOD | STRONG | CHINESE_END | ELLIPSIS

_CLOSERS = frozenset("\"'”’)]}»›」』】）》〉］｣")
_OPENERS = frozenset("\"'“‘([{«‹「『【（《〈［｢")
_INNER = frozenset(",;:，；：、)]}-–—/%*")
_BULLETS = frozenset("*-•·–—")
_SIGNS = ((_CLOSERS, CLOSER), (_OPENERS, OPENER), (_INNER, INNER), (_BULLETS, BULLET))


def flags_of(word: str) -> int:
    """The flags of a word with the white space before it."""
    core = word.lstrip()
    return lead_flags(word[: len(word) - len(core)]) | core_flags(core)


def lead_flags(lead: str) -> int:
    """The flags of the white space before a word."""
    if not lead:
        return 0
    lines = lead.count("\n")
    return SPACE | (NEWLINE if lines else 0) | (BLANK if lines > 1 else 0)


def core_flags(core: str) -> int:
    """The flags of a word without the white space before it."""
    if not core:
        return 0
    first = core[0]
    return _letter_flags(core) if first.isalnum() else _mark_flags(core, first)


def _mark_flags(core: str, first: str) -> int:
    flags = CONNECTOR if core.lower() in english.CONNECTORS else 0
    if core == ".":
        flags |= PERIOD
    elif first in "…⋯" or (first == "." and len(core) > 1):
        flags |= ELLIPSIS
    elif first in "!?":
        flags |= STRONG
    elif first in "。！？｡":
        flags |= CHINESE_END
    if "\u3000" < first < "\u3040" or "\uff00" < first < "\uff65":
        flags |= HAN
    for characters, flag in _SIGNS:
        if first in characters:
            flags |= flag
    return flags


def _letter_flags(core: str) -> int:
    first = core[0]
    if is_han(first):
        return HAN
    if first.isdigit():
        return DIGIT
    lower = core.lower()
    flags = LETTER | _list_flags(lower)
    if first.isupper():
        flags |= CAPITAL
        if len(core) == 1:
            flags |= INITIAL
        if core.isupper():
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
def _han() -> re.Pattern[str]:
    return re.compile(f"[{CHINESE}]")


def is_han(character: str) -> bool:
    """Whether BERT takes the character to be a Chinese word of its own."""
    return _han().match(character) is not None
