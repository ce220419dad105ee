"""Filters that drop documents of low quality: functions of a text that return a reason, or nothing.

`gopher` has the rules and limits of Rae et al. 2021 (Gopher, appendix A1.1, table A1). Those about
the length of words, English stop words and repeated runs of words are for texts with spaces; in a
text that is mostly Chinese, characters take the place of words in the others.

Any other filter is your own function, `--filter module:function`. (The filters of datatrove
can be called in such a function; it is no dependency because it cuts words with spaCy or NLTK.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from palm_ds.common.errors import UserError, suggest
from palm_ds.corpus.annotations import find_function
from palm_ds.corpus.screening.duplicates import SINGLE, shingles

QualityFilter: TypeAlias = Callable[[str], str]
"""Returns why a text should be dropped, or an empty text."""

_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_BULLETS = ("•", "●", "○", "-", "*", "·", "‣", "–")
_ELLIPSES = ("...", "…")
_TOP = {2: 0.20, 3: 0.18, 4: 0.16}
_DUPLICATE = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


def gopher(text: str) -> str:
    """Gopher's rules for quality and repetition."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    characters = len(SINGLE.findall(text))
    if characters > len(text) / 3:
        return _length(characters) or _lines(lines) or _repeated_lines(text, lines)
    words = text.split()
    return (
        _length(len(words))
        or _words(words)
        or _lines(lines)
        or _repeated_lines(text, lines)
        or _repeated_runs(words)
    )


def _length(words: int) -> str:
    if words < 50:
        return "fewer than 50 words"
    return "more than 100,000 words" if words > 100_000 else ""


def _words(words: Sequence[str]) -> str:
    mean = sum(map(len, words)) / len(words)
    if not 3 <= mean <= 10:
        return f"words of {'less than 3' if mean < 3 else 'more than 10'} characters on average"
    symbols = sum(word.count(symbol) for word in words for symbol in ("#", *_ELLIPSES))
    if symbols > len(words) / 10:
        return "more than 1 symbol (# or ellipsis) per 10 words"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * len(words):
        return "less than 80 % of the words have a letter"
    common = {word.strip(".,;:!?\"'()").lower() for word in words} & _STOP_WORDS
    return "fewer than 2 of the commonest English words" if len(common) < 2 else ""


def _lines(lines: Sequence[str]) -> str:
    if sum(line.startswith(_BULLETS) for line in lines) > 0.9 * len(lines):
        return "more than 90 % of the lines begin with a bullet"
    if sum(line.endswith(_ELLIPSES) for line in lines) > 0.3 * len(lines):
        return "more than 30 % of the lines end with an ellipsis"
    return ""


def _repeated_lines(text: str, lines: Sequence[str]) -> str:
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    for parts, name in ((lines, "lines"), (paragraphs, "paragraphs")):
        repeated = {part: n - 1 for part, n in Counter(parts).items() if n > 1}
        if sum(repeated.values()) > 0.3 * len(parts):
            return f"more than 30 % of the {name} are repeated"
        if sum(len(part) * n for part, n in repeated.items()) > 0.2 * len(text):
            return f"more than 20 % of the text is in repeated {name}"
    return ""


def _repeated_runs(words: Sequence[str]) -> str:
    """Runs of 2 to 4 words that are too frequent, and of 5 to 10 words that occur again."""
    numbers: dict[str, int] = {}
    ids = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.uint64)
    lengths = np.array([len(word) for word in words])
    for size, limit in _TOP.items():
        if _most_frequent(ids, lengths, size) > limit:
            return f"a run of {size} words makes up more than {limit:.0%} of the text"
    for size, limit in _DUPLICATE.items():
        if _occurring_again(ids, lengths, size) > limit:
            return f"repeated runs of {size} words make up more than {limit:.0%} of the text"
    return ""


def _most_frequent(ids: np.ndarray, lengths: np.ndarray, size: int) -> float:
    """The share of characters in the most frequent run of `size` words, if it occurs twice."""
    _, first, times = np.unique(shingles(ids, size), return_index=True, return_counts=True)
    most = times.argmax()
    characters = lengths[first[most] : first[most] + size].sum()
    return float(characters * times[most] / lengths.sum()) if times[most] > 1 else 0.0


def _occurring_again(ids: np.ndarray, lengths: np.ndarray, size: int) -> float:
    """The share of characters in runs of `size` words that occurred before."""
    _, first, which = np.unique(shingles(ids, size), return_index=True, return_inverse=True)
    again = (np.arange(len(which)) != first[which]).astype(np.int64)
    inside = np.convolve(again, np.ones(size, np.int64))[: len(ids)] > 0
    return float(lengths[inside].sum() / lengths.sum())


FILTERS: dict[str, QualityFilter] = {"gopher": gopher}


def find_filter(name: str) -> QualityFilter:
    """A filter by its name, or a function as `module:function`."""
    if name in FILTERS:
        return FILTERS[name]
    if ":" not in name:
        raise UserError(f"--filter {name!r}: unknown{suggest(name, FILTERS)}; or module:function")
    return find_function(name, "--filter")
