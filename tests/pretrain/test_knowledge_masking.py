"""Hand-written units, the published rates, and an independent slow re-implementation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_ds import keyed
from palm_ds.errors import UserError
from palm_ds.example import Example, Piece, Vocabulary, arrange
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking, choose, units_of

VOCABULARY = Vocabulary(size=1005, pad=0, unk=1, cls=2, sep=3, mask=4, regular=np.arange(5, 1005))


class Texts:
    """All that a label needs of a source."""

    vocabulary = VOCABULARY


def example(*pieces: dict[str, list[int]]) -> Example:
    built, at = [], 0
    for marks in pieces:
        size = len(marks["word"])
        ids = np.arange(100 + at, 100 + at + size)
        arrays = {name: np.array(values, np.uint8) for name, values in marks.items()}
        built.append(Piece(at, ids, arrays))
        at += size
    return arrange(built, VOCABULARY)


HARRY = {  # harry potter is a series of fan ##tasy novels
    "word": [1, 1, 1, 1, 1, 1, 1, 0, 1],
    "phrase": [0, 0, 0, 1, 2, 2, 0, 0, 0],
    "entity": [1, 2, 0, 0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize(
    ("marks", "units"),
    [
        (("word", "phrase", "entity"), [-1, 0, 0, 1, 2, 2, 2, 3, 3, 4, -1]),
        (("word", "entity"), [-1, 0, 0, 1, 2, 3, 4, 5, 5, 6, -1]),
        (("word",), [-1, 0, 1, 2, 3, 4, 5, 6, 6, 7, -1]),
        ((), [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, -1]),
        (("phrase",), [-1, 0, 1, 2, 3, 3, 3, 4, 5, 6, -1]),
    ],
)
def test_units_by_hand(marks, units):
    assert units_of(example(HARRY), marks).tolist() == units


def test_a_unit_never_crosses_a_separator():
    first = {"word": [1, 0], "phrase": [0, 1], "entity": [0, 0]}
    second = {"word": [0, 1], "phrase": [2, 0], "entity": [0, 0]}  # cut in the middle of a phrase
    units = units_of(example(first, second), ("word", "phrase", "entity"))
    assert units.tolist() == [-1, 0, 1, -1, 2, 3, -1]


def test_a_phrase_that_overlaps_an_entity_gives_way_whole():
    marks = {"word": [1] * 5, "phrase": [0, 1, 2, 2, 0], "entity": [1, 2, 0, 0, 0]}
    units = units_of(example(marks), ("word", "phrase", "entity"))
    assert units.tolist() == [-1, 0, 0, 1, 2, 3, -1]


def slow_units(word, phrase, entity, specials) -> list[int]:
    """Token by token: the largest unit first, then words, each broken at special tokens."""
    owner: list[object] = [None] * len(word)
    for kind, mark in (("e", entity), ("p", phrase)):
        start = 0
        while start < len(word):
            if mark[start] == 1:
                end = start + 1
                while end < len(word) and mark[end] == 2:
                    end += 1
                if all(owner[i] is None and not specials[i] for i in range(start, end)):
                    for i in range(start, end):
                        owner[i] = (kind, start)
                start = end
            else:
                start += 1
    for i in range(len(word)):
        if specials[i] or owner[i] is not None:
            continue
        goes_on = (
            word[i] == 0
            and i > 0
            and not specials[i - 1]
            and isinstance(owner[i - 1], tuple)
            and owner[i - 1][0] == "w"
        )
        owner[i] = owner[i - 1] if goes_on else ("w", i)
    numbers: dict[object, int] = {}
    return [
        -1 if specials[i] else numbers.setdefault(owner[i], len(numbers)) for i in range(len(word))
    ]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2)), min_size=1))
def test_units_equal_the_slow_way(rows):
    word, phrase, entity = (np.array(column, np.uint8) for column in zip(*rows, strict=True))
    text = example({"word": word, "phrase": phrase, "entity": entity})
    specials = text.origin < 0
    padded = [np.array([0, *column, 0]) for column in (word, phrase, entity)]
    expected = slow_units(*padded, specials)
    assert units_of(text, ("word", "phrase", "entity")).tolist() == expected


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=60),
    rate=st.floats(0.05, 0.9),
    seed=st.integers(0, 1000),
)
def test_whole_units_are_chosen_and_at_least_one(sizes, rate, seed):
    unit = np.concatenate([[-1], np.repeat(np.arange(len(sizes)), sizes), [-1]])
    chosen = choose(unit, rate, keyed.generator(seed, 0))
    assert not chosen[unit < 0].any()
    assert chosen.any()
    for number in range(len(sizes)):
        assert chosen[unit == number].all() or not chosen[unit == number].any()
    assert chosen.sum() <= max(rate * sum(sizes) + max(sizes), max(sizes))


def test_the_expected_share_is_the_rate_exactly():
    unit = np.repeat(np.arange(40), np.tile([1, 2, 3, 4], 10))
    shares = [choose(unit, 0.15, keyed.generator(1, n)).mean() for n in range(4000)]
    error = np.std(shares) / np.sqrt(len(shares))
    assert abs(np.mean(shares) - 0.15) < 4 * error + 1e-4


def masked(task: KnowledgeMasking, times: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(targets, what was shown, unit) of many labels of one long text."""
    marks = {"word": np.resize([1, 0, 1], 300), "phrase": np.resize([0, 1, 2, 2, 0, 0], 300)}
    marks["entity"] = np.zeros(300)
    targets, shown, units = [], [], []
    for n in range(times):
        text = example(marks)
        before = text.ids.copy()
        unit = units_of(text, task.marks())
        task.label(text, Texts(), keyed.generator(5, n))
        at, labels = text.labels[task.name]
        assert np.array_equal(before[at], labels)
        assert (text.origin[at] >= 0).all()
        untouched = np.ones(len(before), bool)
        untouched[at] = False
        assert np.array_equal(text.ids[untouched], before[untouched])
        targets.append(labels)
        shown.append(text.ids[at])
        units.append(unit[at] + 1000 * n)
    return np.concatenate(targets), np.concatenate(shown), np.concatenate(units)


