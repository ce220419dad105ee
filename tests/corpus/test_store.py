"""Reading values at arbitrary tokens, across record batches and shards."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus import mapped_shard, store, writer
from palm_ds.corpus.manifest import Shard
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.corpus.writer import ShardSummary, write_corpus
from palm_ds.text.tokenizer import wordpiece
from tests.helpers.small_corpus import SPECIALS


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


def test_a_damaged_index_is_one_line(corpus: Corpus, tmp_path: Path) -> None:
    """Each byte of an array's header, in turn."""
    shutil.copytree(corpus.path, tmp_path / "corpus")
    file = tmp_path / "corpus" / "index" / "document_starts.npy"
    whole, refused = file.read_bytes(), 0
    for place in range(80):
        file.write_bytes(whole[:place] + b"(" + whole[place + 1 :])
        try:
            open_corpus(tmp_path / "corpus")
        except UserError as error:
            refused += 1
            assert "index/document_starts.npy: " in str(error)
    assert refused > 60


def test_few_shards_and_record_batches_stay_in_memory(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_SHARDS", 2)
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
    monkeypatch.setattr(store, "_MAX_SHARDS", 1)
    bounded = open_corpus(corpus.path)
    ids = bounded.document(0)[1].ids
    copy = ids.copy()
    for number in range(len(bounded)):
        bounded.document(number)
    assert np.array_equal(ids, copy)


def test_documents_that_occur_twice_are_known(tmp_path: Path) -> None:
    """However many hashes are in memory; a corpus without copies has no such file."""
    tokenizer = wordpiece([*SPECIALS, *(f"w{i}" for i in range(9))], lower=False)
    texts = [[5, 6, 7], [5, 6], [8], [5, 6, 7], [9, 8], [8], [5, 6, 7], [7, 6, 5]]
    documents = [
        (f"{n}", np.array(ids), {"sentence": np.eye(1, len(ids), dtype=np.uint8)[0]})
        for n, ids in enumerate(texts)
    ]
    write_corpus(tmp_path / "c", documents, tokenizer, annotations=("sentence",))
    corpus = open_corpus(tmp_path / "c", verify=True)
    assert corpus.repeated.tolist() == [0, 2, 3, 5, 6]
    hashes = np.random.default_rng(0).integers(0, 40, 100).astype(np.uint64) * np.uint64(1 << 58)
    parts = [summary_of(hashes[:30]), summary_of(hashes[30:30]), summary_of(hashes[30:])]
    expected = [n for n, value in enumerate(hashes) if (hashes == value).sum() > 1]
    for most in (1 << 20, 7):
        assert writer.find_repeated(parts, most).tolist() == expected
    write_corpus(tmp_path / "d", documents[:3], tokenizer, annotations=("sentence",))
    assert not (tmp_path / "d" / "index" / "repeated.npy").exists()
    assert len(open_corpus(tmp_path / "d").repeated) == 0


def summary_of(hashes: np.ndarray) -> ShardSummary:
    def only_hashes(field: str) -> np.ndarray:
        assert field == "document_hashes"  # the other lengths are twenty times as large
        return hashes

    shard = Shard(name="", documents=len(hashes), sentences=0, tokens=0)
    return ShardSummary(shard=shard, text_bytes=0, span_counts={}, file={}, lengths=only_hashes)
