"""Words of a text for BM25, the same whatever made the index.

    words_of("Naïve PYTHON 3, 北京")     ["naïve", "python", "3", "北", "京"]

Letters and digits that follow one another are a word, after Unicode's NFKC and lower-casing (its
case folding); Chinese characters and kana, which no spaces separate, are words of their own.
"""

from __future__ import annotations

import re
import unicodedata

from palm_ds.text.tokenizer import CHINESE

_SINGLE = f"{CHINESE}\u3040-\u309f\u30a0-\u30ff"
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u065f\u0900-\u0963\u0966-\u0dff\u0e00-\u0e7f"
"""Accents and vowels that stand over or beside letters, which `\\w` leaves out."""
_WORD = re.compile(f"[{_SINGLE}]|(?:(?![{_SINGLE}])[^\\W_]|[{_MARKS}])+")
MAX_QUERY_WORDS = 256


def words_of(text: str) -> list[str]:
    """All words of a text, in order."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def query_words(text: str) -> list[str]:
    """The words of a query, each once. Of more than MAX_QUERY_WORDS the first ones count."""
    return list(dict.fromkeys(words_of(text)))[:MAX_QUERY_WORDS]
