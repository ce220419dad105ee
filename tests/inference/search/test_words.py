"""Words, of texts in several scripts."""

from __future__ import annotations

import pytest

from palm_ds.inference.search.words import MAX_QUERY_WORDS, query_words, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Naïve PYTHON 3.11, don't_stop!", ["naïve", "python", "3", "11", "don", "t", "stop"]),
        ("ＡＢＣ ﬁn Straße", ["abc", "fin", "strasse"]),
        ("北京2008年 かな", ["北", "京", "2008", "年", "か", "な"]),
        ("cafe\u0301 हिन्दी", ["café", "हिन्दी"]),
        ("ما هذا الكتاب؟", ["ما", "هذا", "الكتاب"]),
        ("בית־ספר", ["בית", "ספר"]),
        ("བོད་ཡིག", ["བོད", "ཡིག"]),
        ("น้ำดี ๒๕", ["น\u0e49\u0e4d", "า", "ด\u0e35", "๒๕"]),
        ("မြန်မာ", ["မ\u103c", "န\u103a", "မ\u102c"]),
        ("中・小", ["中", "小"]),
        ("?! \n", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_a_query_has_each_word_once() -> None:
    assert query_words("a b A") == ["a", "b"]
    assert query_words("?") == []
    assert len(query_words(" ".join(f"w{n}" for n in range(999)))) == MAX_QUERY_WORDS
