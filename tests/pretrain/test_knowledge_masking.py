"""Hand-written units, the published rates, and an independent slow implementation."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.common.rng import keyed_generator
from palm_ds.data.tasks.example import Example, build_input
from palm_ds.data.tasks.masking import choose_units, units_of
from palm_ds.pretrain.knowledge_masking import KnowledgeMasking
from palm_ds.pretrain.shared.unit_masking import choose_each
from palm_ds.text.tokens import SpecialTokens, TokenSpan

VOCABULARY = SpecialTokens(
    size=1005, pad=0, unk=1, cls=2, sep=3, mask=4, regular=np.arange(5, 1005)
)


class Texts:
    """All that `label` needs of a source."""

    vocabulary = VOCABULARY


def example(*pieces: dict[str, list[int]]) -> Example:
    built, at = [], 0
    for piece in pieces:
        size = len(piece["word"])
        ids = np.arange(100 + at, 100 + at + size)
        arrays = {name: np.array(values, np.uint8) for name, values in piece.items()}
        built.append(TokenSpan(at, ids, arrays))
        at += size
    return build_input(built, VOCABULARY)


HARRY = {  # harry potter is a series of fan ##tasy novels
    "word": [1, 1, 1, 1, 1, 1, 1, 0, 1],
    "phrase": [0, 0, 0, 1, 2, 2, 0, 0, 0],
    "entity": [1, 2, 0, 0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize(
    ("annotations", "units"),
    [
        (("word", "phrase", "entity"), [-1, 0, 0, 1, 2, 2, 2, 3, 3, 4, -1]),
        (("word", "entity"), [-1, 0, 0, 1, 2, 3, 4, 5, 5, 6, -1]),
        (("word",), [-1, 0, 1, 2, 3, 4, 5, 6, 6, 7, -1]),
        ((), [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, -1]),
        (("phrase",), [-1, 0, 1, 2, 3, 3, 3, 4, 5, 6, -1]),
    ],
)
def test_units_by_hand(annotations, units):
    assert units_of(example(HARRY), annotations).tolist() == units


def test_a_unit_never_crosses_a_separator():
    first = {"word": [1, 0], "phrase": [0, 1], "entity": [0, 0]}
    second = {"word": [0, 1], "phrase": [2, 0], "entity": [0, 0]}  # cut in the middle of a phrase
    units = units_of(example(first, second), ("word", "phrase", "entity"))
    assert units.tolist() == [-1, 0, 1, -1, 2, 3, -1]


def test_a_phrase_that_overlaps_an_entity_is_dropped():
    annotations = {"word": [1] * 5, "phrase": [0, 1, 2, 2, 0], "entity": [1, 2, 0, 0, 0]}
    units = units_of(example(annotations), ("word", "phrase", "entity"))
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
def test_units_equal_a_slow_implementation(rows):
    word, phrase, entity = (np.array(column, np.uint8) for column in zip(*rows, strict=True))
    text = example({"word": word, "phrase": phrase, "entity": entity})
    specials = text.source_offsets < 0
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
    chosen = choose_units(unit, rate, keyed_generator(seed, 0))
    assert not chosen[unit < 0].any()
    assert chosen.any()
    for number in range(len(sizes)):
        assert chosen[unit == number].all() or not chosen[unit == number].any()
    assert chosen.sum() <= max(rate * sum(sizes) + max(sizes), max(sizes))


def test_the_expected_share_is_the_rate_exactly():
    unit = np.repeat(np.arange(40), np.tile([1, 2, 3, 4], 10))
    shares = [choose_units(unit, 0.15, keyed_generator(1, n)).mean() for n in range(4000)]
    error = np.std(shares) / np.sqrt(len(shares))
    assert abs(np.mean(shares) - 0.15) < 4 * error + 1e-4


def masked(task: KnowledgeMasking, times: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(targets, visible token, unit) of many labels of one long text."""
    annotations = {"word": np.resize([1, 0, 1], 300), "phrase": np.resize([0, 1, 2, 2, 0, 0], 300)}
    annotations["entity"] = np.zeros(300)
    targets, shown, units = [], [], []
    for n in range(times):
        text = example(annotations)
        before = text.input_ids.copy()
        unit = units_of(text, task.annotations())
        task.label(text, Texts(), keyed_generator(5, n))
        at, labels = text.labels[task.name]
        assert np.array_equal(before[at], labels)
        assert (text.source_offsets[at] >= 0).all()
        untouched = np.ones(len(before), bool)
        untouched[at] = False
        assert np.array_equal(text.input_ids[untouched], before[untouched])
        targets.append(labels)
        shown.append(text.input_ids[at])
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


