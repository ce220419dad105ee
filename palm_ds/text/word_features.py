"""Orthographic features of a word, independent of context, as bit flags.

    flags = word_flags("\\n\\nMr")      # Flag.BLANK | Flag.CAPITAL | Flag.TITLE ...

Sentence splitting and entity detection work on arrays of these. The language decides on
abbreviations (`word_lists.py`) and, for Japanese, on kana.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

import numpy as np
import regex  # unlike `re`, it knows which marks end a sentence

from palm_ds.text import english_lists as english
from palm_ds.text.tokenizer import CHINESE
from palm_ds.text.word_lists import ENGLISH, word_lists


class Flag:
    """The bits; plain numbers, since an enum's are slow."""

    # White space before the word
    SPACE = 1 << 0
    NEWLINE = 1 << 1  # at least one line end
    BLANK = 1 << 2  # an empty line
    # Punctuation
    PERIOD = 1 << 3  # .
    STRONG = 1 << 4  # ! ? ‼
    CHINESE_END = 1 << 5  # 。！？ and sentence ends of other scripts, ؟ ।: no space needs to follow
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
    QUOTE = 1 << 24  # « » “ ‘: opens or closes, depending on the spaces beside it
    LONE = 1 << 25  # a letter that is a word, or an initial if a full stop follows: A, И
    ROMAN = 1 << 26  # a Roman numeral
    ENDING = 1 << 27  # the д of и т. д.
    QUOTATIVE = 1 << 28  # Japanese と after a quotation
    COLON = 1 << 29
    END = PERIOD | STRONG | CHINESE_END | ELLIPSIS


def has(flags: np.ndarray, wanted: int) -> np.ndarray:
    """(words,) bool: whether a word has one of the flags."""
    return (flags & wanted) != 0


_CLOSERS = frozenset("\"'”’)]}»›」』】）》〉］｣")
_OPENERS = frozenset("\"'“‘„‚([{«‹「『【（《〈［｢¿¡")
_QUOTES = frozenset("«»‹›“‘")
_INNER = frozenset(",;:，；：、)]}-–—/%*")
_BULLETS = frozenset("*-•·–—")
_SIGNS = (
    (_CLOSERS, Flag.CLOSER),
    (_OPENERS, Flag.OPENER),
    (_QUOTES, Flag.QUOTE),
    (_INNER, Flag.INNER),
    (_BULLETS, Flag.BULLET),
    (":：", Flag.COLON),
)
_KANA = re.compile("[\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f]")
_QUOTATIVE = re.compile("と(?!ても|ころ|にかく|もあれ|りあえず|はいえ)|って")
_ROMAN = re.compile("[IVX]|[IVXLC]{2,}")


def word_flags(word: str, language: str = "mixed") -> int:
    """The flags of a word including the white space before it."""
    surface = word.lstrip()
    return leading_space_flags(word[: len(word) - len(surface)]) | surface_flags(surface, language)


def leading_space_flags(space: str) -> int:
    """The flags of the white space before a word."""
    if not space:
        return 0
    lines = space.count("\n")
    return Flag.SPACE | (Flag.NEWLINE if lines else 0) | (Flag.BLANK if lines > 1 else 0)


def surface_flags(surface: str, language: str) -> int:
    """The flags of a word without the white space before it."""
    if not surface:
        return 0
    first = surface[0]
    if language == "ja" and (first == "．" or _KANA.search(surface)):
        return Flag.HAN | _japanese_flags(surface)
    if not first.isalnum():
        dash = first in "–—" and language not in ENGLISH  # before what somebody says
        return _punctuation_flags(surface, first) | Flag.OPENER * dash
    flags = _letter_flags(surface, language)
    return flags if language in ENGLISH else flags | _short_flags(surface, flags, language)


