"""Whether a token occurs elsewhere in its document: by hand, and compared with a slow
implementation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.common.rng import keyed_generator
from palm_ds.corpus.store import open_corpus
from palm_ds.corpus.writer import write_corpus
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import ExampleRef, TaskGroupDataset, extend_into_padding
from palm_ds.data.tasks.example import Example, build_input
from palm_ds.data.tasks.task import build
from palm_ds.pretrain.token_document_relation import TokenDocumentRelation
from palm_ds.text.tokenizer import wordpiece
from tests.helpers.small_corpus import SPECIALS, write_small_corpus

LENGTH = 96
MARKS = ("word", "phrase", "entity")
A, B, C, D, E, F = range(5, 11)


def make(**values) -> TokenDocumentRelation:
    return TokenDocumentRelation(name="relation", source="text", **values)


def write(folder: Path, documents: list[list[int]]) -> CorpusSource:
    tokenizer = wordpiece([*SPECIALS, *"abcdef"], lower=True)
    named = [(str(n), np.array(ids), {}) for n, ids in enumerate(documents)]
    write_corpus(folder, named, tokenizer, annotations=())
    return split_corpus(open_corpus(folder), 0.0, ())[0]


def labels_of(
    task: TokenDocumentRelation, source: CorpusSource, *places: tuple[int, int]
) -> Example:
    example = build_input([source.read(a, b) for a, b in places], source.vocabulary)
    task.label(example, source, keyed_generator(0, 0))
    return example


def test_labels_by_hand(tmp_path):
    source = write(tmp_path / "c", [[A, B, C, D, A, E], [B, F, F, B, C, D]])
    task = make(least=1, frequent=1.0)
    example = labels_of(task, source, (0, 3))  # a b c | d a e
    at, targets = example.labels["relation"]
    assert at.tolist() == [1, 2, 3]
    assert targets.tolist() == [1, 0, 0]
    # Two texts of one document are no answer to one another; each document answers for its own.
    example = labels_of(task, source, (3, 4), (8, 10), (0, 2))  # d | f b | a b
    at, targets = example.labels["relation"]
    assert at.tolist() == [1, 3, 4, 6, 7]
    assert targets.tolist() == [0, 1, 1, 1, 0]


def test_masked_tokens_are_labeled_by_their_original(tmp_path):
    source = write(tmp_path / "c", [[A, B, C, D, A, E]])
    example = build_input([source.read(0, 3)], source.vocabulary)
    example.input_ids[1:4] = source.vocabulary.mask, E, D
    make(least=1, frequent=1.0).label(example, source, keyed_generator(0, 0))
    assert example.labels["relation"][1].tolist() == [1, 0, 0]


def test_the_context_on_either_side_is_limited(tmp_path):
    source = write(tmp_path / "c", [[A, B, C, D, E, F, C, C, B, A]])
    for reach in range(1, 9):
        example = labels_of(make(least=1, reach=reach, frequent=1.0), source, (1, 3))  # b c
        # c is 4 tokens after the text's end, b 6; counted from the end of the text.
        assert example.labels["relation"][1].tolist() == [int(reach >= 6), int(reach >= 4)]


def test_a_document_with_little_other_text_has_no_labels(tmp_path):
    source = write(tmp_path / "c", [[A, B, A, B], [A, B, C, D, A, E]])
    task = make(least=3, frequent=1.0)
    example = labels_of(task, source, (0, 2), (4, 6))
    assert example.labels["relation"][0].tolist() == [4, 5]
    assert len(labels_of(task, source, (0, 4)).labels["relation"][0]) == 0


def test_stop_words_have_no_labels(tmp_path):
    source = write(tmp_path / "c", [[A] * 500 + [B, C] * 10 + [A] * 100])
    example = labels_of(make(frequent=0.5), source, (495, 505))
    assert example.unmasked_ids[example.labels["relation"][0]].tolist() == [B, C, B, C, B]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    folder = tmp_path_factory.mktemp("c") / "corpus"
    return split_corpus(write_small_corpus(folder, documents=60, words=400), 0.0, MARKS)[0]


def slow_answers(
    source: CorpusSource, example: Example, task: TokenDocumentRelation
) -> dict[int, int]:
    """{position: label} from the documents' tokens as lists, one token at a time."""
    used = {int(place) for place in example.source_offsets if place >= 0}
    answers: dict[int, int] = {}
    others: dict[range, list[int]] = {}
    unigrams = source.unigrams
    for position, place in enumerate(map(int, example.source_offsets)):
        if place < 0:
            continue
        (document,) = [
            range(int(a), int(b))
            for a, b in zip(source.starts, source.ends, strict=True)
            if a <= place < b
        ]
        if document not in others:
            mine = sorted(used & set(document))
            others[document] = [p for p in document if p not in used and _near(p, mine, task.reach)]
        elsewhere = others[document]
        if len(elsewhere) < task.least:
            continue
        ids = source.corpus.take(np.array([place, *elsewhere])).tolist()
        if unigrams[ids[0]] <= task.frequent:
            answers[position] = int(ids[0] in ids[1:])
    return answers


