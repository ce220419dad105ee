"""Reordering and distance: labels agree with the document, checked token by token."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import ExampleRef, TaskGroupDataset, extend_into_padding
from palm_ds.data.tasks.task import build
from tests.helpers.small_corpus import write_small_corpus

LENGTH = 96


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    corpus = write_small_corpus(tmp_path_factory.mktemp("c") / "corpus", documents=80)
    return split_corpus(corpus, 0.0, ("word", "phrase", "entity"))[0]


def dataset_of(source: CorpusSource, *kinds: str, **values) -> TaskGroupDataset:
    tasks = [
        build(kind, {"source": "text", **(values if i == 0 else {})})
        for i, kind in enumerate(kinds)
    ]
    return TaskGroupDataset(
        name=" + ".join(kinds),
        tasks=tuple(tasks),
        task_id=0,
        source=source,
        seed=3,
        max_length=LENGTH,
    )


def examples(dataset: TaskGroupDataset, many: int, *, longer: bool = True):
    """The first examples, each in its own row: with the row's free space if `longer`."""
    for n, layout in enumerate(dataset.layouts(np.arange(many))):
        if longer:
            ((_, _, layout),) = extend_into_padding([ExampleRef(0, n, layout)], LENGTH)
        yield dataset.example(n, layout)


def document_of(source: CorpusSource, positions: np.ndarray) -> np.ndarray:
    return np.searchsorted(source.corpus.document_starts, positions, side="right") - 1


def sentence_of(source: CorpusSource, positions: np.ndarray) -> np.ndarray:
    return np.searchsorted(source.corpus.sentence_starts, positions, side="right") - 1


def segments_of(example) -> list[np.ndarray]:
    """The source positions of each segment, without special tokens."""
    real = example.source_offsets >= 0
    numbers = range(int(example.token_type_ids.max()) + 1)
    return [example.source_offsets[real & (example.token_type_ids == number)] for number in numbers]


@pytest.mark.parametrize("most", [3, 4])
@pytest.mark.parametrize("longer", [False, True])
def test_reordering_labels_are_the_applied_permutation(source, most, longer):
    """Independent of the task's arithmetic: sort the segments by their position in the text."""
    classes = [p for n in range(1, most + 1) for p in itertools.permutations(range(n))]
    assert len(classes) == sum(math.factorial(n) for n in range(1, most + 1))
    dataset = dataset_of(source, "sentence_reordering", most=most)
    seen, shortened = Counter(), Counter()
    for example in examples(dataset, 600, longer=longer):
        parts = segments_of(example)
        starts = [int(part[0]) for part in parts]
        order = tuple(sorted(starts).index(start) for start in starts)
        at, target = example.labels["sentence_reordering"]
        assert at.tolist() == [0]
        assert classes[target[0]] == order
        in_order = sorted(parts, key=lambda part: part[0])
        ends = [int(part[-1]) + 1 for part in in_order]
        gaps = [int(b[0]) - end for end, b in zip(ends, in_order[1:], strict=False)]
        cut = [number for number, gap in enumerate(gaps) if gap]
        assert len(cut) <= 1  # one stretch of text, but for one segment cut short
        if ends[-1] not in source.corpus.sentence_starts:
            assert not cut
            cut = [len(parts) - 1]
        if cut and len(parts) == most:
            shortened[cut[0]] += 1
        assert cut == [] or longer
        assert len(set(document_of(source, np.concatenate(parts)))) == 1
        assert all(start in source.corpus.sentence_starts for start in starts)
        assert len(example) <= LENGTH
        seen[int(target[0])] += 1
    assert len(seen) >= (9 if most == 3 else 25)
    if longer:  # which one is cut short says nothing of the order
        assert set(shortened) == set(range(most))


def test_reordering_classes_are_balanced(source):
    dataset = dataset_of(source, "sentence_reordering")
    layouts = dataset.layouts(np.arange(6000))
    long_enough = layouts["last"] - layouts["first"] >= 3
    counts = np.bincount(layouts["label"][long_enough], minlength=9)
    expected = counts.sum() / 9
    assert ((counts - expected) ** 2 / expected).sum() < 26.1  # chi-squared, 8 df, p = 0.001


