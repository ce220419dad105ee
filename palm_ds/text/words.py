"""Splits text into words, and provides growable arrays for their features.

A *word* includes the white space before it, so that joining the words gives the text and positions
are sums of lengths. Words repeat: tokens, capitalization, abbreviations and lexicon entries are
worked out once per distinct word and then looked up as arrays over the whole document
(`palm_ds.text.word_cache`). This is what makes preparation fast.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.text.tokenizer import CHINESE
from palm_ds.text.word_features import han_pattern

_BEYOND = re.compile("[\u3400-\U0010ffff]")  # a faster first test for Chinese
_REPEATED = "-.…⋯。—_*=~#!?！？•·"
Segmenter = Callable[[str], Sequence[str]]
"""Splits Chinese text into words; joined they must be the text."""


@lru_cache(maxsize=1)
def _classes() -> tuple[str, str]:
    """The characters that separate words and those that are words themselves, as `re` classes,
    exactly as in the BERT pre-tokenizer of the `tokenizers` library. They are probed with it,
    because its Unicode tables are older than Python's."""
    from tokenizers import normalizers, pre_tokenizers

    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    clean = normalizers.BertNormalizer(lowercase=False, strip_accents=False).normalize_str
    planes = 0x20000  # there is no space or punctuation above
    every = (chr(code) for code in range(planes) if not 0xD800 <= code < 0xE000)
    spaces, maybe = [], []
    for c in every:
        category = unicodedata.category(c)
        if c.isspace():
            spaces += [c] if len(split(clean(f"a{c}b"))) == 2 else []
        elif category[0] == "P" or c in "\u166d\U000111c9" or (category[0] == "S" and c < "\x7f"):
            maybe.append(c)
    pieces = {piece for piece, _ in split("a" + "a".join(maybe) + "a")}
    marks = [c for c in maybe if c in pieces]
    return _as_class(spaces), _as_class(marks)


def _as_class(characters: Sequence[str]) -> str:
    """The characters for use inside [...], with runs as ranges."""
    out, codes = [], sorted(map(ord, characters))
    ends = [i for i, c in enumerate(codes) if i + 1 == len(codes) or codes[i + 1] != c + 1]
    first = 0
    for last in ends:
        low, high = re.escape(chr(codes[first])), re.escape(chr(codes[last]))
        out.append(low if first == last else f"{low}-{high}")
        first = last + 1
    return "".join(out)


@lru_cache(maxsize=1)
def _pattern() -> re.Pattern[str]:
    space, mark = _classes()
    letter = f"[^{space}{mark}{CHINESE}]"
    clitic = f"['’][sS](?!{letter})"
    repeated = "|".join(f"{re.escape(c)}{{2,}}" for c in _REPEATED)
    return re.compile(
        " ?[A-Za-z]+(?=[ \\n.,;:])"  # most of English: redundant, but matched fast
        f"|(?<={letter}){clitic}"  # 's is a separate word
        f"|[{space}]*(?:"
        f"[0-9]+(?:[.,:][0-9]+)+(?!{letter})"  # 3.14, 1,000, 12:30
        f"|{letter}+(?:['’](?![sS](?!{letter})){letter}+)*"  # don't, O'Neil
        f"|[{CHINESE}]+"
        f"|{repeated}"  # ..., ----, ？？
        f"|[{mark}])"
        f"|[{space}]+"  # at the very end
    )


def split_words(text: str, segment: Segmenter | None = None) -> list[str]:
    """Splits a text into words, each with the white space before it; joined they are the text.

    `segment` splits runs of Chinese characters into words; without it each character is a word.
    """
    words: list[str] = _pattern().findall(text)
    if text.isascii() or _BEYOND.search(text) is None or han_pattern().search(text) is None:
        return words
    return _segmented(words, segment or list)


def _segmented(words: list[str], segment: Segmenter) -> list[str]:
    """Splits the Chinese runs among the words."""
    is_han = han_pattern().match  # a run of Chinese ends in a Chinese character
    at = [i for i, word in enumerate(words) if word[-1] > "\u33ff" and is_han(word[-1])]
    runs = [words[i].lstrip() for i in at]
    cut = _cut(runs, segment)
    out: list[str] = []
    after = start = 0
    for i, run in zip(at, runs, strict=True):
        out += words[after:i]
        end = cut.index("\n", start)
        first = len(out)
        out += cut[start:end]
        if len(run) < len(words[i]):
            out[first] = words[i][: len(words[i]) - len(run)] + out[first]
        after, start = i + 1, end + 1
    return out + words[after:]


def _cut(runs: list[str], segment: Segmenter) -> list[str]:
    """The words of all runs, with "\\n" after each run; one call of the segmenter if possible."""
    joined = "\n".join(runs) + "\n"
    cut = list(segment(joined))
    if "".join(cut) == joined and cut.count("\n") == len(runs) and all(cut):
        return cut
    out: list[str] = []
    for run in runs:  # the segmenter does not keep line ends separate
        words = list(segment(run))
        if "".join(words) != run or not all(words):
            raise UserError(
                f"segmenter: splits {run!r} into {words!r}; joined, the words must be the text"
            )
        out += [*words, "\n"]
    return out


class GrowableArray:
    """A numpy array with amortized appending."""

    def __init__(self, dtype: type | str) -> None:
        self._array, self.size = np.zeros(1024, dtype), 0

    def extend(self, values: Sequence | np.ndarray) -> None:
        need = self.size + len(values)
        if need > len(self._array):
            grown = np.zeros(max(need, 2 * len(self._array)), self._array.dtype)
            grown[: self.size] = self._array[: self.size]
            self._array = grown
        self._array[self.size : need] = values
        self.size = need

    @property
    def array(self) -> np.ndarray:
        return self._array[: self.size]


class RaggedArray:
    """A list of numbers for every entry, stored end to end."""

    def __init__(self, dtype: type | str) -> None:
        self.values, self.counts, self.starts = (
            GrowableArray(dtype),
            GrowableArray(np.int64),
            GrowableArray(np.int64),
        )

    def extend(self, lists: Sequence[Sequence[int]]) -> None:
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        self.starts.extend(self.values.size + np.cumsum(counts) - counts)
        self.counts.extend(counts)
        self.values.extend(list(chain.from_iterable(lists)))

    def gather(self, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values of the entries, end to end, and the index into `entries` of each value."""
        counts = self.counts.array[entries]
        of = np.repeat(np.arange(len(entries)), counts)
        first = self.starts.array[entries] - (np.cumsum(counts) - counts)
        return self.values.array[np.arange(len(of)) + first[of]], of


class WordIndex(dict):
    """Word -> index. New words are collected in `new` until they are analyzed."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number

    def numbers(self, words: Sequence[str]) -> np.ndarray:
        """(len(words),) int64"""
        return np.fromiter(map(self.__getitem__, words), np.int64, len(words))
