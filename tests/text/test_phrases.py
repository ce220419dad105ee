"""Phrases and entities: lexicons, collocations, capitalized runs, Chinese names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.text.phrases import Collocations, Lexicon, capital_runs, lexicon_units, read_lexicon
from palm_ds.text.sentence_splitter import sentence_starts
from palm_ds.text.word_features import word_flags
from palm_ds.text.words import split_words


def names(text: str) -> list[str]:
    words = split_words(text)
    flags = np.array([word_flags(word) for word in words], np.int64)
    spans = capital_runs(flags, sentence_starts(flags, wrapped=False))
    return ["".join(words[a:b]).strip() for a, b in spans]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("We saw Paris.", ["Paris"]),
        ("Yesterday was cold.", []),
        ("The Bank of England fell.", ["Bank of England"]),
        ("He met Vincent van Gogh and Jean-Paul Sartre.", ["Vincent van Gogh", "Jean-Paul Sartre"]),
        ("It was J. R. Smith at King's College.", ["J. R. Smith", "King's College"]),
        ("The President of the United States spoke.", ["President of the United States"]),
        ("He said, “Come to Rome.”", ["Rome"]),
        ("She wrote: The house fell. “The sea,” he said.", []),
        ("Two cities: Paris and Rome.", ["Paris", "Rome"]),
        ("and I said I'm here.", []),
        ("THE LONG HEADING HERE. We saw NASA.", ["NASA"]),
        ("Mr. Brown met Mrs. Gray.", ["Mr. Brown", "Mrs. Gray"]),
        ("See Fig. 3 there.", []),
        ("We met Ann. Bob left.", ["Ann"]),
        ("of and the", []),
        ("", []),
    ],
)
def test_capital_runs(text: str, found: list[str]) -> None:
    assert names(text) == found


def matches(lexicon: Lexicon, text: str) -> list[str]:
    words = split_words(text)
    atoms = [
        (lexicon.numbers.get(a, 0), i, at)
        for i, w in enumerate(words)
        for a, at in lexicon_units(w)
    ]
    ends = np.cumsum([len(word) for word in words])
    begins = [int(ends[i]) - len(words[i]) + at for _, i, at in atoms]
    numbers = np.array([n for n, _, _ in atoms], np.int64)
    barriers = np.zeros(len(numbers), bool)
    spans = lexicon.spans(text, numbers, np.array([*begins, len(text)]), barriers)
    return [text[a:b].strip() for a, b in spans]


def test_the_longest_entry_wins() -> None:
    lexicon = Lexicon(["new york", "new york city", "york city hall", "city"])
    assert matches(lexicon, "In New  York City Hall") == ["New  York City"]
    assert matches(lexicon, "in york city and New York") == ["city", "New York"]


def test_chinese_entries_match_whatever_the_words() -> None:
    lexicon = Lexicon(["中国人民银行", "人民", "T恤"])
    assert matches(lexicon, "在中国人民银行和人民T恤") == ["中国人民银行", "人民", "T恤"]


def test_exact_entries_match_as_written() -> None:
    lexicon = Lexicon(["US", "apple pie"], exact=True)
    assert matches(lexicon, "us and US eat Apple Pie") == ["US", "Apple Pie"]


def test_an_entry_inside_one_with_other_capitals_is_found() -> None:
    lexicon = Lexicon(["US", "US Army", "York"], exact=True)
    assert matches(lexicon, "the US army, the US Army") == ["US", "US Army"]


def test_what_is_found_inside_another_entry_is_an_entry_itself() -> None:
    lexicon = Lexicon(["New York City", "newyork"], exact=True)
    assert matches(lexicon, "new york city, newyork, New York City") == ["newyork", "New York City"]


def test_no_match_crosses_a_sentence() -> None:
    lexicon = Lexicon(["a b"])
    atoms = np.array([lexicon.numbers["a"], lexicon.numbers["b"]])
    assert lexicon.match(atoms, np.array([True, False])).tolist() == [2, 0]
    assert lexicon.match(atoms, np.array([True, True])).tolist() == [0, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), min_size=1, max_size=8),
    st.lists(st.sampled_from("abcd"), max_size=25),
)
def test_the_longest_match_is_found(entries: list[list[str]], text: list[str]) -> None:
    lexicon = Lexicon([" ".join(entry) for entry in entries])
    atoms = np.array([lexicon.numbers.get(word, 0) for word in text], np.int64)
    longest = lexicon.match(atoms, np.zeros(len(text), bool)).tolist()
    for i, length in enumerate(longest):
        fits = [len(e) for e in entries if text[i : i + len(e)] == e]
        assert length == max(fits, default=0)


def test_collocations_form_chains_of_limited_length() -> None:
    pairs = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "f"), ("f", "g"), ("x", "y")]
    found = Collocations(pairs)
    words = list("abcdefgzxyabxa")
    numbers = np.array([found.numbers.get(word, 0) for word in words], np.int64)
    spans = found.spans(numbers, np.zeros(len(words), bool))
    assert [words[a:b] for a, b in spans] == [list("abcde"), list("fg"), list("xy"), list("ab")]
    barriers = np.zeros(len(words), bool)
    barriers[9] = True
    assert [8, 10] not in found.spans(numbers, barriers).tolist()


def test_lexicon_files(tmp_path: Path) -> None:
    file = tmp_path / "lexicon.txt"
    file.write_bytes("\ufeffone two\tnoun\n\n三\u2028四\r\n".encode())
    assert read_lexicon(file) == ["one two", "三\u2028四"]
    for content, message in ((b"", "no entries"), (b"a\n\xff\n", "line 2: not UTF-8")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_lexicon(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_lexicon(tmp_path / "nowhere")
