"""Discourse relation: the label is the removed marker; all classes are equally frequent."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus.store import Corpus
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import (
    ExampleRef,
    TaskGroupDataset,
    extend_into_padding,
    held_out_rows,
)
from palm_ds.data.tasks.task import build
from palm_ds.pretrain.discourse_relation import DiscourseRelation
from palm_ds.pretrain.shared.discourse_markers import read_markers
from tests.helpers.full_rows import real_share
from tests.helpers.pair_corpus import (
    list_file,
    slow_pairs,
    tokenizer_of,
    whole,
    write_jumble,
    write_sentences,
)


def task_of(**values) -> DiscourseRelation:
    task = build("discourse_relation", {"source": "text", **values})
    assert isinstance(task, DiscourseRelation)
    return task


def dataset_of(
    source: CorpusSource, max_length: int = 64, fixed: bool = False, **values
) -> TaskGroupDataset:
    return TaskGroupDataset(
        name="discourse_relation", tasks=(task_of(**values),), task_id=0, source=source, seed=3,
        max_length=max_length, fixed=fixed,
    )  # fmt: skip


# Examples --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jumble(tmp_path_factory) -> Corpus:
    return write_jumble(tmp_path_factory.mktemp("jumble") / "corpus")


@pytest.fixture(scope="module")
def some_list(tmp_path_factory) -> str:
    return list_file(tmp_path_factory.mktemp("list"), "but\nand\nin fact\nso\nhowever,\nplum\n")


@pytest.mark.parametrize("max_length", [16, 64])
@pytest.mark.parametrize("longer", [False, True])
def test_examples_are_pairs_without_their_marker(jumble, some_list, max_length, longer):
    """The label is read off the tokens between the two texts."""
    dataset = dataset_of(whole(jumble), max_length, markers=some_list, least=1, shortest=3)
    mined = {row[1]: row for row in slow_pairs(jumble, read_markers(some_list, "x"), 3)}
    sentence_starts = set(jumble.sentence_starts.tolist())
    document_starts = np.asarray(jumble.document_starts)
    cut = grown = 0
    for n, layout in enumerate(dataset.layouts(np.arange(400))):
        if longer:
            ((_, _, layout),) = extend_into_padding([ExampleRef(0, n, layout)], max_length)
        example = dataset.example(n, layout)
        assert len(example) == layout["length"] <= max_length
        at, target = example.labels["discourse_relation"]
        assert at.tolist() == [0]
        real = example.source_offsets >= 0
        first, second = (
            example.source_offsets[real & (example.token_type_ids == k)] for k in (0, 1)
        )
        assert (np.diff(first) == 1).all() and (np.diff(second) == 1).all()
        before, marker, start, end, label = mined[int(first[-1]) + 1]
        assert label == target[0] and second[0] == start
        document = np.searchsorted(document_starts, [first[0], second[-1]], side="right") - 1
        assert document[0] == document[1]
        if len(first) < marker - before or len(second) < end - start:
            cut += 1
            assert len(example) == max_length and abs(len(first) - len(second)) <= max(
                1, abs(marker - before - (end - start))
            )
        elif first[0] < before or second[-1] >= end:
            grown += 1
        else:
            assert first[0] in sentence_starts
        if longer and second[-1] + 1 < document_starts[document[0] + 1]:
            assert len(example) == max_length  # the second text could have gone on
    assert (grown > 0) == longer
    assert (cut > 0) == (max_length == 16)


def test_all_used_classes_are_equally_frequent(jumble, some_list):
    source = whole(jumble)
    dataset = dataset_of(source, markers=some_list, least=5, shortest=3)
    task = dataset.tasks[0]
    assert isinstance(task, DiscourseRelation)
    counts = Counter(row[4] for row in slow_pairs(jumble, task.marker_classes, 3))
    assert set(counts) == {0, 1, 2, 3, 4} and min(counts.values()) >= 5  # "plum" never occurs
    labels = dataset.layouts(np.arange(dataset.num_items))["label"]
    each = min(max(counts.values()), 10 * min(counts.values()))
    assert Counter(labels.tolist()) == dict.fromkeys(range(5), each)
    loss, accuracy = task.baseline(np.array([0, 4]), source)
    assert loss == pytest.approx(np.log([5, 5])) and accuracy.tolist() == [0.2, 0.2]
    few = dataset_of(source, fixed=True, markers=some_list, least=5, shortest=3)
    shown = [layout["label"] for row in held_out_rows(few, 0, 15) for *_, layout in row]
    assert Counter(shown) == dict.fromkeys(range(5), 3)
    assert f"{sum(counts.values())} pairs of 5 of 6 classes" in task.describe(source)


def test_rare_classes_are_skipped_but_keep_their_number(jumble, some_list):
    task = task_of(markers=some_list, least=1, shortest=3)
    counts = Counter(row[4] for row in slow_pairs(jumble, task.marker_classes, 3))
    (rarest, fewest), *_ = counts.most_common()[::-1]
    dataset = dataset_of(whole(jumble), markers=some_list, least=fewest + 1, shortest=3)
    labels = set(dataset.layouts(np.arange(dataset.num_items))["label"].tolist())
    assert labels == {label for label, count in counts.items() if count > fewest}
    assert rarest not in labels and task.class_count == 6


def test_training_and_held_out_documents_have_the_same_classes(jumble, some_list):
    training, held = split_corpus(jumble, 0.3, ("word",))
    task = task_of(markers=some_list, least=5, shortest=3)
    for source in (training, held):
        items = task.items(source, 64)
        layouts = task.layout(items, np.full((len(items), 1), 0.5), source, 64)
        document = np.searchsorted(jumble.document_starts, layouts["first"], side="right") - 1
        assert set(document) <= set(source.documents)
        assert set(layouts["label"]) == {0, 1, 2, 3, 4}


def test_classes_with_too_few_pairs_in_the_sampled_documents_are_skipped(jumble, some_list):
    few, limit = CorpusSource(jumble, np.arange(9)), int(jumble.document_starts[9])
    slow = slow_pairs(jumble, read_markers(some_list, "x"), 3)
    counts = Counter(row[4] for row in slow)
    least = sorted(counts.values())[2]
    here = Counter(row[4] for row in slow if row[0] < limit)
    needed = least * limit / jumble.manifest.tokens / 2
    frequent = {label for label, count in counts.items() if count >= least}
    enough = {label for label in frequent if here[label] >= needed}
    assert 0 < len(enough) < len(frequent)
    dataset = dataset_of(few, markers=some_list, least=least, shortest=3)
    assert set(dataset.layouts(np.arange(dataset.num_items))["label"].tolist()) == enough
    (task,) = dataset.tasks
    assert task.baseline(np.array([0]), few)[1] == pytest.approx(1 / len(enough))


def test_the_unmarked_class_has_sentences_without_any_marker(jumble, some_list):
    source = whole(jumble)
    dataset = dataset_of(source, markers=some_list, least=1, shortest=3, unmarked=True)
    task = dataset.tasks[0]
    assert isinstance(task, DiscourseRelation)
    assert task.class_count == 7 and task.class_name(6) == "[no-conn]"
    layouts = dataset.layouts(np.arange(dataset.num_items))
    none = layouts[layouts["label"] == 6]
    assert len(none) == len(layouts) / 6
    marked = {row[1] for row in slow_pairs(jumble, task.marker_classes, 1)}
    starts = set(jumble.sentence_starts.tolist())
    for _, _, start, tokens, second, _, _ in none.tolist():
        assert start in starts and start + tokens == second in starts
        assert second not in marked


def test_equal_example_numbers_give_equal_examples(jumble, some_list):
    one, two = (dataset_of(whole(jumble), markers=some_list, least=1) for _ in range(2))
    n = np.arange(50)
    assert np.array_equal(one.layouts(n), two.layouts(n))
    assert np.array_equal(one.layouts(n)[7:9], one.layouts(n[7:9]))
    layout = one.layouts(n)[3]
    assert np.array_equal(one.example(3, layout).input_ids, two.example(3, layout).input_ids)


@pytest.mark.slow
@pytest.mark.parametrize("max_length", [128, 512])
def test_rows_of_real_text_are_full(shared_en, max_length):
    dataset = dataset_of(whole(shared_en), max_length, markers="en", least=20)
    assert real_share(dataset) > 0.99


# Ready-made pairs ------------------------------------------------------------------------------

READY = [
    ("0", ["it rained", "we stayed at home"]),
    ("1", ["it rained", "we went out"]),
    ("2", ["a cat", "a dog"]),
    ("3", ["it rained and rained and rained", "we went out"]),
]


@pytest.fixture(scope="module")
def ready(tmp_path_factory) -> CorpusSource:
    tokenizer = tokenizer_of(*(text for _, pair in READY for text in pair))
    names = ["As_a_result,", "yet", "[no-conn]"]
    folder = tmp_path_factory.mktemp("ready") / "corpus"
    return whole(write_sentences(folder, READY, tokenizer, names, [0, 1, 2, 1]))


def test_ready_made_pairs_follow_the_names_of_their_labels(ready):
    dataset = dataset_of(ready, 12, markers="en", least=1, unmarked=True)
    task = dataset.tasks[0]
    assert isinstance(task, DiscourseRelation)
    seen = Counter()
    for n, layout in enumerate(dataset.layouts(np.arange(3 * dataset.num_items))):
        assert layout["spare"] == 0
        example = dataset.example(n, layout)
        label = task.class_name(int(example.labels["discourse_relation"][1][0]))
        text = " ".join(ready.corpus.tokenizer().tokens(example.input_ids))
        seen[label, text] += 1
    assert {key for key in seen} == {
        ("as a result", "[CLS] it rained [SEP] we stayed at home [SEP]"),
        ("yet", "[CLS] it rained [SEP] we went out [SEP]"),
        ("yet", "[CLS] it rained and rained and rained [SEP] we went out [SEP]"),
        ("[no-conn]", "[CLS] a cat [SEP] a dog [SEP]"),
    }
    assert (
        dataset_of(ready, 9, markers="en", least=1, unmarked=True)
        .layouts(np.arange(12))["length"]
        .max()
        == 9
    )
    assert task.baseline(np.array([0]), ready)[1] == pytest.approx(1 / 3)


def test_labels_may_be_the_classes_themselves(ready):
    dataset = dataset_of(ready, 64, markers="labels", classes=5, least=1)
    labels = Counter(dataset.layouts(np.arange(dataset.num_items))["label"].tolist())
    assert labels == {0: 2, 1: 2, 2: 2}
    assert task_of(markers="labels", classes=5).class_count == 5
    assert task_of(markers="labels", classes=5).class_name(2) == "2"


def test_numbers_are_of_the_same_labels_in_all_corpora(tmp_path):
    """Of the corpora of a mix, and of that to evaluate on, which may lack the last ones."""
    texts = [("a", ["it rained", "we stayed"]), ("b", ["a cat", "a dog"])] * 2
    tokenizer = tokenizer_of(*(text for _, pair in texts for text in pair))

    def source(name: str, *labels: str) -> CorpusSource:
        return whole(write_sentences(tmp_path / name, texts, tokenizer, labels, [0, 1, 0, 1]))

    task = task_of(markers="labels", classes=3, least=1)
    for first in (source("train", "but", "so", "yet"), source("dev", "but", "so")):
        assert len(task.items(first, 64))
    with pytest.raises(UserError, match="number 1 is 'yet' in .*test and 'so' in .*train; give"):
        task.items(source("test", "but", "yet"), 64)


# Mistakes --------------------------------------------------------------------------------------


def refused(source: CorpusSource | None = None, **values) -> str:
    with pytest.raises(UserError) as error:
        task = task_of(**values)
        assert source is not None
        task.items(source, 64)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_other_mistakes_are_one_clear_line(jumble, ready, some_list, tmp_path):
    assert "no/such.txt: No such file" in refused(markers="no/such.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\nso\n")
    assert "not UTF-8" in refused(markers=str(tmp_path / "latin.txt"))
    assert "tasks.discourse_relation.least: expected a number above 0, got 0" in refused(least=0)
    assert ".repeat: expected a number above 0, got 0" in refused(repeat=0)
    assert "classes: `markers: labels` needs" in refused(markers="labels")
    assert "classes: only with" in refused(classes=3)
    assert "unmarked" in refused(markers="labels", classes=3, unmarked=True)
    text = whole(jumble)
    said = refused(text, markers=some_list, least=10_000)
    assert f"{jumble.manifest.sentences} sentences" in said and "`least: 10000`" in said
    assert ", 0 begin with one of 5 markers" in refused(
        text, markers=list_file(tmp_path, "plum\npear\nquince | medlar\nfig\n")
    )
    assert "has no annotation label" in refused(text, markers="labels", classes=3)
    assert "[no-conn]" in refused(ready, markers="en", least=1)
    assert "has 3 labels" in refused(ready, markers="labels", classes=2)


def test_documents_without_a_pair_are_reported(jumble, some_list):
    pairs = slow_pairs(jumble, read_markers(some_list, "x"), 3)
    inside = {
        int(np.searchsorted(jumble.document_starts, row[0], side="right")) - 1 for row in pairs
    }
    empty = np.array(sorted(set(range(len(jumble))) - inside))
    assert len(empty)
    said = refused(CorpusSource(jumble, empty), markers=some_list, least=1, shortest=3)
    assert f"{len(pairs)} pairs, but the {len(empty)} documents of this split have 0" in said
