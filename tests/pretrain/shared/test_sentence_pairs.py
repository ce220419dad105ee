"""Ready-made pairs are used as they are, truncated as in BERT, balanced by counting."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import ExampleRef, TaskGroupDataset, extend_into_padding
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.pretrain.next_sentence_prediction import NextSentencePrediction
from palm_ds.pretrain.sentence_distance import SentenceDistance
from palm_ds.pretrain.sentence_order import SentenceOrder
from palm_ds.pretrain.sentence_reordering import SentenceReordering
from palm_ds.pretrain.shared import sentence_pairs
from tests.helpers.pair_corpus import tokenizer_of, whole, write_sentences
from tests.helpers.small_corpus import write_small_corpus

TEXTS = [
    ("p0", ["the cat sat on the mat", "it slept"]),
    ("p1", ["a dog", "it barked . it ran , and it barked again ."]),
    ("p2", ["rain", "sun"]),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    tokenizer = tokenizer_of(*(text for _, pair in TEXTS for text in pair))
    folder = tmp_path_factory.mktemp("pairs") / "corpus"
    return whole(write_sentences(folder, TEXTS, tokenizer, ["no", "yes"], [1, 0, 1]))


def test_ready_made_pairs_are_the_documents_of_the_corpus(source):
    assert sentence_pairs.is_ready_made(source)
    assert sentence_pairs.label_names(source) == ["no", "yes"]
    assert sentence_pairs.ready_made(source).tolist() == [
        [0, 6, 8, 1],
        [8, 10, 21, 0],
        [21, 22, 23, 1],
    ]
    some = CorpusSource(source.corpus, np.array([1]))
    assert sentence_pairs.ready_made(some).tolist() == [[8, 10, 21, 0]]


def slow_fit(first: int, second: int, most: int) -> tuple[int, int]:
    while first + second > most:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


def test_texts_are_cut_longest_first():
    every = np.array([(a, b, most) for a in range(1, 14) for b in range(1, 14) for most in (2, 9)])
    for most in (2, 9):
        first, second = every[every[:, 2] == most, :2].T
        kept = np.column_stack(sentence_pairs.fit(first, second, most))
        slow = [slow_fit(int(a), int(b), most) for a, b in zip(first, second, strict=True)]
        assert kept.tolist() == [list(pair) for pair in slow]
    by_row = np.column_stack(sentence_pairs.fit(every[:, 0], every[:, 1], every[:, 2]))
    assert by_row.tolist() == [list(slow_fit(*map(int, row))) for row in every]


@pytest.mark.parametrize("max_length", [5, 8, 11, 12, 15, 64])
def test_layouts_are_exact_and_pairs_are_used_as_they_are(source, max_length):
    layouts = sentence_pairs.lay_out(sentence_pairs.ready_made(source), source, max_length)
    vocabulary = source.vocabulary
    for (_, texts), layout in zip(TEXTS, layouts, strict=True):
        example = sentence_pairs.arrange_pair(layout, source)
        assert len(example) == layout["length"] <= max_length
        assert layout["spare"] == 0
        a, b = ([*text.split()] for text in texts)
        keep_a, keep_b = slow_fit(len(a), len(b), max_length - 3)
        words = source.corpus.tokenizer().tokens(example.input_ids)
        assert words == ["[CLS]", *a[:keep_a], "[SEP]", *b[:keep_b], "[SEP]"]
        assert example.token_type_ids.tolist() == [0] * (keep_a + 2) + [1] * (keep_b + 1)
        assert (example.source_offsets >= 0).tolist() == [
            i not in (0, keep_a + 1, len(words) - 1) for i in range(len(words))
        ]
        assert vocabulary.cls == example.input_ids[0]


def epoch(classes: np.ndarray, repeat: int) -> tuple[np.ndarray, np.ndarray]:
    order, items = sentence_pairs.balance(classes, repeat, key=5)
    num_uniforms = np.random.default_rng(0).random(len(items))
    return order[sentence_pairs.pick(items, num_uniforms)], items


@pytest.mark.parametrize(
    ("counts", "repeat", "each"),
    [
        ({0: 100, 1: 7, 3: 20}, 3, 21),  # the rarest thrice; class 2 does not occur
        ({0: 100, 1: 7}, 50, 100),  # no more than the commonest has
        ({0: 5, 1: 5}, 4, 5),
        ({2: 9}, 4, 9),
        ({0: 1, 1: 1000}, 1, 1),
    ],
)
def test_classes_are_equally_many_and_take_turns(counts, repeat, each):
    classes = np.random.default_rng(1).permutation(np.repeat(list(counts), list(counts.values())))
    chosen, _ = epoch(classes, repeat)
    of = classes[chosen]
    assert Counter(of.tolist()) == dict.fromkeys(counts, each)
    for first in range(0, len(of), len(counts)):  # every turn holds every class once
        assert sorted(of[first : first + len(counts)]) == sorted(counts)
    times = Counter(chosen.tolist())
    for label, count in counts.items():
        mine = [times[i] for i in np.flatnonzero(classes == label).tolist()]
        assert max(mine) <= -(-each // count) <= repeat  # none of a common class twice
        assert min(mine) >= each // count


def test_every_pair_of_a_common_class_is_drawn_over_the_epochs_evenly():
    classes = np.repeat([0, 1], [40, 4])
    order, items = sentence_pairs.balance(classes, 2, key=1)
    rng = np.random.default_rng(0)
    drawn = [order[sentence_pairs.pick(items, rng.random(len(items)))] for _ in range(3000)]
    times = np.bincount(np.concatenate(drawn), minlength=44)
    assert len(items) == 16 and (times[40:] == 6000).all()
    expected = 3000 * 8 / 40
    assert ((times[:40] - expected) ** 2 / expected).sum() < 72  # chi-squared, 39 df, p = 0.001


def test_balance_depends_on_its_key_only():
    classes = np.arange(50) % 3
    one, two, other = (sentence_pairs.balance(classes, 2, key)[0].tolist() for key in (1, 1, 2))
    assert one == two != other
    order, items = sentence_pairs.balance(np.empty(0, np.int64), 2, 1)
    assert len(order) == 0 and items.shape == (0, 2)


def test_classes_follow_the_names_of_labels(source):
    assert sentence_pairs.classes_of_labels(source, {"yes": 0, "no": 7, "x": 9}, "t").tolist() == [
        7,
        0,
    ]
    with pytest.raises(UserError, match=r"^tasks.t: .* 1 of 2 labels .*\(no\); known: yes, maybe$"):
        sentence_pairs.classes_of_labels(source, {"yes": 0, "maybe": 1}, "tasks.t")


def refused(source: CorpusSource) -> str:
    with pytest.raises(UserError) as error:
        sentence_pairs.ready_made(source)
    assert "\n" not in str(error.value) and str(source.corpus.path) in str(error.value)
    return str(error.value)


def test_a_corpus_without_pairs_is_refused(tmp_path):
    tokenizer = tokenizer_of("a b c")
    text = whole(write_sentences(tmp_path / "text", [("t", ["a b", "c"])], tokenizer))
    assert not sentence_pairs.is_ready_made(text)
    assert "no annotation label" in refused(text)
    three = [("one", ["a", "b"]), ("two", ["a", "b", "c"])]
    corpus = write_sentences(tmp_path / "three", three, tokenizer, ["no"], [0, 0])
    assert "document 1 (two) has 3 sentences" in refused(whole(corpus))
    corpus = write_sentences(tmp_path / "high", three[:1], tokenizer, ["no"], [3])
    assert "label 3 has no name" in refused(whole(corpus))


# ---- two separators, as RoBERTa's tokenizer has them ----

ROW = 64
KINDS: list[type[CorpusTask]] = [
    NextSentencePrediction,
    SentenceDistance,
    SentenceOrder,
    SentenceReordering,
]


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> CorpusSource:
    folder = tmp_path_factory.mktemp("c") / "corpus"
    return split_corpus(write_small_corpus(folder, documents=60, separators=2), 0.0, ())[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longer", [False, True])
def test_two_separators_as_roberta_has_them(
    kind: type[CorpusTask], longer: bool, doubled: CorpusSource
) -> None:
    task = kind(name="task", source="text")
    dataset = TaskGroupDataset(
        name="task", tasks=(task,), task_id=0, source=doubled, seed=5, max_length=ROW
    )
    longest, vocabulary = 0, doubled.vocabulary
    for n, layout in enumerate(dataset.layouts(np.arange(300))):
        if longer:
            ((_, _, layout),) = extend_into_padding([ExampleRef(0, n, layout)], ROW)
        example = dataset.example(n, layout)
        assert len(example) == layout["length"] <= ROW
        ids, types = example.input_ids, example.token_type_ids
        texts = types.max() + 1
        special = np.where(ids == vocabulary.cls, "(", np.where(ids == vocabulary.sep, ")", "."))
        joined = "".join(special[example.source_offsets < 0])
        assert joined == "(" + "))" * (texts - 1) + ")"
        assert (np.diff(types) == 1).sum() == texts - 1  # each text has a segment, as ever
        longest = max(longest, len(example))
    assert longest == ROW or not longer
