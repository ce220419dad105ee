"""Fragments of passages as targets: every token looked up in the corpus."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.data.tasks.example import lengthened
from palm_ds.data.tasks.task import build
from palm_ds.pretrain.span_generation import SpanGeneration, draw_fragments
from tests.helpers.small_corpus import write_small_corpus

CLS, SEP, MASK = 2, 3, 4
UNITS = ("word", "phrase", "entity")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CorpusSource:
    corpus = write_small_corpus(tmp_path_factory.mktemp("corpus") / "c", documents=12)
    return split_corpus(corpus, 0.0, UNITS)[0]


def dataset_of(source: CorpusSource, *others: str, max_length: int = 96, **values):  # noqa: ANN201
    tasks = [build("write", {"kind": "span_generation", "source": "text", **values})]
    tasks += [build(kind, {"source": "text"}) for kind in others]
    name = " + ".join(task.name for task in tasks)
    return TaskGroupDataset(
        name, tuple(tasks), task_id=0, source=source, seed=3, max_length=max_length
    )


@given(
    tokens=st.integers(2, 200),
    share=st.floats(0.01, 0.9),
    shortest=st.integers(1, 9),
    more=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_fragments_hold_exactly_the_budget(
    tokens: int, share: float, shortest: int, more: int, seed: int
) -> None:
    budget = max(1, int(tokens * share))
    rng = np.random.default_rng(seed)
    found = draw_fragments(tokens, budget, shortest, shortest + more, rng)
    assert found.shape == (tokens,) and (found >= 0).sum() == budget
    sizes = np.bincount(found[found >= 0])
    assert sizes.max() <= shortest + more and (sizes < shortest).sum() <= 1
    for number in range(len(sizes)):  # each is in one piece, in order
        places = np.flatnonzero(found == number)
        assert (np.diff(places) == 1).all()
    assert (np.diff(found[found >= 0]) >= 0).all()


def test_fragments_are_anywhere_and_of_every_length() -> None:
    rng = np.random.default_rng(0)
    taken, sizes = np.zeros(60), []
    for _ in range(2000):
        found = draw_fragments(60, 15, 1, 4, rng)
        taken += found >= 0
        sizes += np.bincount(found[found >= 0]).tolist()
    np.testing.assert_allclose(taken[3:-3] / 2000, 0.25, atol=0.05)
    assert taken[[0, -1]].min() / 2000 > 0.1
    shares = np.bincount(sizes)[1:] / len(sizes)
    assert shares.min() > 0.18 and shares.max() < 0.32  # the last one may be cut short


def test_source_and_target_are_the_passage(source: CorpusSource) -> None:
    """In order, with the spans of the corpus; rows are as long as their layouts say."""
    dataset = dataset_of(source, noise_rate=0.0)
    task = dataset.tasks[0]
    assert isinstance(task, SpanGeneration)
    numbers = np.arange(min(40, dataset.num_items))
    layouts = dataset.layouts(numbers)
    for n, layout in zip(numbers.tolist(), layouts, strict=True):
        example, target = dataset.example(n, layout), int(layout["target"])
        where, labels = example.labels["write"]
        many = target + 1
        assert len(where) == 2 * many and (example.input_ids[where] == MASK).all()
        size = len(example) - 3 * target - 4
        ids, offsets = example.input_ids, example.source_offsets
        assert ids[0] == ids[size] == CLS and ids[size - 1] == ids[size + many] == SEP
        assert (offsets[size:] == -1).all()
        start, end = int(layout["end"]) - (size - 2) - target, int(layout["end"])
        left_out = np.setdiff1d(np.arange(start, end), offsets[1 : size - 1])
        assert len(left_out) == target
        assert (
            source.read(start, end).ids[offsets[1 : size - 1] - start] == ids[1 : size - 1]
        ).all()
        written = source.read(start, end).ids[left_out - start]
        assert ids[size + 1 : size + many].tolist() == written.tolist()
        assert labels.tolist() == [[t, f] for f in (0, 1) for t in (*written.tolist(), SEP)]
        check_spans(example, source, left_out, many)


def check_spans(example, source: CorpusSource, tokens: np.ndarray, many: int) -> None:  # noqa: ANN001
    """A query of the span flow sees as many targets as there are before the phrase, entity or word
    that its own is in, of its fragment."""
    assert example.visibility is not None
    word, span = example.visibility.limit[-2 * many : -many], example.visibility.limit[-many:]
    assert word.tolist() == list(range(1, many + 1))
    assert span[-1] == many and (span <= word).all() and span[0] == 1
    for k in range(1, len(tokens)):
        begins = span[k] == word[k]
        if tokens[k] != tokens[k - 1] + 1:
            assert begins, "a new fragment"
            continue
        now = source.read(tokens[k], tokens[k] + 1).annotations
        if not begins:  # the rest of a unit
            assert now["phrase"][0] == 2 or now["entity"][0] == 2 or now["word"][0] == 0
            assert span[k] == span[k - 1]


def test_both_granularities_are_drawn(source: CorpusSource) -> None:
    long = []
    for chosen in ((1.0, 0.0), (0.0, 1.0), (0.4, 0.6)):
        dataset = dataset_of(source, chosen=list(chosen), units=["token"], max_length=128)
        layouts = dataset.layouts(np.arange(60))
        runs = []
        for n, layout in enumerate(layouts):
            example = dataset.example(n, layout)
            inside = np.diff(example.source_offsets[1 : len(example) - 3 * layout["target"] - 5])
            runs.append(inside.max())
        long.append(np.mean(np.array(runs) > 6))
    assert long[0] < 0.3 and long[1] > 0.7 and long[0] < long[2] < long[1]


def test_an_example_grows_into_its_row(source: CorpusSource) -> None:
    dataset = dataset_of(source, max_length=96)
    layouts = dataset.layouts(np.arange(dataset.num_items))
    n = int(np.flatnonzero(layouts["spare"] > 4)[0])
    longer = lengthened(layouts[n], 4)
    example = dataset.example(n, longer)
    assert len(example) == longer["length"]
    assert example.labels["write"][0].size == 2 * (longer["target"] + 1)
    assert (layouts["length"] + layouts["spare"] <= 96).all()


def test_an_example_follows_from_its_number(source: CorpusSource) -> None:
    one, other = dataset_of(source), dataset_of(source)
    layouts = one.layouts(np.arange(5))
    other.example(4, layouts[4])
    for n in range(5):
        first, again = one.example(n, layouts[n]), other.example(n, layouts[n])
        assert first.input_ids.tolist() == again.input_ids.tolist()
        assert first.labels["write"][1].tolist() == again.labels["write"][1].tolist()


def test_masks_of_another_task_are_in_the_source(source: CorpusSource) -> None:
    dataset = dataset_of(source, "knowledge_masking")
    layout = dataset.layouts(np.arange(1))[0]
    example = dataset.example(0, layout)
    where, _ = example.labels["knowledge_masking"]
    assert len(where) and where.max() < len(example) - 3 * layout["target"] - 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 1.0}, "tasks.write.rate: expected a number below 1, got 1.0"),
        ({"shortest": [1]}, "give shortest, longest and chosen for each distribution"),
        ({"shortest": [5, 4]}, "no fragment has 5 to 4 tokens"),
        ({"chosen": [0.5, 0.6]}, "are not probabilities"),
        ({"noise": "token"}, r"has no \[NOISE\]"),
    ],
)
def test_bad_settings(source: CorpusSource, values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task = dataset_of(source, **values).tasks[0]
        assert isinstance(task, SpanGeneration)
        task.check(source, 64)


def test_rows_too_short(source: CorpusSource) -> None:
    task = dataset_of(source).tasks[0]
    assert isinstance(task, SpanGeneration)
    with pytest.raises(UserError, match="rows of 16 tokens have no room"):
        task.check(source, 16)
