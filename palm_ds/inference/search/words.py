"""Words of a text for BM25, the same whatever made the index.

    words_of("Naïve PYTHON 3, 北京")     ["naïve", "python", "3", "北", "京"]

Letters, their marks and digits that follow one another are a word, after Unicode's NFKC and
lower-casing (its case folding). In scripts without spaces between words (Chinese, kana, Thai, Lao,
Khmer, Burmese) each letter with its marks is a word.
"""

from __future__ import annotations

import unicodedata

import regex  # unlike `re`, it knows marks and scripts

from palm_ds.text.tokenizer import CHINESE

_SINGLE = rf"[[{CHINESE}\u3040-\u30ff\p{{Thai}}\p{{Lao}}\p{{Khmer}}\p{{Myanmar}}]&&\p{{L}}]"
_WORD = regex.compile(rf"(?V1){_SINGLE}\p{{M}}*|[[\p{{L}}\p{{N}}\p{{M}}]--{_SINGLE}]+")
MAX_QUERY_WORDS = 256


def words_of(text: str) -> list[str]:
    """All words of a text, in order."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def query_words(text: str) -> list[str]:
    """The words of a query, each once. Of more than MAX_QUERY_WORDS the first ones count."""
    return list(dict.fromkeys(words_of(text)))[:MAX_QUERY_WORDS]