def test_per_unit_corruption_treats_a_unit_alike():
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
    make(rate=0.01).label(text, Texts(), keyed_generator(1, 1))
    assert text.labels["knowledge_masking"][1].tolist() == [100]


@pytest.mark.parametrize(
    "values",
    [
        {"rate": 0.0},
        {"rate": 1.0},
        {"units": ()},
        {"mask_rate": 0.95, "random_rate": 0.1},
        {"whole": -0.1},
        {"whole": 1.1},
    ],
)
def test_wrong_settings_are_refused(values):
    with pytest.raises(UserError, match="tasks.knowledge_masking"):
        make(**values)


@pytest.mark.parametrize(
    ("units", "together"),
    [
        (["word"], "harry|potter|is|a|series|of|fan ##tasy|novels"),
        (["word", "phrase"], "harry|potter|is|a series of|fan ##tasy|novels"),
        (["word", "phrase", "entity"], "harry potter|is|a series of|fan ##tasy|novels"),
    ],
)
def test_the_stages_mask_the_published_units(units, together):
    """ERNIE 1.0, figure 2: basic, phrase, entity. Everything masked is one of these units,
    completely."""
    groups, position = [], 1
    for words in together.split("|"):
        groups.append(range(position, position := position + len(words.split())))
    apart = set()
    for n in range(300):
        text = example(HARRY)
        make(units=units).label(text, Texts(), keyed_generator(8, n))
        hidden = set(text.labels["knowledge_masking"][0].tolist())
        whole = [hidden >= set(group) for group in groups]
        assert hidden == {
            i for group, all_ in zip(groups, whole, strict=True) if all_ for i in group
        }
        apart |= {k for k in range(len(groups) - 1) if whole[k] != whole[k + 1]}
    assert len(apart) == len(groups) - 1  # neighbors are hidden without one another


# ERNIE 1.0's rule -------------------------------------------------------------------------------

PUBLISHED = {"units": ("word",), "chosen": "each"}
Line = tuple[
    list[int], list[int]
]  # ids and seg_labels: 0 starts a word, 1 continues it, -1 special


def published(line: Line, whole: bool, rng: np.random.Generator) -> list[tuple[int, str]]:
    """(position, replacement) of every predicted token: ERNIE's batching.py, token by token."""
    done, rate = [], 0.15

    def act(u: float, scale: float) -> str:
        return "mask" if u > 0.2 * scale else "random" if u > 0.1 * scale else "keep"

    _, labels = line
    position = 0
    while position < len(labels):
        if labels[position] == -1:
            position += 1
            continue
        end = position + 1
        while whole and end < len(labels) and labels[end] == 1:
            end += 1
        u = rng.random()
        if u <= rate:
            done.append((position, act(u, rate)))
            done += [(other, act(rng.random(), 1.0)) for other in range(position + 1, end)]
        position = end
    return done


def ours(line: Line, task: KnowledgeMasking, share: int, n: int) -> list[tuple[int, str]]:
    """The same from the task. `share`: the annotation mask_word, in percent."""
    ids, labels = (np.array(values) for values in line)
    cuts = [*np.flatnonzero(labels == -1).tolist(), len(labels)]
    pieces = []
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        if end - begin > 1:
            inside = slice(begin + 1, end)
            annotations = {
                "word": (labels[inside] == 0).astype(np.uint8),
                "mask_word": np.full(end - begin - 1, share, np.uint8),
            }
            pieces.append(TokenSpan(begin, ids[inside], annotations))
    text = build_input(pieces, VOCABULARY)
    assert len(text) == len(ids)
    task.label(text, Texts(), keyed_generator(21, n))
    at, targets = text.labels[task.name]
    assert targets.tolist() == ids[at].tolist()
    shown = np.where(text.input_ids[at] == VOCABULARY.mask, "mask", "random")
    shown[text.input_ids[at] == targets] = "keep"
    return list(zip(at.tolist(), shown.tolist(), strict=True))


def statistics(lines: list[Line], mask: Callable[[int], list[tuple[int, str]]]) -> dict:
    """Of every line: shares of its tokens that are predicted, masked, made random, kept; whether
    it has none; of its words of several tokens how many are predicted whole, and in part."""
    rows = []
    for n, (_, labels) in enumerate(lines):
        done = dict(mask(n))
        tokens = sum(label >= 0 for label in labels)
        row = {"predicted": len(done) / tokens, "none": not done}
        row |= {k: sum(v == k for v in done.values()) / tokens for k in ("mask", "random", "keep")}
        words = word_ranges(labels)
        hit = [sum(position in done for position in word) / len(word) for word in words]
        row["whole"] = sum(share == 1 for share in hit) / max(len(words), 1)
        row["part"] = sum(0 < share < 1 for share in hit) / max(len(words), 1)
        row["spread"] = (row["predicted"] - 0.15) ** 2
        rows.append(row)
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def word_ranges(labels: Iterable[int]) -> list[list[int]]:
    """The positions of each word of two tokens or more."""
    words: list[list[int]] = []
    for position, label in enumerate(labels):
        if label == 0:
            words.append([position])
        elif label == 1:
            words[-1].append(position)
    return [word for word in words if len(word) > 1]


