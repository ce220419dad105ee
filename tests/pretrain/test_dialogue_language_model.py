"""Real and fake dialogues: by hand, and looked up turn by turn in the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.corpus.store import open_corpus
from palm_ds.corpus.writer import write_corpus
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.data.tasks.task import build
from palm_ds.pretrain.dialogue_language_model import DialogueLanguageModel, cut_longest
from palm_ds.text.tokenizer import wordpiece
from tests.helpers.small_corpus import SPECIALS

NAME = "dialogue_language_model"
WORDS = [f"w{i}" for i in range(200)]
Turn = tuple[int, list[int]]  # role, ids


def write_dialogues(folder: Path, dialogues: Sequence[Sequence[Turn]]) -> CorpusSource:
    rows = []
    for number, dialogue in enumerate(dialogues):
        ids = np.concatenate([turn for _, turn in dialogue])
        annotations = {name: np.ones(len(ids), np.uint8) for name in ("word",)}
        annotations["role"] = np.concatenate(
            [np.full(len(t), role, np.uint8) for role, t in dialogue]
        )
        annotations["sentence"] = np.concatenate(
            [np.arange(len(turn)) == 0 for _, turn in dialogue]
        )
        rows.append((f"d{number}", ids, {k: v.astype(np.uint8) for k, v in annotations.items()}))
    tokenizer = wordpiece([*SPECIALS, *WORDS], lower=True)
    write_corpus(folder, rows, tokenizer, annotations=("sentence", "word", "role"))
    return split_corpus(open_corpus(folder), 0.0, ("word", "role"))[0]


def random_dialogues(many: int) -> list[list[Turn]]:
    rng = np.random.default_rng(7)
    dialogues = []
    for _ in range(many):
        roles = [0, *rng.integers(0, 3, rng.integers(0, 9))]
        turns = [rng.integers(5, 205, rng.integers(1, 30)).tolist() for _ in roles]
        dialogues.append(list(zip(roles, turns, strict=True)))
    return dialogues


def dataset_of(
    source: CorpusSource, *others: str, max_length: int = 64, **values
) -> TaskGroupDataset:
    tasks = [build(NAME, {"source": "text", **values})]
    tasks += [build(kind, {"source": "text", "units": ["word"]}) for kind in others]
    name = " + ".join([NAME, *others])
    return TaskGroupDataset(
        name=name, tasks=tuple(tasks), task_id=0, source=source, seed=4, max_length=max_length
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> CorpusSource:
    return write_dialogues(tmp_path_factory.mktemp("c") / "corpus", random_dialogues(60))


def parts(example) -> list[tuple[int, list[int]]]:
    """(role, source positions) of each turn of an example, as separated by [SEP]."""
    found: list[tuple[int, list[int]]] = [(int(example.token_type_ids[1]), [])]
    for segment, origin in zip(
        example.token_type_ids[1:-1], example.source_offsets[1:-1], strict=True
    ):
        if origin >= 0:
            assert segment == found[-1][0] or not found[-1][1]
            found[-1] = (int(segment), [*found[-1][1], int(origin)])
        else:
            found.append((-1, []))
    return found


def test_by_hand(tmp_path):
    source = write_dialogues(
        tmp_path / "c", [[(0, [5, 6]), (1, [7]), (0, [8])], [(0, [9]), (1, [10])]]
    )
    dataset, tokenizer, found = dataset_of(source), source.corpus.tokenizer(), {}
    for n, layout in enumerate(dataset.layouts(np.arange(300))):
        example = dataset.example(n, layout)
        at, target = example.labels[NAME]
        assert at.tolist() == [0]
        text = (
            " ".join(tokenizer.tokens(example.input_ids))
            .replace("[CLS] ", "")
            .replace("[SEP]", "|")
        )
        found[text] = (target.tolist(), example.token_type_ids.tolist())
    first, second = [0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1]
    assert found == {
        "w0 w1 | w2 | w3 |": ([1], first),
        "w4 | w2 | w3 |": ([0], [0, 0, 0, 1, 1, 0, 0]),
        "w0 w1 | w5 | w3 |": ([0], first),
        "w0 w1 | w2 | w4 |": ([0], first),
        "w4 | w5 |": ([1], second),
        "w0 w1 | w5 |": ([0], [0, 0, 0, 0, 1, 1]),
        "w3 | w5 |": ([0], second),
        "w4 | w2 |": ([0], second),
    }


@pytest.mark.parametrize("turns", [2, 3, 5])
def test_labels_agree_with_the_dialogues(source, turns):
    """Independent of the task's arithmetic: every turn is looked up in the corpus."""
    dialogues = random_dialogues(60)
    where: dict[int, tuple[int, int]] = {}  # position -> dialogue, turn
    at = 0
    for d, dialogue in enumerate(dialogues):
        for t, (_, ids) in enumerate(dialogue):
            where |= dict.fromkeys(range(at, at + len(ids)), (d, t))
            at += len(ids)
    dataset, seen, exchanged = dataset_of(source, turns=turns), Counter(), Counter()
    for n, layout in enumerate(dataset.layouts(np.arange(800))):
        example = dataset.example(n, layout)
        found = [(role, {where[p] for p in places}) for role, places in parts(example)]
        assert all(len(turn) == 1 for _, turn in found)
        said = [(role, *turn.pop()) for role, turn in found]
        assert example.token_type_ids[0] == said[0][0]
        for role, d, t in said:
            assert role == min(dialogues[d][t][0], 1)
        counts = Counter(d for _, d, _ in said)
        own = counts.most_common(1)[0][0]
        strange = [k for k, (_, d, _) in enumerate(said) if d != own]
        if len(said) > 2:  # of two turns either may be the strange one
            kept = [(k, t) for k, (_, d, t) in enumerate(said) if d == own]
            assert len({t - k for k, t in kept}) == 1
            exchanged[len(said), tuple(strange)] += 1
        assert len(strange) <= 1
        target = int(example.labels[NAME][1][0])
        assert target == int(not strange)
        assert len(said) <= turns
        assert len(said) == turns or len(dialogues[own]) < turns or strange
        seen[target] += 1
    assert abs(seen[0] - seen[1]) < 3.3 * np.sqrt(800)  # chi-squared, 1 df, p = 0.001
    if turns > 2:
        each = [exchanged[turns, (k,)] for k in range(turns)]
        expected = sum(each) / turns
        assert sum((e - expected) ** 2 / expected for e in each) < 18.5  # 4 df, p = 0.001


