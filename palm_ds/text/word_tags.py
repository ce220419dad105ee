"""A coarse class for each word, among which words can take one another's place.

    Chinese   the part of speech that the segmenter (rjieba) gives: n, v, a, ...
    others    the ending and the case: -ing, -ed, -ly, ..., capital, number

There is no tagger of English here. Words without a known ending, short words and function words
have no class, so that they are never replaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from palm_ds.text.english_lists import FUNCTION_WORDS
from palm_ds.text.tokenizer import CHINESE

_ENDINGS = (
    *("ations", "ation", "nesses", "ness", "ments", "ment", "ities", "ity", "isms", "ism"),
    *("ings", "ing", "ists", "ist", "able", "ible", "less", "ful", "ous", "ive", "ish", "est"),
    *("ally", "ly", "ies", "ers", "er", "ed", "al", "ic", "y", "s"),
)
_SHORTEST = 5  # letters of a word whose ending says something


def tagged_words(text: str) -> list[tuple[str, str]]:
    """[(word, class)]; the words joined are the text, and white space, punctuation and words that
    are never replaced have the class ""."""
    if re.search(f"[{CHINESE}]", text):
        import rjieba

        return [(word, _chinese_tag(word, tag)) for word, tag in rjieba.tag(text)]
    return [(word, english_class(word)) for word in re.findall(r"\w+|\W", text)]


def _chinese_tag(word: str, tag: str) -> str:
    """Function words (u: particles, x: punctuation, ...) keep their place."""
    return tag if re.fullmatch(f"[{CHINESE}]+", word) and tag[:1] in set("nvadm") else ""


def english_class(word: str) -> str:
    """The class of a word of a language with letters."""
    if word.isdecimal():
        return "number"
    lower = word.lower()
    if not word.isalpha() or len(word) < _SHORTEST or lower in FUNCTION_WORDS:
        return ""
    ending = next((ending for ending in _ENDINGS if lower.endswith(ending)), "")
    if not ending:
        return ""
    return f"-{ending}, capital" if word[:1].isupper() else f"-{ending}"


def words_by_class(texts: Sequence[str]) -> dict[str, list[str]]:
    """{class: its words in these texts, each once, sorted}."""
    found: dict[str, set[str]] = {}
    for text in texts:
        for word, tag in tagged_words(text):
            if tag:
                found.setdefault(tag, set()).add(word)
    return {tag: sorted(words) for tag, words in found.items()}
