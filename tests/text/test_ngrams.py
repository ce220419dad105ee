"""Texts cut by maximum matching, against all ways to cut them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.text.ngrams import NgramLexicon, ScoredNgram, read_ngrams, write_ngrams

NGRAMS = st.lists(
    st.lists(st.integers(0, 4), min_size=2, max_size=4).map(tuple), min_size=1, unique=True
)


def ways(text: tuple[int, ...], lexicon: set[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """The sizes of the segments of every way to cut a text."""
    if not text:
        yield ()
    for size in range(1, min(len(text), 4) + 1):
        if size == 1 or text[:size] in lexicon:
            for rest in ways(text[size:], lexicon):
                yield (size, *rest)


@given(ngrams=NGRAMS, text=st.lists(st.integers(0, 6), max_size=9))
def test_the_fewest_segments_and_of_these_the_longest_from_the_left(
    ngrams: list[tuple[int, ...]], text: list[int]
) -> None:
    lexicon = NgramLexicon(ngrams)
    first, numbers = lexicon.cut(np.array(text, np.uint16))
    found = tuple(np.diff(first, append=len(text)).tolist())
    each = list(ways(tuple(text), set(ngrams)))
    fewest = min(map(len, each))
    assert found == max(way for way in each if len(way) == fewest)
    for start, size, number in zip(first.tolist(), found, numbers.tolist(), strict=True):
        assert (number == -1) == (size == 1)
        assert size == 1 or ngrams[number] == tuple(text[start : start + size])


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "new/ngrams.tsv"
    ngrams = [(7, 9), (9, 7, 7), (3, 4)]
    scored = [ScoredNgram(tokens=x, text=f"a\tb {x}", count=3, t=1.5) for x in ngrams]
    write_ngrams(file, scored, "abc")
    lexicon, fingerprint = read_ngrams(file)
    assert (lexicon.ngrams, fingerprint) == (tuple(ngrams), "abc")
    assert "7 9\ta\\tb (7, 9)\t3\t1.500000\n" in file.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "no file of n-grams; `palm-ds corpus ngrams"),
        ("HEAD\n1 2\tx\t1\t1\n1\tx\t1\t1\n", "line 4: expected two token ids or more"),
        (f"HEAD\n1 {'9' * 20}\tx\t1\t1\n", "line 3: expected two token ids or more"),
        ("HEAD\n1 -2\tx\t1\t1\n", "line 3: expected two token ids"),
        ("HEAD\n1 2\tx\t1\t1\n3 4\tx\t1\t1\n1 2\ty\t1\t1\n", "line 5: repeats line 3"),
        ("HEAD\n\n", "has no n-grams"),
    ],
)
def test_mistakes_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    head = "# palm-ds n-grams of the tokenizer x\ntokens\ttext\tcount\tt"
    (tmp_path / "n.tsv").write_text(text.replace("HEAD", head))
    with pytest.raises(UserError, match=message) as caught:
        read_ngrams(tmp_path / "n.tsv")
    assert str(caught.value).startswith(str(tmp_path))
    with pytest.raises(UserError, match="No such file.*corpus ngrams CORPUS FILE"):
        read_ngrams(tmp_path / "none")
