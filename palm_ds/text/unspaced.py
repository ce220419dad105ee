"""Words in scripts without spaces between them, for which a dictionary would be needed.

    Thai, Lao, Khmer, Burmese ...   each token is a word
    Japanese                        a run of kanji or of katakana is a word; in hiragana, each token

Otherwise a whole clause would be one word. A token that begins within a character, such as a vowel
sign or a byte, belongs to the word before.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import regex  # unlike `re`, it knows scripts

_DICTIONARY = r"[\p{Line_Break=SA}&&\p{L}]"  # Unicode's scripts that only a dictionary breaks
_HIRAGANA = "[\u3041-\u309f--ぁぃぅぇぉゃゅょゎゕゖ]"  # a small letter belongs to the one before
_KATAKANA = "[\u30a0-\u30ff\u31f0-\u31ff\uff66-\uff9f]"


def whole_runs(text: str) -> list[str]:
    """A `Segmenter` that leaves each run of Chinese characters whole."""
    return regex.findall(r"[^\n]+|\n", text)


def count_unspaced(text: str) -> int:
    """How many letters and vowel signs are in a script whose words cannot be told without a
    dictionary; Chinese and kana do not count."""
    if text.isascii():
        return 0
    return sum(len(run) for run in regex.findall(r"\p{Line_Break=SA}+", text))


def more_word_starts(
    text: str, tokens: np.ndarray, word_of: np.ndarray, language: str
) -> np.ndarray:
    """Characters at which further words begin, inside the words that white space and punctuation
    separate. `tokens`: (tokens,) where each begins, in the word `word_of` (tokens,)."""
    begins = np.zeros(len(text) + 1, bool)
    if not text.isascii():
        begins[[found.start() for found in _begins(language).finditer(text)]] = True
    inside = np.append(False, word_of[1:] == word_of[:-1])[: len(tokens)]
    return np.unique(tokens[inside & begins[tokens]])


@cache
def _begins(language: str) -> regex.Pattern[str]:
    """Finds the characters at which a token begins a word."""
    japanese = rf"|(?={_HIRAGANA})\X|(?<!{_KATAKANA}){_KATAKANA}" if language == "ja" else ""
    return regex.compile(rf"(?V1)(?={_DICTIONARY})\X{japanese}")