def assert_same_rule(lines: list[Line], share: int) -> None:
    """The task and the published rule agree in every statistic up to chance, and mask whole
    words as expected."""
    task, rng = make(**PUBLISHED, whole="mask_word"), np.random.default_rng(6)
    mine = statistics(lines, lambda n: ours(lines[n], task, share, n))
    theirs = statistics(lines, lambda n: published(lines[n], rng.random() * 100 < share, rng))
    for name, values in mine.items():
        error = np.sqrt((values.var() + theirs[name].var()) / len(lines))
        assert abs(values.mean() - theirs[name].mean()) <= 4.0 * error, name
    assert mine["predicted"].mean() == pytest.approx(0.15, rel=0.03)
    assert mine["mask"].mean() / mine["predicted"].mean() == pytest.approx(0.8, abs=0.01)
    assert (mine["part"].sum() == 0) == (share == 100)


def random_lines(many: int) -> list[Line]:
    rng = np.random.default_rng(12)
    lines = []
    for _ in range(many):
        labels = [-1]
        for words in rng.integers(3, 30, 2):
            for size in rng.choice([1, 1, 2, 3, 4], words):
                labels += [0] + [1] * (int(size) - 1)
            labels.append(-1)
        lines.append((rng.integers(5, 1005, len(labels)).tolist(), labels))
    return lines


@pytest.mark.parametrize("share", [0, 30, 100])
def test_masks_follow_the_published_rule(share):
    assert_same_rule(random_lines(1500), share)


@pytest.mark.parametrize("share", [0, 100])
def test_masks_of_ernie_lines_follow_the_published_rule(shared: Path, share):
    lines = []
    with gzip.open(shared / "data/ernie/demo_train_set.gz", "rt") as file:
        for text in file:
            ids, _, _, labels, _ = text.split(";")
            # Ids may be any here, but ours has [CLS], [SEP] and [MASK] elsewhere.
            lines.append(([int(i) % 1000 + 5 for i in ids.split()], list(map(int, labels.split()))))
            if len(lines) == 4000:
                break
    assert_same_rule(lines, share)


@pytest.mark.parametrize("whole", [0.0, 0.4, 1.0])
def test_the_share_of_texts_masked_by_words(whole):
    task, by_words = make(**PUBLISHED, whole=whole), []
    labels = [-1] + [0, 1, 1, 1] * 100 + [-1]
    line = (np.arange(100, 100 + len(labels)).tolist(), labels)
    for n in range(500):
        done = {position for position, _ in ours(line, task, 0, n)}
        hit = [sum(position in done for position in word) for word in word_ranges(labels)]
        by_words.append(set(hit) <= {0, 4})
    assert np.mean(by_words) == pytest.approx(whole, abs=0.08 if 0 < whole < 1 else 0)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=60), seed=st.integers(0, 1000))
def test_each_unit_is_chosen_by_its_first_draw(sizes, seed):
    unit = np.concatenate([[-1], np.repeat(np.arange(len(sizes)), sizes), [-1]])
    chosen = choose_each(unit, 0.3, keyed_generator(seed, 0))
    draws = keyed_generator(seed, 0).random(len(unit))
    assert not chosen[unit < 0].any()
    for number in range(len(sizes)):
        mine = np.flatnonzero(unit == number)
        assert set(chosen[mine].tolist()) == {bool(draws[mine[0]] < 0.3)}


def test_the_whole_word_share_is_read_from_the_annotation():
    assert make(**PUBLISHED, whole="mask_word").annotations() == ("word", "mask_word")
    assert make(units=("token",), whole=0.5).annotations() == ()


def test_two_masking_tasks_of_a_group_both_ask_for_the_original_tokens():
    both = example(HARRY)
    for name in ("first", "second"):
        task = KnowledgeMasking(name=name, source="", rate=0.9, units=("word",))
        task.label(both, Texts(), keyed_generator(0, 0))  # type: ignore[arg-type]
    for where, targets in both.labels.values():
        assert targets.tolist() == both.unmasked_ids[where].tolist()