def test_every_window_is_an_item(source):
    table = dataset_of(source).tasks[0].items(source, 64)
    counts = [len(dialogue) for dialogue in random_dialogues(60)]
    expected = sum(max(count - 2, 1) for count in counts if count >= 2)
    assert len(table) == expected
    assert len({tuple(row) for row in table.tolist()}) == expected


def test_long_turns_are_cut_longest_first(source):
    for max_length in (7, 12, 20, 64):
        dataset, full = dataset_of(source, max_length=max_length), 0
        for n, layout in enumerate(dataset.layouts(np.arange(150))):
            example = dataset.example(n, layout)
            assert len(example) == layout["length"] <= max_length
            said = [places for _, places in parts(example)]
            lengths = [len(places) for places in said]
            assert min(lengths) >= 1
            starts, ends = source.corpus.sentence_starts, []
            for places in said:
                assert places[0] in starts
                ends.append(places[-1] + 1 in starts)
            cut = [n for n, whole in zip(lengths, ends, strict=True) if not whole]
            if cut:
                assert len(example) == max_length
                assert min(cut) >= max(lengths) - 1
                full += 1
        assert full > 20 or max_length == 64


@given(
    rows=st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=1, max_size=8),
    most=st.integers(3, 60),
)
def test_cutting_equals_one_token_at_a_time(rows, most):
    expected = []
    for row in rows:
        row = list(row)
        while sum(row) > most:
            longest = max(row)
            row[max(k for k, n in enumerate(row) if n == longest)] -= 1
        expected.append(row)
    assert cut_longest(np.array(rows), np.full(len(rows), most)).tolist() == expected


def test_masked_words_come_from_the_blend(source):
    dataset = dataset_of(source, "knowledge_masking")
    strange = 0
    for n, layout in enumerate(dataset.layouts(np.arange(100))):
        example = dataset.example(n, layout)
        at, targets = example.labels["knowledge_masking"]
        assert targets.tolist() == source.corpus.take(example.source_offsets[at]).tolist()
        assert len(at) > 0
        strange += int(example.labels[NAME][1][0] == 0)
        again = dataset.example(n, layout)
        assert np.array_equal(again.input_ids, example.input_ids)
    assert 30 < strange < 70


def test_a_role_in_a_single_dialogue_gets_any_turn(tmp_path):
    source = write_dialogues(
        tmp_path / "c", [[(0, [5]), (1, [6]), (1, [7])], [(0, [8]), (0, [9])], [(0, [10])]]
    )
    dataset, replaced = dataset_of(source), set()
    for n, layout in enumerate(dataset.layouts(np.arange(200))):
        ids = dataset.example(n, layout).input_ids.tolist()
        if ids[1] == 5 and len(ids) == 7 and ids[3] != 6:
            replaced.add(ids[3])
    assert replaced == {8, 9, 10}


def test_too_few_dialogues_and_too_short_rows_are_refused(tmp_path, source):
    alone = write_dialogues(tmp_path / "c", [[(0, [5]), (1, [6])], [(0, [7])]])
    with pytest.raises(UserError, match="fewer than two dialogues"):
        dataset_of(alone).num_items  # noqa: B018
    with pytest.raises(UserError, match="turns: 4 turns need rows of 9 tokens"):
        dataset_of(source, turns=4, max_length=8).num_items  # noqa: B018


@pytest.mark.parametrize(("key", "value"), [("turns", 1), ("roles", 0)])
def test_wrong_settings_are_refused(key, value):
    with pytest.raises(UserError, match=f"tasks.{NAME}.{key}: expected .*, got {value}"):
        DialogueLanguageModel(name=NAME, source="text", **{key: value})
