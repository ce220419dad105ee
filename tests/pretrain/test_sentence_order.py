"""In order or swapped: agreement with the document, balance, and no other clue."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import ExampleRef, TaskGroupDataset, extend_into_padding
from palm_ds.pretrain.sentence_order import SentenceOrder
from tests.helpers.pair_corpus import tokenizer_of, whole, write_sentences
from tests.helpers.small_corpus import write_small_corpus

LENGTH = 96


def dataset_of(source: CorpusSource, max_length: int = LENGTH) -> TaskGroupDataset:
    task = SentenceOrder(name="sentence_order", source="text")
    return TaskGroupDataset(
        name="order", tasks=(task,), task_id=0, source=source, seed=5, max_length=max_length
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    folder = tmp_path_factory.mktemp("c") / "corpus"
    return split_corpus(write_small_corpus(folder, documents=80), 0.0, ())[0]


def test_labels_by_hand(tmp_path):
    documents = [("one", ["a b", "c d e"])]
    corpus = write_sentences(tmp_path / "c", documents, tokenizer_of("a b c d e"))
    dataset, found = dataset_of(whole(corpus)), set()
    for n, layout in enumerate(dataset.layouts(np.arange(20))):
        example = dataset.example(n, layout)
        text = " ".join(corpus.tokenizer().tokens(example.input_ids))
        found.add((text, *example.labels["sentence_order"][1].tolist()))
    assert found == {
        ("[CLS] a b [SEP] c d e [SEP]", 1),
        ("[CLS] c d e [SEP] a b [SEP]", 0),
    }


@pytest.mark.parametrize("longer", [False, True])
def test_labels_agree_with_the_positions_of_the_texts(source, longer):
    """Independent of the task's arithmetic; which text is truncated reveals nothing."""
    dataset, seen, cut = dataset_of(source), Counter(), Counter()
    starts = set(source.corpus.sentence_starts.tolist())
    for n, layout in enumerate(dataset.layouts(np.arange(1500))):
        if longer:
            ((_, _, layout),) = extend_into_padding([ExampleRef(0, n, layout)], LENGTH)
        example = dataset.example(n, layout)
        real = example.source_offsets >= 0
        texts = [
            example.source_offsets[real & (example.token_type_ids == k)].tolist() for k in (0, 1)
        ]
        in_order = int(texts[0][0] < texts[1][0])
        at, target = example.labels["sentence_order"]
        assert (at.tolist(), target.tolist()) == ([0], [in_order])
        for text in texts:
            assert text == list(range(text[0], text[-1] + 1))
            assert text[0] in starts
        early, late = sorted(texts)
        assert not any(early[0] < start <= late[0] for start in source.starts.tolist())
        # The later begins where the earlier ends, or would have ended.
        assert late[0] > early[-1]
        assert longer or late[0] == early[-1] + 1
        ends = [text[-1] + 1 in starts for text in texts]
        cut[in_order, ends.index(False) if False in ends else None] += 1
        seen[in_order] += 1
    assert abs(seen[0] - seen[1]) < 3.3 * np.sqrt(1500)  # chi-squared, 1 df, p = 0.001
    if longer:
        table = np.array([[cut[order, k] for k in (0, 1)] for order in (0, 1)])
        assert table.min() > 20
        expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
        assert ((table - expected) ** 2 / expected).sum() < 10.8  # independent, p = 0.001
    else:
        assert set(cut) == {(0, None), (1, None)}


def test_lengths_reveal_nothing(source):
    layouts = dataset_of(source).layouts(np.arange(8000))
    label, length = layouts["label"], layouts["length"]
    error = length.std() * np.sqrt(4 / len(label))
    assert abs(length[label == 1].mean() - length[label == 0].mean()) < 3.5 * error


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> CorpusSource:
    """Paragraphs of sentences whose lengths differ as those of novels, each drawn alone."""
    rng, words = np.random.default_rng(1), list("abcdefgh")
    documents = [
        (str(n), [" ".join(rng.choice(words, 1 + int(rng.exponential(14)))) for _ in range(60)])
        for n in range(150)
    ]
    folder = tmp_path_factory.mktemp("uneven") / "corpus"
    return whole(write_sentences(folder, documents, tokenizer_of(" ".join(words))))


@pytest.mark.parametrize("room", [0, 12])
def test_neither_the_longer_nor_the_shortened_text_is_more_often_the_earlier(uneven, room):
    """The earlier was the longer one in 61 % of the cases, since a part of a paragraph ended before
    a long sentence, with which the next part began; where texts grew, the later one, which then
    ended within a long sentence and was shortened more often."""
    dataset, earlier, cut = dataset_of(uneven), Counter(), Counter()
    starts = set(uneven.corpus.sentence_starts.tolist())
    for n, layout in enumerate(dataset.layouts(np.arange(4000))):
        if room:
            limit = min(int(layout["length"]) + room, LENGTH)
            ((_, _, layout),) = extend_into_padding([ExampleRef(0, n, layout)], limit)
        example = dataset.example(n, layout)
        real = example.source_offsets >= 0
        texts = sorted(
            example.source_offsets[real & (example.token_type_ids == k)].tolist() for k in (0, 1)
        )
        sizes = [len(text) for text in texts]
        if sizes[0] != sizes[1]:
            earlier[sizes[0] > sizes[1]] += 1
        ends = [text[-1] + 1 in starts for text in texts]
        if not all(ends):
            cut[ends.index(False)] += 1
    assert sum(earlier.values()) > 3500
    assert abs(earlier[True] - earlier[False]) < 3.3 * np.sqrt(sum(earlier.values()))
    assert abs(cut[0] - cut[1]) <= 3.3 * np.sqrt(sum(cut.values()))
    assert (sum(cut.values()) > 1000) == bool(room)


def test_an_example_is_reproducible(source):
    for n, layout in enumerate(dataset_of(source).layouts(np.arange(20))):
        one, two = dataset_of(source).example(n, layout), dataset_of(source).example(n, layout)
        assert np.array_equal(one.input_ids, two.input_ids)
        assert one.labels["sentence_order"][1] == two.labels["sentence_order"][1]


def test_the_baseline_is_one_half(source):
    loss, accuracy = dataset_of(source).tasks[0].baseline(np.array([0, 1, 1]), source)
    assert accuracy.tolist() == [0.5] * 3
    assert loss == pytest.approx(np.log(2))


def test_wrong_settings_are_refused():
    with pytest.raises(UserError, match="tasks.order.shortest: expected a number above 0, got 0.0"):
        SentenceOrder(name="order", source="text", shortest=0.0)
