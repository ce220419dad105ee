"""The split of a corpus in training and held-out documents."""

from __future__ import annotations

import numpy as np
import pytest

from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.corpus.writer import write_corpus
from palm_ds.data.sources.corpus import passages, split_corpus
from palm_ds.data.sources.corpus_blocks import BlockOrder, BlockSizes
from palm_ds.text.tokenizer import wordpiece
from tests.helpers.small_corpus import SPECIALS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """400 documents, of which every fourth is a copy of another one."""
    rng = np.random.default_rng(2)
    texts = []
    for number in range(400):
        copy = number % 4 == 3
        ids = texts[int(rng.integers(number))] if copy else rng.integers(5, 65, 20)
        texts.append(ids)
    sentence = np.eye(1, 20, dtype=np.uint8)[0]
    documents = ((f"{n}", ids, {"sentence": sentence}) for n, ids in enumerate(texts))
    tokenizer = wordpiece([*SPECIALS, *(f"w{i}" for i in range(60))], lower=False)
    folder = tmp_path_factory.mktemp("copies") / "corpus"
    write_corpus(folder, documents, tokenizer, annotations=("sentence",))
    return open_corpus(folder)


def texts_of(corpus: Corpus, documents: np.ndarray) -> set[bytes]:
    return {corpus.document(int(number))[1].ids.tobytes() for number in documents}


def test_held_out_documents_have_no_copies_in_the_training_part(corpus: Corpus) -> None:
    training, held = split_corpus(corpus, 0.3, ())
    assert len(corpus.repeated) > 100
    assert not texts_of(corpus, training.documents) & texts_of(corpus, held.documents)
    assert 40 < len(held) < 90  # of 120, those without copies
    assert len(training) + len(held) + 30 < 400
    assert len(split_corpus(corpus, 0.0, ())[0]) == 400


def test_nor_in_any_window_of_a_large_corpus(corpus: Corpus) -> None:
    sizes = BlockSizes(
        block_tokens=50, window_blocks=4, window_documents=4, segment_blocks=4, group_segments=4
    )
    training, held = (source.split for source in split_corpus(corpus, 0.3, (), sizes))
    assert training is not None and held is not None
    found = []
    for split in (training, held):
        order = BlockOrder(split.blocks, 0, 1)
        windows = [w for group in range(order.groups) for w in order.windows(group)]
        found.append(np.concatenate([split.window(w).documents for w in windows]))
    assert not texts_of(corpus, found[0]) & texts_of(corpus, found[1])
    assert 40 < len(found[1]) < 90


@pytest.mark.parametrize("size", range(1, 12))
def test_no_passage_is_empty(corpus: Corpus, size: int) -> None:
    training, _ = split_corpus(corpus, 0.0, ())
    table = passages(training, size)
    assert (table[:, 1] > table[:, 0]).all()
    assert (table[:, 1] - table[:, 0]).sum() == (training.ends - training.starts).sum()
