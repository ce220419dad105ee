"""Reading values at arbitrary tokens, across record batches and shards."""

from __future__ import annotations

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus import mapped_shard, store, writer
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.store import Corpus, open_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Many shards, each of many record batches."""
    folder = tmp_path_factory.mktemp("store")
    rng = np.random.default_rng(0)
    words = np.array(["the", "cat", "New", "York", "sat", "on", "mats", "today"])
    texts = [". ".join(" ".join(rng.choice(words, 9)) for _ in range(5)) for _ in range(200)]
    (folder / "a.txt").write_text("\n\n".join(texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BATCH_TOKENS", 300)
        options = PrepareOptions(train="wordpiece", vocab_size=300, shard_mb=0.01)
        prepare(folder / "corpus", [str(folder / "a.txt")], options)
    return open_corpus(folder / "corpus")


@pytest.mark.parametrize("column", ["ids", "word", "sentence"])
def test_take_equals_read(corpus: Corpus, column: str) -> None:
    assert len(corpus.manifest.shards) > 3
    whole = [corpus.document(number)[1] for number in range(len(corpus))]
    values = np.concatenate([p.ids if column == "ids" else p.annotations[column] for p in whole])
    rng = np.random.default_rng(1)
    everything = np.arange(corpus.manifest.tokens)
    for positions in (
        everything,
        everything[::-1],
        rng.integers(0, len(values), 5000),  # repeated, in any order
        rng.permutation(everything)[:96].reshape(8, 12),
        np.array([len(values) - 1, 0]),
    ):
        taken = corpus.take(positions, column)
        assert taken.dtype == values.dtype and taken.shape == positions.shape
        assert np.array_equal(taken, values[positions])


def test_take_of_zero_and_one_tokens(corpus: Corpus) -> None:
    assert corpus.take(np.zeros(0, np.int64)).shape == (0,)
    assert corpus.take(np.zeros(0, np.int64)).dtype == corpus.manifest.ids_type
    assert corpus.take(np.array(3))[()] == corpus.read(3, 4).ids[0]


def test_take_beyond_the_corpus(corpus: Corpus) -> None:
    for positions in ([-1], [0, corpus.manifest.tokens]):
        with pytest.raises(IndexError, match=r"token -?\d+ of \d+"):
            corpus.take(np.array(positions))


def test_take_of_an_unknown_annotation(corpus: Corpus) -> None:
    with pytest.raises(UserError, match="no annotation 'wrod'; did you mean \"word\"") as taken:
        corpus.take(np.array([0]), "wrod")
    with pytest.raises(UserError) as read:
        corpus.read(0, 1, ["wrod"])
    assert str(taken.value) == str(read.value)


def test_few_shards_and_record_batches_stay_in_memory(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MOST_SHARDS", 2)
    monkeypatch.setattr(mapped_shard, "_BLOCKS", 3)
    bounded = open_corpus(corpus.path)
    everything = np.arange(corpus.manifest.tokens)
    for _ in range(2):
        assert np.array_equal(bounded.take(everything), corpus.take(everything))
    mapped = bounded._shards
    assert len(mapped) == 2
    last = len(corpus.manifest.shards) - 1
    assert last in mapped and last - 1 in mapped
    shard = bounded._shard(last)
    assert len(shard) > mapped_shard._BLOCKS == len(shard._blocks)


def test_views_outlive_their_shard(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_SHARDS", 1)
    bounded = open_corpus(corpus.path)
    ids = bounded.document(0)[1].ids
    copy = ids.copy()
    for number in range(len(bounded)):
        bounded.document(number)
    assert np.array_equal(ids, copy)
