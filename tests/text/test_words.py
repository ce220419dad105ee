"""Words cover the text, and encoding word by word equals encoding the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.corpus.analyzer import DocumentAnalyzer
from palm_ds.corpus.options import TextOptions
from palm_ds.text.tokenizer import SPECIALS, wordpiece
from palm_ds.text.words import GrowableArray, RaggedArray, WordIndex, split_words

# Letters, marks, spaces and digits where the rules of the tokenizer and of Python differ.
ODD = (
    "aB1 .,'’\n\t\x00\x0c\x1c\x85\xa0\u200b\u2028\u3000\ufffd\ue000€°é\u0301İß"
    "我們。！“”…-—_$^🙂\u166dﬁ≠"
)
TOKENIZER = wordpiece(
    [*SPECIALS, *"abcdefghijklmnopqrstuvwxyz0123456789.,'!", "##a", "##1", "##e", "我", "ss"],
    lower=True,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop", ["Don't", " stop"]),
        ("John's O'Neil’s", ["John", "'s", " O'Neil", "’s"]),
        ("it costs 3.14, 1,000.", ["it", " costs", " 3.14", ",", " 1,000", "."]),
        ("wait... what?!", ["wait", "...", " what", "?", "!"]),
        ("well-known\n\nfact", ["well", "-", "known", "\n\nfact"]),
        ("我们 GPU", ["我", "们", " GPU"]),
        ("5€ a_b", ["5€", " a", "_", "b"]),
        ("end ", ["end", " "]),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split_words(text) == words


def test_chinese_runs_are_cut_by_the_segmenter_in_one_call() -> None:
    calls = []

    def in_twos(text: str) -> list[str]:
        calls.append(text)
        out = []
        for run in text.split("\n")[:-1]:
            out += [run[i : i + 2] for i in range(0, len(run), 2)] + ["\n"]
        return out

    assert split_words("我们在 北京, OK 学习", in_twos) == [
        *("我们", "在", " 北京", ",", " OK", " 学习")
    ]
    assert len(calls) == 1


def test_a_segmenter_without_line_ends_is_called_for_each_run() -> None:
    assert split_words("我们,北京", lambda text: [text]) == ["我们", ",", "北京"]


def test_a_segmenter_that_changes_the_text_is_refused() -> None:
    with pytest.raises(UserError, match="segmenter"):
        split_words("我们", lambda text: ["我"])


@settings(max_examples=100, deadline=None)
@given(st.text(st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8")), max_size=40))
def test_words_joined_are_the_text(text: str) -> None:
    assert "".join(split_words(text)) == text
    assert all(split_words(text))


@settings(max_examples=100, deadline=None)
@given(st.text(st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8")), max_size=40))
def test_encoding_word_by_word_equals_the_whole_text(text: str) -> None:
    assert TOKENIZER.by_word
    document = DocumentAnalyzer(TOKENIZER, TextOptions(language="en")).document("x", text)
    ids, at = TOKENIZER.encode_texts([text])[0]
    assert document.ids.tolist() == ids.tolist()
    assert document.token_starts.tolist() == at.tolist()


def test_ragged_gathers_concatenated_values() -> None:
    ragged = RaggedArray(np.int64)
    ragged.extend([[1, 2], [], [3]])
    ragged.extend([[4, 5, 6]])
    values, of = ragged.gather(np.array([3, 1, 0, 3]))
    assert values.tolist() == [4, 5, 6, 1, 2, 4, 5, 6]
    assert of.tolist() == [0, 0, 0, 2, 2, 3, 3, 3]


def test_growable_arrays_keep_their_values() -> None:
    grown = GrowableArray(np.int64)
    for start in range(0, 5000, 7):
        grown.extend(range(start, start + 7))
    assert grown.array.tolist() == list(range(grown.size))


def test_the_index_numbers_words_once() -> None:
    table = WordIndex()
    assert table.numbers(["a", "b", "a"]).tolist() == [0, 1, 0]
    assert table.new == ["a", "b"]