def _near(place: int, texts: list[int], reach: int) -> bool:
    return any(abs(place - other) <= reach for other in texts)


BLENDS = [
    "token_document_relation",
    "sentence_reordering + token_document_relation",
    "sentence_distance + knowledge_masking + token_document_relation",
]


@pytest.mark.parametrize("task_group", BLENDS)
@pytest.mark.parametrize("values", [{}, {"reach": 40, "least": 30, "frequent": 0.004}])
def test_labels_equal_a_slow_implementation(source, task_group, values):
    values = {"frequent": 1.0, "least": 20, **values}
    tasks = [
        build(kind, {"source": "text", **(values if kind == BLENDS[0] else {})})
        for kind in task_group.split(" + ")
    ]
    (task,) = (each for each in tasks if isinstance(each, TokenDocumentRelation))
    dataset = TaskGroupDataset(
        name=task_group, tasks=tuple(tasks), task_id=0, source=source, seed=3, max_length=LENGTH
    )
    seen = np.zeros(2, int)
    for n, layout in enumerate(dataset.layouts(np.arange(60))):
        ((_, _, layout),) = extend_into_padding([ExampleRef(0, n, layout)], LENGTH)
        example = dataset.example(n, layout)
        at, targets = example.labels[task.name]
        assert dict(zip(at.tolist(), targets.tolist(), strict=True)) == slow_answers(
            source, example, task
        )
        assert (
            len(at) or task_group != BLENDS[0] or values["frequent"] < 1
        )  # its own texts are asked
        seen += np.bincount(targets, minlength=2)
    assert seen.min() > 20


def test_the_baseline_is_the_frequency_of_the_labels(source):
    task = make(frequent=1.0, least=20)
    counts = np.zeros(2)
    for start, end, _ in task.items(source, 256):
        counts += np.bincount(labels_of(task, source, (start, end)).labels["relation"][1])
    loss, accuracy = task.baseline(np.array([0, 1]), source)
    assert np.exp(-loss) == pytest.approx(counts / counts.sum(), abs=0.01)
    assert accuracy.tolist() == [float(counts[0] > counts[1]), float(counts[1] > counts[0])]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reach": 100}, "least 128 and reach 100"),
        ({"least": 0}, "least 0"),
        ({"frequent": 0.0}, "tasks.relation.frequent: expected a number above 0, got 0.0"),
        ({"frequnt": 0.1}, 'did you mean "frequent"'),
    ],
)
def test_wrong_settings_are_one_clear_line(values, message):
    with pytest.raises(UserError, match=message) as error:
        build("relation", {"kind": "token_document_relation", "source": "text", **values})
    assert str(error.value).startswith("tasks.relation")
