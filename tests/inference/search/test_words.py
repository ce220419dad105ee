"""Words, of texts in several scripts."""

from __future__ import annotations

import sqlite3

import pytest

from palm_ds.inference.search.words import MAX_QUERY_WORDS, query_of, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Naïve PYTHON 3.11, don't_stop!", ["naïve", "python", "3", "11", "don", "t", "stop"]),
        ("ＡＢＣ ﬁn Straße", ["abc", "fin", "strasse"]),
        ("北京2008年 かな", ["北", "京", "2008", "年", "か", "な"]),
        ("cafe\u0301 हिन्दी", ["café", "हिन्दी"]),
        ("?! \n", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_fts5_splits_words_nowhere() -> None:
    """Every letter and digit of Unicode, as FTS5 sees it."""
    letters = [chr(code) for code in range(0x2FFFF) if not 0xD800 <= code < 0xE000]
    words = list(dict.fromkeys(words_of(" ".join(letters))))
    assert len(words) > 100_000
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE VIRTUAL TABLE t USING fts5(x, tokenize = 'ascii')")
    connection.execute("CREATE VIRTUAL TABLE v USING fts5vocab(t, 'row')")
    connection.execute("INSERT INTO t VALUES (?)", [" ".join(words)])
    assert {term for (term,) in connection.execute("SELECT term FROM v")} == set(words)
    connection.close()


def test_a_query_has_each_word_once() -> None:
    assert query_of("a b A") == '"a" OR "b"'
    assert query_of("?") == ""
    many = query_of(" ".join(f"w{n}" for n in range(999)))
    assert many.count(" OR ") == MAX_QUERY_WORDS - 1