def _punctuation_flags(surface: str, first: str) -> int:
    flags = Flag.CONNECTOR if surface.lower() in english.CONNECTORS else 0
    if surface == ".":
        flags |= Flag.PERIOD
    elif first in "…⋯" or (first == "." and len(surface) > 1):
        flags |= Flag.ELLIPSIS
    elif first in "。！？｡":
        flags |= Flag.CHINESE_END
    elif _ends_sentence().match(first):
        flags |= (
            Flag.CHINESE_END if "\u0530" < first < "\u2000" or first > "\u3000" else Flag.STRONG
        )
    if "\u3000" < first < "\u3040" or "\uff00" < first < "\uff65":
        flags |= Flag.HAN
    for characters, flag in _SIGNS:
        if first in characters:
            flags |= flag
    return flags


def _japanese_flags(surface: str) -> int:
    if surface == "．":
        return Flag.PERIOD
    if surface[-1].isdigit():  # は３ of は３．１４
        return Flag.DIGIT | Flag.ABBREVIATION
    return Flag.QUOTATIVE if _QUOTATIVE.match(surface) else 0


def _short_flags(surface: str, flags: int, language: str) -> int:
    """More flags of letters, numerals and, in German, ordinals, where these are not English."""
    more = Flag.ROMAN if _ROMAN.fullmatch(surface) else 0
    alone = len(surface) == 1 and surface < "\u1100"  # not a Korean syllable
    if alone and not flags & (
        Flag.CAPITAL | Flag.DIGIT | Flag.TITLE | Flag.BEFORE_NUMBER | Flag.ENDING
    ):
        more |= Flag.ABBREVIATION  # z. B.; and in scripts without capitals
    if alone and flags & Flag.CAPITAL and flags & Flag.STARTER:
        more |= Flag.LONE
    numeral = flags & Flag.DIGIT and (language == "ja" or len(surface) < 3) or more & Flag.ROMAN
    if numeral and language in ("de", "ja"):
        more |= Flag.ABBREVIATION  # am 3. Oktober, Wilhelm II.; ３．１４
    return more


def _letter_flags(surface: str, language: str) -> int:
    first = surface[0]
    if is_han(first):
        return Flag.HAN
    if first.isdigit():
        return Flag.DIGIT
    lower = surface.lower()
    flags = Flag.LETTER | _list_flags(lower, language)
    if first.isupper():
        flags |= Flag.CAPITAL
        if len(surface) == 1:
            flags |= Flag.INITIAL
        if surface.isupper():
            flags |= Flag.ALL_CAPITALS
        if language in ENGLISH and (lower == "i" or lower.startswith(("i'", "i’"))):
            flags |= Flag.PRONOUN_I
    elif first.islower():
        flags |= Flag.LOWER
    return flags


@cache
def _lists(language: str) -> dict[str, int]:
    lists: dict[str, int] = {}
    known = word_lists(language)
    for words, flag in (
        (known.titles, Flag.TITLE),
        (known.before_numbers, Flag.BEFORE_NUMBER),
        (known.abbreviations, Flag.ABBREVIATION),
        (known.endings, Flag.ENDING),
        (known.starters, Flag.STARTER),
        (known.connectors, Flag.CONNECTOR),
    ):
        for word in words:
            lists[word] = lists.get(word, 0) | flag
    return lists


def _list_flags(lower: str, language: str) -> int:
    lists = _lists(language)
    if (found := lists.get(lower)) is not None or language in ENGLISH:
        return found or 0
    article, mark, rest = lower.replace("’", "'").partition("'")
    elided = lists.get(rest, 0) & (
        Flag.TITLE | Flag.BEFORE_NUMBER | Flag.ABBREVIATION
    )  # L'avv. Conti
    return lists.get(article + mark, 0) | elided if mark else 0


@lru_cache(maxsize=1)
def _ends_sentence() -> regex.Pattern[str]:
    """Unicode's Sentence_Terminal, but for full stops in other widths, which numbers have, too, and
    the Burmese comma."""
    return regex.compile(r"(?V1)[\p{Sentence_Terminal}--[．﹒․၊]]")


@lru_cache(maxsize=1)
def han_pattern() -> re.Pattern[str]:
    """Any character that BERT treats as a separate (Chinese) word."""
    return re.compile(f"[{CHINESE}]")


def is_han(character: str) -> bool:
    """Whether BERT treats the character as a separate (Chinese) word."""
    return han_pattern().match(character) is not None
