"""Large corpora, read in windows: every item once per epoch, whatever the task; the same for any
process and any place; nothing held out is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus.store import Corpus
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.sources.corpus_blocks import BlockSizes
from palm_ds.data.stream.item_order import HeldOutOrder, WindowedOrder
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset, held_out_rows
from palm_ds.data.tasks.task import CorpusTask, build
from palm_ds.pretrain.discourse_relation import DiscourseRelation
from tests.helpers.pair_corpus import chatter, list_file, tokenizer_of, write_sentences

SIZES = BlockSizes(
    block_tokens=256, window_blocks=12, window_documents=4, segment_blocks=20, group_segments=3
)
LARGER = replace(SIZES, window_blocks=60)
"""With a sample that is large enough to balance classes by."""
LENGTH = 48
TASKS = {
    "knowledge_masking": {"units": ["word"]},
    "token_document_relation": {"least": 5, "reach": 64},
    "sentence_reordering": {},
    "sentence_order": {},
    "sentence_distance": {},
    "next_sentence_prediction": {},
    "ir_relevance": {},
}
"""The tasks whose items do not depend on statistics of the corpus."""


def with_headings(documents: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    rng = np.random.default_rng(5)
    return [
        (
            f"shelf{number // 3}/{name}",
            [
                f"# {text}" if rng.random() < (0.3 if k else 0.7) else text
                for k, text in enumerate(texts)
            ],
        )
        for number, (name, texts) in enumerate(documents)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """900 documents, some 38,000 tokens: 150 blocks."""
    documents = with_headings(chatter(3, documents=900))
    tokenizer = tokenizer_of(*(text for _, texts in documents for text in texts))
    return write_sentences(tmp_path_factory.mktemp("large") / "corpus", documents, tokenizer)


def split(corpus: Corpus, held_out: float = 0.1, sizes: BlockSizes | None = SIZES):
    return split_corpus(corpus, held_out, ("word",), sizes)


def dataset_of(source: CorpusSource, kind: str, *, seed: int = 1, fixed: bool = False, **values):
    task = build(kind, {"source": "text", **values})
    return TaskGroupDataset(
        name=kind, tasks=(task,), task_id=0, source=source, seed=seed, max_length=LENGTH,
        fixed=fixed,
    )  # fmt: skip


def looked_up(dataset: TaskGroupDataset, n: np.ndarray) -> np.ndarray:
    parts = list(dataset.order.look_up(n))
    found = np.empty((len(n), parts[0].items.shape[1]), np.int64)
    for part in parts:
        found[part.places] = part.items
    return found


def sorted_rows(rows: np.ndarray) -> list[list[int]]:
    return sorted(rows.tolist())


@pytest.mark.parametrize("kind", TASKS)
def test_an_epoch_has_every_item_of_the_corpus_once(corpus, kind):
    dataset = dataset_of(split(corpus)[0], kind, **TASKS[kind])
    assert isinstance(dataset.order, WindowedOrder)
    small = dataset_of(split(corpus, sizes=None)[0], kind, **TASKS[kind])
    assert small.source.split is None and dataset.num_items == small.num_items
    every = looked_up(small, np.arange(small.num_items))
    first, second = (
        looked_up(dataset, np.arange(dataset.num_items) + epoch * dataset.num_items)
        for epoch in range(2)
    )
    assert sorted_rows(first) == sorted_rows(second) == sorted_rows(every)
    assert (first != second).any()


@pytest.mark.parametrize("kind", TASKS)
def test_an_item_is_the_same_wherever_reading_begins(corpus, kind):
    n = np.random.default_rng(2).integers(0, 3000, 60)
    dataset = dataset_of(split(corpus)[0], kind, **TASKS[kind])
    order = np.argsort(n, kind="stable")
    layouts = dataset.layouts(n)
    assert (dataset.layouts(n[order]) == layouts[order]).all()
    for k in range(0, 60, 13):
        alone = dataset_of(split(corpus)[0], kind, **TASKS[kind])
        assert alone.layouts(n[k : k + 1])[0] == layouts[k]
        one, other = (each.example(int(n[k]), layouts[k]) for each in (alone, dataset))
        assert (one.input_ids == other.input_ids).all() and len(one) == layouts[k]["length"]


def test_rows_of_an_epoch_are_mixed_and_differ_by_seed(corpus):
    """The first tenth of an epoch reads from all over the corpus."""
    source = split(corpus, sizes=replace(SIZES, group_segments=64))[0]
    dataset, other = (dataset_of(source, "sentence_distance", seed=seed) for seed in (1, 2))
    some = np.arange(dataset.num_items // 10)
    anchors = looked_up(dataset, some)[:, 0]
    tenths = anchors * 10 // corpus.manifest.sentences
    assert len(np.unique(tenths)) >= 6
    assert (looked_up(other, some)[:, 0] != anchors).mean() > 0.9


def test_windows_hold_few_documents_at_a_time(corpus):
    dataset = dataset_of(split(corpus)[0], "sentence_distance")
    for part in dataset.order.look_up(np.arange(dataset.num_items)):
        assert 2 <= len(part.source) <= 150


def test_other_documents_are_other_documents(corpus):
    dataset = dataset_of(split(corpus)[0], "sentence_distance")
    starts = np.asarray(corpus.document_starts)
    n = np.arange(2000)
    layouts = dataset.layouts(n)
    first, second = (
        np.searchsorted(starts, layouts[name], side="right") for name in ("first", "second")
    )
    assert ((first != second) == (layouts["label"] == 2)).all()
    assert np.bincount(layouts["label"]).min() > 600
    sampled = dataset_of(split(corpus)[0], "ir_relevance").layouts(n)
    first, second = (
        np.searchsorted(starts, sampled[name], side="right") for name in ("first", "second")
    )
    assert ((first != second) == (sampled["label"] == 2)).all()


def test_groups_of_documents_stay_groups(corpus):
    dataset = dataset_of(split(corpus)[0], "ir_relevance", group=True)
    starts, seen = np.asarray(corpus.document_starts), Counter()
    for layout in dataset.layouts(np.arange(dataset.num_items)):
        one, other = (
            np.searchsorted(starts, layout[name], side="right") - 1 for name in ("first", "second")
        )
        same = (
            corpus.document(int(one))[0].split("/")[0]
            == corpus.document(int(other))[0].split("/")[0]
        )
        assert same == (layout["label"] < 2) and (one == other) == (layout["label"] == 0)
        seen[int(layout["label"])] += 1
    assert len(seen) == 3 and len(set(seen.values())) == 1


def test_held_out_documents_are_never_trained_on_and_need_no_counts(corpus):
    training, held = split(corpus, 0.2)
    dataset = dataset_of(held, "sentence_distance", fixed=True)
    assert isinstance(dataset.order, HeldOutOrder)
    again = dataset_of(held, "sentence_distance", seed=9, fixed=True)
    few, all_of_it = dataset.order.up_to(20), dataset.num_items
    assert few == 20 < all_of_it
    items = looked_up(dataset, np.arange(all_of_it))
    assert (items == looked_up(again, np.arange(all_of_it))).all()
    trained = looked_up(dataset_of(training, "sentence_distance"), np.arange(4000))
    firsts = set(np.asarray(corpus.first_sentence)[_held(corpus, 0.2)].tolist())
    assert set(items[:, 1].tolist()) <= firsts and not set(trained[:, 1].tolist()) & firsts
    rows = held_out_rows(dataset, 0, 20)
    assert sorted(ref.number for row in rows for ref in row) == list(range(20))


def _held(corpus: Corpus, share: float) -> np.ndarray:
    return split_corpus(corpus, share, ())[1].documents


# Classes balanced by a sample ------------------------------------------------------------------


@pytest.fixture(scope="module")
def markers(tmp_path_factory) -> str:
    return list_file(tmp_path_factory.mktemp("list"), "but\nand\nin fact\nso\nhowever,\nplum\n")


def test_discourse_pairs_are_balanced_and_right(corpus, markers):
    settings = {"markers": markers, "least": 5, "shortest": 3}
    dataset = dataset_of(split(corpus, sizes=LARGER)[0], "discourse_relation", **settings)
    small = dataset_of(split(corpus, sizes=None)[0], "discourse_relation", **settings)
    layouts = dataset.layouts(np.arange(dataset.num_items))
    counts = np.bincount(layouts["label"])
    counts = counts[counts > 0]
    assert len(counts) == 5 and counts.min() > 0.6 * counts.max()
    found = Counter(
        (int(x["first"] + x["first_tokens"]), int(x["second"]), int(x["label"])) for x in layouts
    )
    ends = {(end, second, label) for _, end, second, label in _pairs(small)}
    assert set(found) <= ends and len(found) > 0.5 * len(ends)
    assert max(found.values()) <= 10
    assert "in a sample of the corpus" in dataset.describe()


def test_a_rare_class_of_a_large_corpus_is_no_class_to_guess(corpus, markers):
    """Its pairs are in the windows, but no items are made of them."""
    source = split(corpus, sizes=LARGER)[0]
    dataset = dataset_of(source, "discourse_relation", markers=markers, least=120, shortest=3)
    (task,), every = dataset.tasks, np.unique([pair[3] for pair in _pairs(dataset)])
    trained = np.unique(dataset.layouts(np.arange(dataset.num_items))["label"])
    assert 2 <= len(trained) < len(every)
    loss, accuracy = task.baseline(trained, dataset.source)
    assert np.exp(loss) == pytest.approx(np.full(len(trained), len(trained)))
    assert 1 / accuracy == pytest.approx(np.full(len(trained), len(trained)))
    assert f" pairs of {len(trained)} of 6 classes" in dataset.describe()


def _pairs(dataset: TaskGroupDataset) -> list[tuple[int, ...]]:
    (task,) = dataset.tasks
    assert isinstance(task, DiscourseRelation)
    table = task._balanced(dataset.source)[0]
    return [tuple(map(int, row)) for row in table[:, [0, 1, 2, 4]]]


def test_labeled_pairs_are_balanced(tmp_path):
    rng = np.random.default_rng(3)
    labels = rng.choice(3, 1500, p=[0.8, 0.15, 0.05])
    documents = [(f"d{n}", ["a b " * 3, "c d " * 4]) for n in range(1500)]
    corpus = write_sentences(
        tmp_path / "c", documents, tokenizer_of("a b c d"), ["strong", "weak", "random"],
        labels.tolist(),
    )  # fmt: skip
    dataset = dataset_of(split(corpus, 0.0, LARGER)[0], "ir_relevance")
    layouts = dataset.layouts(np.arange(dataset.num_items))
    counts = np.bincount(layouts["label"])
    assert counts.min() > 0.7 * counts.max()
    document = np.searchsorted(corpus.document_starts, layouts["first"], side="right") - 1
    assert (labels[document] == layouts["label"]).all()
    classes = dataset_of(
        split(corpus, 0.0, LARGER)[0], "discourse_relation", markers="labels", classes=3, least=5
    )
    layouts = classes.layouts(np.arange(classes.num_items))
    document = np.searchsorted(corpus.document_starts, layouts["first"], side="right") - 1
    assert (labels[document] == layouts["label"]).all()


# Mistakes --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EverySecond(CorpusTask):
    """Its items depend on the other documents of the source."""

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        return super().items(source, max_length)[::2]

    def head(self, backbone):
        raise NotImplementedError


def test_a_task_whose_items_depend_on_other_documents_is_refused(corpus):
    source = split(corpus)[0]
    task = EverySecond(name="mine", source="text")
    dataset = TaskGroupDataset(
        name="mine", tasks=(task,), task_id=0, source=source, seed=1, max_length=LENGTH
    )
    with pytest.raises(UserError, match=r"tasks\.mine: items\(\) made .* must not depend on"):
        dataset.layouts(np.arange(dataset.num_items))


def test_documents_longer_than_a_block_share_windows_with_others(tmp_path):
    documents = [(f"d{n}", [" ".join(["a b c"] * 40)] * 6) for n in range(40)]
    corpus = write_sentences(tmp_path / "c", documents, tokenizer_of("a b c"))
    sizes = replace(SIZES, block_tokens=64, window_documents=8, segment_blocks=60)
    dataset = dataset_of(split(corpus, 0.0, sizes)[0], "next_sentence_prediction")
    assert isinstance(dataset.order, WindowedOrder)
    assert len(dataset.layouts(np.arange(3 * dataset.num_items))) == 3 * dataset.num_items
    for part in dataset.order.look_up(np.arange(dataset.num_items)):
        assert len(part.source) >= 2
