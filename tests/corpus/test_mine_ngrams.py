"""The lexicon of a corpus against counting in plain Python."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from palm_ds.cli.main import main
from palm_ds.common.errors import UserError
from palm_ds.corpus import mine_ngrams as module
from palm_ds.corpus.mine_ngrams import mine_ngrams, pieces_of
from palm_ds.corpus.store import Corpus
from palm_ds.text.ngrams import read_ngrams
from tests.helpers.small_corpus import write_small_corpus

SIZES, LEAST = (40, 60, 25), 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_small_corpus(tmp_path_factory.mktemp("corpus") / "c", documents=20, words=17)


def sentences(corpus: Corpus) -> list[list[int]]:
    starts = [*np.asarray(corpus.sentence_starts).tolist()]
    ids = [corpus.read(a, b).ids.tolist() for a, b in zip(starts, starts[1:], strict=False)]
    assert len(ids) == corpus.manifest.sentences
    return ids


def by_hand(corpus: Corpus) -> list[tuple[tuple[int, ...], int, float]]:
    texts = sentences(corpus)
    single = Counter(token for text in texts for token in text)
    tokens, found = sum(single.values()), []
    for length, size in enumerate(SIZES, 2):
        every = Counter(
            tuple(text[i : i + length]) for text in texts for i in range(len(text) - length + 1)
        )
        total = sum(every.values())
        scored = []
        for ngram, count in every.items():
            share, chance = count / total, math.prod(single[x] / tokens for x in ngram)
            t = round((share - chance) / math.sqrt(share * (1 - share) / total), 6)
            if count >= LEAST and t > 0:
                scored.append((ngram, count, t))
        found += sorted(scored, key=lambda each: (-each[2], each[0]))[:size]
    return found


def test_the_lexicon_is_that_of_counting_by_hand(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the corpus is divided."""
    expected = by_hand(corpus)
    assert [len(x) for x, _, _ in expected].count(4) == SIZES[2]
    for piece in (300, 10**6):
        monkeypatch.setattr(module, "_PIECE", piece)
        counts = mine_ngrams(corpus.path, tmp_path / str(piece), sizes=SIZES, least=LEAST)
        lines = (tmp_path / str(piece)).read_text().splitlines()[2:]
        found = []
        for line in lines:
            ids, text, count, t = line.split("\t")
            tokens = tuple(map(int, ids.split()))
            assert text == " ".join(f"w{x - 5}" for x in tokens)
            found.append((tokens, int(count), float(t)))
        assert found == expected
        assert counts["n-grams of 3"] == SIZES[1] and counts["tokens per segment"] > 1.2
    _, fingerprint = read_ngrams(tmp_path / "300")
    assert fingerprint == corpus.tokenizer().fingerprint


def test_a_sample_has_whole_documents(corpus: Corpus) -> None:
    (every,) = pieces_of(corpus, 10**9)()
    (some,) = pieces_of(corpus, 500)()
    assert len(every[0]) == corpus.manifest.tokens and every[1].sum() == corpus.manifest.sentences
    assert 500 <= len(some[0]) < len(every[0]) and some[1][0]


def test_the_command(corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "n.tsv")
    words = ["corpus", "ngrams", str(corpus.path), file, "--sizes", "7", "--least", "2", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["n-grams of 2"] == 7
    assert len(read_ngrams(file)[0]) == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sizes": (0, 0)}, "--sizes 0 0: expected numbers, not all of them 0"),
        ({"least": 0}, "--least 0"),
        ({"sample": -1}, "--sample -1"),
        ({"least": 10**6}, "no n-gram occurs 1000000 times; lower --least"),
    ],
)
def test_mistakes(corpus: Corpus, tmp_path: Path, values: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mine_ngrams(corpus.path, tmp_path / "n.tsv", **values)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
