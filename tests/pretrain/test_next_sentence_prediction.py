"""Next or random sentence: agreement with the documents, balance, and ready-made pairs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import ExampleRef, TaskGroupDataset, extend_into_padding
from palm_ds.data.tasks.task import build
from palm_ds.pretrain.next_sentence_prediction import NextSentencePrediction
from palm_ds.pretrain.shared.sentence_pairs import elsewhere
from tests.helpers.pair_corpus import tokenizer_of, whole, write_sentences
from tests.helpers.small_corpus import write_small_corpus

LENGTH = 96
NAME = "next_sentence_prediction"


def make(**values) -> NextSentencePrediction:
    return NextSentencePrediction(name=NAME, source="text", **values)


def dataset_of(source: CorpusSource, *others: str, max_length: int = LENGTH) -> TaskGroupDataset:
    tasks = (make(), *(build(kind, {"source": "text"}) for kind in others))
    name = " + ".join(task.name for task in tasks)
    return TaskGroupDataset(
        name=name, tasks=tasks, task_id=0, source=source, seed=5, max_length=max_length
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    folder = tmp_path_factory.mktemp("c") / "corpus"
    return split_corpus(
        write_small_corpus(folder, documents=80), 0.0, ("word", "phrase", "entity")
    )[0]


def texts_of(example) -> list[list[int]]:
    """The source positions of both texts."""
    real = example.source_offsets >= 0
    return [example.source_offsets[real & (example.token_type_ids == k)].tolist() for k in (0, 1)]


def sentence_of(source: CorpusSource, position: int) -> tuple[int, int]:
    """(document, number of the sentence in the corpus) by walking through the index."""
    document = sum(int(start) <= position for start in source.corpus.document_starts) - 1
    sentence = sum(int(start) <= position for start in source.corpus.sentence_starts) - 1
    return document, sentence


@pytest.mark.parametrize("longer", [False, True])
def test_labels_agree_with_the_documents(source, longer):
    """Independent of the task's arithmetic: look up the positions of both texts."""
    dataset, seen = dataset_of(source), Counter()
    for n, layout in enumerate(dataset.layouts(np.arange(500))):
        if longer:
            ((_, _, layout),) = extend_into_padding([ExampleRef(0, n, layout)], LENGTH)
        example = dataset.example(n, layout)
        a, b = texts_of(example)
        assert a == list(range(a[0], a[-1] + 1))
        assert b == list(range(b[0], b[-1] + 1))
        document, last_sentence = sentence_of(source, a[-1])
        other, next_sentence = sentence_of(source, b[0])
        follows = document == other and next_sentence == last_sentence + 1
        assert follows or document != other
        at, target = example.labels[NAME]
        assert (at.tolist(), target.tolist()) == ([0], [int(follows)])
        assert b[0] in source.corpus.sentence_starts
        assert sentence_of(source, a[0])[0] == document
        assert sentence_of(source, b[-1])[0] == other
        assert longer or a[0] in source.corpus.sentence_starts
        seen[follows] += 1
    assert min(seen.values()) > 200


def test_classes_are_balanced_and_lengths_reveal_nothing(source):
    layouts = dataset_of(source).layouts(np.arange(12000))
    label, length = layouts["label"], layouts["length"]
    first, most = layouts["first_tokens"], layouts["second_tokens"]
    counts = np.bincount(label, minlength=2)
    assert ((counts - 6000) ** 2 / 6000).sum() < 10.8  # chi-squared, 1 df, p = 0.001
    error = first.std() * np.sqrt(1 / counts[0] + 1 / counts[1])
    assert abs(first[label == 1].mean() - first[label == 0].mean()) < 3.5 * error
    # Documents this short often end before a row does, and then a true pair is a little shorter.
    for values in (length, length - first, np.minimum(most, LENGTH)):
        assert values[label == 1].mean() == pytest.approx(values[label == 0].mean(), rel=0.05)


def test_an_example_is_reproducible(source):
    layouts = dataset_of(source, "knowledge_masking").layouts(np.arange(20))
    one = [dataset_of(source, "knowledge_masking").example(n, x) for n, x in enumerate(layouts)]
    two = [dataset_of(source, "knowledge_masking").example(n, x) for n, x in enumerate(layouts)]
    assert all(np.array_equal(a.input_ids, b.input_ids) for a, b in zip(one, two, strict=True))
    assert all(len(a.labels["knowledge_masking"][0]) for a in one)


def test_random_sentences_are_uniform(source):
    """Of every document but one's own, as many from its first as may be drawn."""
    count = source.last_sentences - source.first_sentences
    eligible = np.where(np.arange(len(count)) % 3 == 0, 0, np.maximum(count - 2, 0))
    draw = (np.arange(200_000) + 0.5) / 200_000
    for own in (0, 1, 7, len(count) - 1):
        sentence, document = elsewhere(np.full(len(draw), own), eligible, draw, source)
        expected = [
            first + k
            for d, first in enumerate(source.first_sentences.tolist())
            for k in range(eligible[d])
            if d != own
        ]
        drawn, times = np.unique(sentence, return_counts=True)
        assert drawn.tolist() == expected
        assert np.ptp(times) <= 1
        assert (sentence >= source.first_sentences[document]).all()
        assert (sentence < source.last_sentences[document]).all()