def test_reordering_chance_knows_the_number_of_segments(source):
    task = build("sentence_reordering", {"source": "text"})
    loss, accuracy = task.baseline(np.array([0, 1, 2, 3, 8]), source)
    assert accuracy.tolist() == [1, 1 / 2, 1 / 2, 1 / 6, 1 / 6]
    assert loss == pytest.approx(np.log([1, 2, 2, 6, 6]))


@pytest.mark.parametrize("longer", [False, True])
def test_distance_labels_agree_with_the_document(source, longer):
    dataset = dataset_of(source, "sentence_distance")
    seen, orders = Counter(), Counter()
    for example in examples(dataset, 900, longer=longer):
        a, b = segments_of(example)
        at, target = example.labels["sentence_distance"]
        assert at.tolist() == [0]
        documents = [set(document_of(source, part)) for part in (a, b)]
        assert all(len(each) == 1 for each in documents)
        first, second = sorted((a, b), key=lambda part: part[0])
        gap = sentence_of(source, second[:1])[0] - sentence_of(source, first[-1:])[0]
        if documents[0] != documents[1]:
            expected = 2
        elif gap == 1:
            # Adjacent to the token, unless one long sentence had to be cut.
            expected = 0
        else:
            assert gap > 1
            expected = 1
        assert target[0] == expected
        assert len(example) <= LENGTH
        seen[expected] += 1
        orders[a[0] < b[0]] += 1
    assert min(seen.values()) > 240
    assert min(orders.values()) > 350


def test_distance_is_balanced_and_lengths_reveal_nothing(source):
    layouts = dataset_of(source, "sentence_distance").layouts(np.arange(9000))
    labels = layouts["label"]
    counts = np.bincount(labels, minlength=3)
    assert ((counts - 3000) ** 2 / 3000).sum() < 13.8  # chi-squared, 2 df, p = 0.001
    means = [layouts["length"][labels == label].mean() for label in range(3)]
    assert max(means) / min(means) < 1.1


def test_a_blend_masks_the_whole_input_including_borrowed_sentences(source):
    dataset = dataset_of(source, "sentence_distance", "knowledge_masking")
    borrowed = 0
    for example in examples(dataset, 200):
        at, targets = example.labels["knowledge_masking"]
        assert len(at) > 0
        assert (example.source_offsets[at] >= 0).all()
        original = [int(source.read(p, p + 1).ids[0]) for p in example.source_offsets[at]]
        assert targets.tolist() == original
        borrowed += int((example.token_type_ids[at] == 1).sum())
    assert borrowed > 100


def test_building_an_example_twice_gives_the_same(source):
    dataset = dataset_of(source, "sentence_reordering", "knowledge_masking")
    (layout,) = dataset.layouts(np.array([17]))
    one, two = dataset.example(17, layout), dataset.example(17, layout)
    assert np.array_equal(one.input_ids, two.input_ids)
    again = dataset_of(source, "sentence_reordering", "knowledge_masking")
    assert np.array_equal(again.example(17, layout).input_ids, one.input_ids)
    assert not np.array_equal(dataset.example(18, layout).input_ids, one.input_ids)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("sentence_reordering", {"most": 1}, "tasks.task.most: expected 2 or more, got 1"),
        ("sentence_reordering", {"most": 9}, "tasks.task.most: expected at most 6, got 9"),
        ("sentence_reordering", {"shortest": 0}, "shortest"),
        ("sentence_distance", {"shortest": 2}, "shortest"),
        ("sentence_distance", {"shortst": 0.5}, 'did you mean "shortest"'),
        ("sentence_distanz", {}, 'did you mean "sentence_distance"'),
    ],
)
def test_wrong_settings_are_one_clear_line(kind, values, message):
    with pytest.raises(UserError) as error:
        build("task", {"kind": kind, "source": "text", **values})
    assert message in str(error.value)
    assert str(error.value).startswith("tasks.task")
    assert "\n" not in str(error.value)


def test_the_names_of_classes():
    distance = build("sentence_distance", {"source": "text"})
    assert [distance.class_name(k) for k in range(3)] == [
        "adjacent",
        "same document",
        "other document",
    ]
    reordering = build("sentence_reordering", {"source": "text", "most": 3})
    names = [reordering.class_name(k) for k in range(9)]
    assert names == ["1", "1 2", "2 1", "1 2 3", "1 3 2", "2 1 3", "2 3 1", "3 1 2", "3 2 1"]
    masking = build("knowledge_masking", {"source": "text"})
    assert masking.class_name(17) == "17"