def make(**values) -> KnowledgeMasking:
    return KnowledgeMasking(name="knowledge_masking", source="text", **values)


@pytest.mark.parametrize("corrupt", ["token", "unit"])
def test_eighty_ten_ten(corrupt):
    targets, shown, _ = masked(make(corrupt=corrupt))
    is_mask, is_same = shown == VOCABULARY.mask, shown == targets
    assert is_mask.mean() == pytest.approx(0.8, abs=0.015)
    assert is_same.mean() == pytest.approx(0.1, abs=0.015)
    random = shown[~is_mask & ~is_same]
    assert np.isin(random, VOCABULARY.regular).all()
    assert len(np.unique(random)) > 400  # over the whole vocabulary, not a corner of it


def test_per_unit_corruption_is_one_for_the_unit():
    _, shown, units = masked(make(corrupt="unit"))
    is_mask = shown == VOCABULARY.mask
    for unit in np.unique(units)[:200]:
        mine = is_mask[units == unit]
        assert mine.all() or not mine.any()
    _, shown, units = masked(make(corrupt="token"))
    is_mask = shown == VOCABULARY.mask
    mixed = [len(set(is_mask[units == unit])) == 2 for unit in np.unique(units)[:500]]
    assert any(mixed)


def test_the_shortest_text_has_a_prediction():
    text = example({"word": [1], "phrase": [0], "entity": [0]})
    make(rate=0.01).label(text, Texts(), keyed.generator(1, 1))
    assert text.labels["knowledge_masking"][1].tolist() == [100]


@pytest.mark.parametrize(
    "values", [{"rate": 0.0}, {"rate": 1.0}, {"units": ()}, {"mask_rate": 0.95, "random_rate": 0.1}]
)
def test_wrong_settings_are_refused(values):
    with pytest.raises(UserError, match="tasks.knowledge_masking"):
        make(**values)