PAIRS = [("p0", ["a b c", "d e"]), ("p1", ["b b . b", "a"]), ("p2", ["c", "d d d d d d d d d d"])]


def ready(
    folder: Path,
    labels: list[str],
    label_of: list[int],
    pairs: Sequence[tuple[str, list[str]]] = PAIRS,
) -> CorpusSource:
    return whole(write_sentences(folder, pairs, tokenizer_of("a b c d e ."), labels, label_of))


def test_ready_made_pairs_are_used_as_they_are(tmp_path):
    source = ready(tmp_path / "c", ["1", "0"], [0, 1, 1])  # numbers and names in another order
    dataset, tokenizer = dataset_of(source, max_length=10), source.corpus.tokenizer()
    found = {}
    for n, layout in enumerate(dataset.layouts(np.arange(3))):
        example = dataset.example(n, layout)
        found[" ".join(tokenizer.tokens(example.input_ids))] = example.labels[NAME][1].tolist()
        assert example.token_type_ids.tolist() == sorted(example.token_type_ids)
    assert found == {
        "[CLS] a b c [SEP] d e [SEP]": [1],
        "[CLS] b b . b [SEP] a [SEP]": [0],
        "[CLS] c [SEP] d d d d d d [SEP]": [0],  # cut to ten
    }
    loss, accuracy = make().baseline(np.array([0, 1]), source)
    assert np.exp(-loss) == pytest.approx([3 / 5, 2 / 5])
    assert accuracy.tolist() == [1, 0]


def test_pairs_that_all_follow_get_negatives(tmp_path):
    """ERNIE's files for its option generate_neg_sample."""
    source = ready(tmp_path / "c", ["0", "1"], [1, 1, 1])
    dataset, tokenizer = dataset_of(source, max_length=20), source.corpus.tokenizer()
    passes, true = 200, {"a b c": "d e", "b b . b": "a", "c": "d d d d d d d d d d"}
    found: Counter[int] = Counter()
    for n, layout in enumerate(dataset.layouts(np.arange(3 * passes))):
        example = dataset.example(n, layout)
        shown = " ".join(tokenizer.tokens(example.input_ids)).removeprefix("[CLS] ")
        first, second, _ = shown.split(" [SEP]")
        label = example.labels[NAME][1].item()
        assert (true[first] == second.strip()) == bool(label)
        found[label] += 1
    assert abs(found[0] / (3 * passes) - 0.5) < 0.08
    loss, accuracy = make().baseline(np.array([0, 1]), source)
    assert np.exp(-loss) == pytest.approx([0.5, 0.5]) and accuracy.tolist() == [0.5, 0.5]


def test_held_out_pairs_get_negatives_only_if_those_of_the_training_do(tmp_path):
    """Held-out pairs that all happen to be true keep their labels."""
    words = [" ".join(word) for word in itertools.product("abcde", repeat=3)][:60]
    documents = [(word, [word, "c d"]) for word in words]
    true = np.ones(60, np.int64)
    _, held = split_corpus(
        ready(tmp_path / "a", ["0", "1"], true.tolist(), documents).corpus, 0.1, ()
    )
    some = true.copy()
    some[np.setdiff1d(np.arange(60), held.documents)[:5]] = 0
    for name, labels, found in (("b", some, {1}), ("c", true, {0, 1})):
        corpus = ready(tmp_path / name, ["0", "1"], labels.tolist(), documents).corpus
        _, held = split_corpus(corpus, 0.1, ())
        made = dataset_of(held).layouts(np.arange(20 * len(held)))
        assert len(held) > 2 and {*made["label"].tolist()} == found


def test_pairs_with_other_labels_are_refused(tmp_path):
    source = ready(tmp_path / "c", ["because", "1"], [0, 1, 1])
    with pytest.raises(UserError, match=f"tasks.{NAME}: .*because.*known: 0, 1"):
        make().items(source, LENGTH)


def test_one_document_has_no_other(tmp_path):
    documents = [("long", ["a b", "b c", "c d"]), ("short", ["a"])]
    source = whole(write_sentences(tmp_path / "c", documents, tokenizer_of("a b c d")))
    with pytest.raises(UserError, match="at least 2") as error:
        make().check(source, LENGTH)
    assert str(error.value).startswith(f"tasks.{NAME}")


def test_a_document_of_one_sentence_is_never_drawn(tmp_path):
    documents = [("a", ["a a", "b b", "c c"]), ("one", ["d"]), ("z", ["e e", "f f", "g g"])]
    source = whole(write_sentences(tmp_path / "c", documents, tokenizer_of("a b c d e f g")))
    dataset, seen = dataset_of(source, max_length=8), set()
    for n, layout in enumerate(dataset.layouts(np.arange(200))):
        _, b = texts_of(dataset.example(n, layout))
        seen.add(int(b[0]))
    # What follows a sentence, never a first sentence; the first document has 6 tokens, "one" 1.
    assert seen == {2, 4, 9, 11}


@pytest.mark.parametrize("values", [{"shortest": 0.0}, {"shortest": 1.5}])
def test_wrong_settings_are_refused(values):
    with pytest.raises(UserError, match=f"tasks.{NAME}.shortest"):
        make(**values)
