"""Relevance: labels of logs, and labels from the structure of headings, checked token by token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from palm_ds.cli.prepare import COMMAND as PREPARE
from palm_ds.common.errors import UserError
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import ExampleRef, TaskGroupDataset, extend_into_padding
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import build
from palm_ds.pretrain.ir_relevance import IrRelevance
from tests.helpers.full_rows import real_share
from tests.helpers.pair_corpus import tokenizer_of, whole, write_sentences
from tests.helpers.small_corpus import write_small_corpus

STRONG, WEAK, IRRELEVANT = range(3)


def task_of(**values) -> IrRelevance:
    task = build("ir_relevance", {"source": "text", **values})
    assert isinstance(task, IrRelevance)
    return task


def dataset_of(
    source: CorpusSource, max_length: int = 64, fixed: bool = False, **values
) -> TaskGroupDataset:
    return TaskGroupDataset(
        name="ir_relevance",
        tasks=(task_of(**values),),
        task_id=0,
        source=source,
        seed=3,
        max_length=max_length,
        fixed=fixed,
    )


def drawn_documents(seed: int) -> list[tuple[str, list[str]]]:
    """Books of chapters with headings among the sentences; some have none, some nothing else."""
    rng = np.random.default_rng(seed)
    out = []
    for book in range(9):
        for chapter in range(int(rng.integers(1, 5))):
            texts = []
            for _ in range(int(rng.integers(1, 16))):
                heading = rng.random() < 0.3 or (not texts and rng.random() < 0.8)
                size = rng.integers(1, 5) if heading else rng.integers(2, 15)
                words = " ".join(f"w{word}" for word in rng.integers(0, 50, size))
                texts.append(("# " if heading else "") + words)
            out.append((f"shelf/book{book}/{chapter}", texts))
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    tokenizer = tokenizer_of(" ".join(f"w{word}" for word in range(50)))
    folder = tmp_path_factory.mktemp("books") / "corpus"
    return write_sentences(folder, drawn_documents(1), tokenizer)


def texts_of(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """The source positions of the query and the passage."""
    real = example.source_offsets >= 0
    first, second = (example.source_offsets[real & (example.token_type_ids == k)] for k in (0, 1))
    assert (np.diff(first) == 1).all() and (np.diff(second) == 1).all()
    return first, second


def places_of(corpus: Corpus, group: bool) -> list[tuple[str, int, int]]:
    """For each token, by walking from the first to the last: its document (or group), its
    annotation, and the place of the heading above it."""
    out: list[tuple[str, int, int]] = []
    for number in range(len(corpus)):
        name, piece = corpus.document(number)
        under, at = -1, len(out)
        for k, mark in enumerate(piece.annotations["heading"].tolist()):
            if mark == 1 and not (group and k):
                under = at + k
            out.append((name.rpartition("/")[0] if group else name, mark, under))
    return out


def slow_label(
    places: list[tuple[str, int, int]], query: np.ndarray, passage: np.ndarray, group: bool
) -> int:
    """The label by the headings, after checking that a query is one and a passage contains none."""
    assert [places[k][1] for k in query] == [1] + [2] * (len(query) - 1)
    assert group or not any(places[k][1] for k in passage)
    assert len({places[k][2] for k in passage}) == 1 and not set(query) & set(passage)
    if places[query[0]][0] != places[passage[0]][0]:
        return IRRELEVANT
    return STRONG if places[passage[0]][2] == query[0] else WEAK


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize("max_length", [20, 96])
def test_labels_agree_with_the_headings(corpus, group, longer, max_length):
    dataset = dataset_of(whole(corpus), max_length, group=group)
    starts, places = corpus.sentence_starts.tolist(), places_of(corpus, group)
    seen, grown, inner = Counter(), 0, 0
    for n, short in enumerate(dataset.layouts(np.arange(150))):
        ((_, _, layout),) = (
            extend_into_padding([ExampleRef(0, n, short)], max_length)
            if longer
            else [(0, n, short)]
        )
        example = dataset.example(n, layout)
        assert len(example) == layout["length"] <= max_length
        query, passage = texts_of(example)
        at, target = example.labels["ir_relevance"]
        assert at.tolist() == [0]
        assert target[0] == slow_label(places, query, passage, group)
        assert query[0] in starts and passage[0] in starts
        if not longer and len(example) < max_length:
            assert passage[-1] + 1 in starts
        grown += layout["length"] > short["length"]
        before = starts[starts.index(int(passage[0])) - 1]
        inner += corpus.take(np.array([before]), "heading")[0] == 0
        seen[int(target[0])] += 1
    assert min(seen.values()) > 30
    assert inner > 40  # a passage begins anywhere in its section
    assert (grown > 20) == longer


def test_by_hand(tmp_path):
    documents = [
        ("pets", ["# cats", "a cat sat on the mat today again", "it slept there all day long",
                  "# dogs", "the dog barked at the moon all night", "# nothing here"]),
        ("sky", ["no heading stands above this text at all", "# rain", "it rained and rained",
                 "all day and all night long", "# sun", "the sun came out at last on us",
                 "# wind", "gusts"]),
        ("odd", ["# alone", "one section makes no document with other sections"]),
    ]  # fmt: skip
    tokenizer = tokenizer_of(*(text for _, texts in documents for text in texts))
    source = whole(write_sentences(tmp_path / "corpus", documents, tokenizer))
    task, seen = task_of(shortest=0.1), Counter()
    assert "weak supervision from structure, not logs: 4 sections of 2 documents" in task.describe(
        source
    )
    dataset = dataset_of(source, 14, shortest=0.1)
    for n, layout in enumerate(dataset.layouts(np.arange(300))):
        example = dataset.example(n, layout)
        query, passage = texts_of(example)
        words = source.corpus.tokenizer().tokens(source.corpus.take(query))
        first = source.corpus.tokenizer().tokens(source.corpus.take(passage[:1]))[0]
        label = task.class_name(int(example.labels["ir_relevance"][1][0]))
        seen[" ".join(words), first, label] += 1
    assert {query for query, _, _ in seen} == {"cats", "dogs", "rain", "sun"}
    assert {key[1:] for key in seen if key[0] == "cats"} == {
        ("a", "strong"), ("it", "strong"), ("the", "weak"),
        ("it", "irrelevant"), ("all", "irrelevant"), ("the", "irrelevant"),
    }  # fmt: skip
    assert {key[1:] for key in seen if key[0] == "sun"} == {
        ("the", "strong"), ("it", "weak"), ("all", "weak"),
        ("a", "irrelevant"), ("it", "irrelevant"), ("the", "irrelevant"),
    }  # fmt: skip


@pytest.mark.parametrize("group", [False, True])
def test_classes_are_balanced_and_a_passage_alone_reveals_nothing(corpus, group):
    source = whole(corpus)
    dataset = dataset_of(source, 64, group=group)
    sections = dataset.num_items // 3
    layouts = dataset.layouts(np.arange(dataset.num_items * 400))
    assert np.bincount(layouts["label"]).tolist() == [sections * 400] * 3
    headings = np.unique(layouts["first"])
    assert len(headings) == sections
    # Every section is the passage's as often, in every class; those of other documents as nearly
    # as documents of different sizes allow.
    for label in range(3):
        here = layouts[layouts["label"] == label]
        of = np.searchsorted(headings, here["second"], side="right") - 1
        counts = np.bincount(of, minlength=sections)
        slack = 0.35 if label == IRRELEVANT else 0.2
        assert abs(counts / 400 - 1).max() < slack
    means = [layouts["length"][layouts["label"] == label].mean() for label in range(3)]
    assert max(means) / min(means) < 1.05


def test_the_first_held_out_items_are_balanced(corpus):
    layouts = dataset_of(whole(corpus), fixed=True).layouts(np.arange(30))
    assert np.bincount(layouts["label"]).tolist() == [10, 10, 10]
    assert len(np.unique(layouts["first"])) == 10


def test_equal_example_numbers_give_equal_examples(corpus):
    one, two = dataset_of(whole(corpus)), dataset_of(whole(corpus))
    n = np.arange(60)
    assert np.array_equal(one.layouts(n), two.layouts(n))
    assert np.array_equal(one.layouts(n)[7:9], one.layouts(n[7:9]))
    layout = one.layouts(n)[3]
    assert np.array_equal(one.example(3, layout).input_ids, two.example(3, layout).input_ids)


def test_held_out_documents_are_not_mixed_with_training(corpus):
    for source in split_corpus(corpus, 0.4, ()):
        layouts = dataset_of(source).layouts(np.arange(200))
        for places in (layouts["first"], layouts["second"]):
            document = np.searchsorted(corpus.document_starts, places, side="right") - 1
            assert set(document) <= set(source.documents)


@pytest.fixture(scope="module")
def textbooks(shared, tmp_path_factory) -> Corpus:
    folder = tmp_path_factory.mktemp("openstax") / "corpus"
    options = ["--language", "en", "--lower", "--title_field", "title", "--annotation", "heading"]
    options += ["--tokenizer", str(shared / "data/ernie/vocab_en.txt"), "--no_collocations"]
    PREPARE.call([str(folder), str(shared / "data/corpus/en/openstax.jsonl"), *options])
    return open_corpus(folder)


@pytest.mark.parametrize("max_length", [128, 512])
def test_rows_of_real_text_are_full(textbooks, max_length):
    dataset = dataset_of(whole(textbooks), max_length, group=True)
    assert real_share(dataset) > 0.99


# From logs -------------------------------------------------------------------------------------

LOGS = [
    ("0", ["cheap flights", "flights for little money"]),
    ("1", ["cheap flights", "how birds fly"]),
    ("2", ["cheap flights", "a recipe for soup"]),
    ("3", ["soup", "a recipe for soup"]),
]


@pytest.mark.parametrize(
    "names", [["strong", "weak", "random"], ["0", "1", "2"], ["irrelevant", "strong", "weak"]]
)
def test_logs_follow_the_names_of_their_labels(tmp_path, names):
    tokenizer = tokenizer_of(*(text for _, pair in LOGS for text in pair))
    right = [STRONG, WEAK, IRRELEVANT, STRONG]
    numbers = {"strong": 0, "weak": 1, "random": 2, "irrelevant": 2, "0": 0, "1": 1, "2": 2}
    of = {numbers[name]: k for k, name in enumerate(names)}
    corpus = write_sentences(tmp_path / "c", LOGS, tokenizer, names, [of[label] for label in right])
    source = whole(corpus)
    dataset = dataset_of(source, 10)
    seen = Counter()
    for n, layout in enumerate(dataset.layouts(np.arange(2 * dataset.num_items))):
        assert layout["spare"] == 0
        example = dataset.example(n, layout)
        text = " ".join(corpus.tokenizer().tokens(example.input_ids))
        seen[text, int(example.labels["ir_relevance"][1][0])] += 1
    assert seen == {
        ("[CLS] cheap flights [SEP] flights for little money [SEP]", STRONG): 2,
        ("[CLS] soup [SEP] a recipe for soup [SEP]", STRONG): 2,
        ("[CLS] cheap flights [SEP] how birds fly [SEP]", WEAK): 4,
        ("[CLS] cheap flights [SEP] a recipe for soup [SEP]", IRRELEVANT): 4,
    }
    assert task_of().describe(source) == "ir_relevance: 4 pairs from logs"
    loss, accuracy = task_of().baseline(np.array([0, 2]), source)
    assert loss == pytest.approx(np.log([3, 3])) and accuracy == pytest.approx([1 / 3, 1 / 3])


def test_logs_without_a_class_have_another_baseline(tmp_path):
    tokenizer = tokenizer_of(*(text for _, pair in LOGS for text in pair))
    corpus = write_sentences(tmp_path / "c", LOGS, tokenizer, ["0", "1"], [0, 1, 1, 0])
    _, accuracy = task_of().baseline(np.array([0]), whole(corpus))
    assert accuracy.tolist() == [0.5]


# Mistakes --------------------------------------------------------------------------------------


def refused(source: CorpusSource | None = None, **values) -> str:
    with pytest.raises(UserError) as error:
        task = task_of(**values)
        assert source is not None
        task.check(source, 64)
        task.items(source, 64)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("tasks.ir_relevance")
    return str(error.value)


def test_mistakes_are_one_clear_line(corpus, tmp_path):
    assert "tasks.ir_relevance.shortest: expected a number above 0, got 0" in refused(shortest=0)
    assert ".repeat: expected a number above 0, got 0" in refused(repeat=0)
    tokenizer = tokenizer_of(*(text for _, pair in LOGS for text in pair))
    wrong = write_sentences(tmp_path / "wrong", LOGS, tokenizer, ["good", "1"], [0, 1, 1, 0])
    assert "(good)" in refused(whole(wrong))
    first = CorpusSource(corpus, np.array([0]))
    said = refused(first)
    assert "1 document of this split with " in said and "group: true" in said
    assert "0 groups with two such, but 2 are needed" in refused(first, group=True)
    bare = write_small_corpus(tmp_path / "bare", documents=5)
    said = refused(whole(bare))
    assert "neither labeled pairs" in said and "--annotation heading" in said


@pytest.mark.parametrize(
    ("ids", "remark"),
    [
        (["all/1", "all/2", "all/3", "all/4", "all/5", "b/1", "b/2"], "5 of these 7 documents"),
        (["a/1", "a/2", "b/1", "b/2"], ""),
    ],
)
def test_a_group_with_most_documents_is_named(tmp_path, ids, remark):
    text = ["# w1 w2", *(f"w{n} w3 w4 w5 w6" for n in range(7, 10))]
    tokenizer = tokenizer_of(" ".join(f"w{word}" for word in range(50)))
    corpus = write_sentences(tmp_path / "c", [(name, text) for name in ids], tokenizer)
    said = task_of(group=True).describe(whole(corpus))
    assert ("note: " in said) == bool(remark)
    assert f"{remark} are in one group, 'all'" in said or not remark
