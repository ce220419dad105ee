"""Chinese names: which words of a text name people, places, organisations or works.

jieba's dictionary calls many words names that are none: 东西 (thing) a place, 道德 (morals)
somebody. Its tag is therefore one feature of several in a linear model of the word:

    is_name("杭州", "ns", known=True)   # True: the sum of the weights of its features is positive
    is_name("东西", "ns", known=True)   # False

`tools/chinese_names` has the labelled words that the weights were learned from, and learns them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

TAGS = frozenset({"nr", "ns", "nt", "nz", "nrfg", "nrt"})
"""jieba's parts of speech for names of persons, places, organisations, and others."""
WEIGHTS = Path(__file__).with_name("chinese_name_weights.txt")
_MAX_WORD_LENGTH = 6  # longer words are of one kind


def features(word: str, tag: str, *, known: bool) -> list[str]:
    """The features of a word of two or more characters: the word, its characters by place, and its
    tag with its length. `known`: whether it is in jieba's dictionary; others are guesses."""
    length = min(len(word), _MAX_WORD_LENGTH)
    return [
        f"{tag} {length} {'known' if known else 'new'}",
        f"word {word}",
        f"first {word[0]}",
        f"first two {word[:2]}",
        f"last {word[-1]}",
        f"last two {word[-2:]}",
        *(f"inside {character}" for character in sorted(set(word[1:-1]))),
    ]


def is_name(word: str, tag: str, *, known: bool) -> bool:
    """Whether a Chinese word is a name; at least two characters, one of TAGS."""
    if len(word) < 2 or tag not in TAGS:
        return False
    weights = _weights()
    return sum(weights.get(feature, 0) for feature in features(word, tag, known=known)) > 0


@cache
def _weights() -> dict[str, int]:
    """{feature: its weight in hundredths}; the threshold is part of the weights of the tags."""
    lines = WEIGHTS.read_text("utf-8").split("\n")
    rows = (line.rpartition("\t") for line in lines if line and not line.startswith("#"))
    return {feature: int(weight) for feature, _, weight in rows}
