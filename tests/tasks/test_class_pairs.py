"""Pairs of labeled texts: which there are, what an epoch reads, and what is refused; and the head
on their vectors."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.tasks.class_pairs import ClassPairs
from palm_ds.tasks.classification import Classification
from tests.helpers.hf_names import from_names
from tests.helpers.text_tables import (
    bert_config,
    built_of,
    dataset_of,
    make_task,
    model_of,
    padded,
    predictions,
    source_of,
)

CLASSES = "bacabcaabd"
ROWS = [
    {"text_a": " ".join("abcdefghij"[: n + 1]), "label": name} for n, name in enumerate(CLASSES)
]
PAIRS = list(combinations(range(len(ROWS)), 2))
SAME = [pair for pair in PAIRS if CLASSES[pair[0]] == CLASSES[pair[1]]]
OTHER = [pair for pair in PAIRS if pair not in SAME]

task_of = partial(make_task, ClassPairs, "pairs")


@pytest.fixture
def source(tmp_path: Path) -> TableSource:
    return source_of(tmp_path, ROWS)


def epoch_of(source: TableSource, sampling: str, epoch: int = 0) -> list[tuple[int, int]]:
    """The pairs of an epoch, rows in ascending order."""
    dataset = dataset_of(source, task_of(sampling=sampling), fixed=False)
    n = epoch * dataset.num_items + np.arange(dataset.num_items)
    return [(min(pair), max(pair)) for pair in dataset.layouts(n)["pair"].tolist()]


def test_every_pair_once(source: TableSource) -> None:
    assert sorted(epoch_of(source, "unique")) == PAIRS


def test_as_many_pairs_of_one_class_as_of_two(source: TableSource) -> None:
    more = Counter(epoch_of(source, "oversampling"))
    assert [more[pair] for pair in OTHER] == [1] * len(OTHER)
    times = [more[pair] for pair in SAME]
    assert sum(times) == len(OTHER) and max(times) - min(times) <= 1
    fewer = [Counter(epoch_of(source, "undersampling", epoch)) for epoch in range(30)]
    assert all(sum(x.values()) == 2 * len(SAME) and set(x.values()) == {1} for x in fewer)
    assert all(set(SAME) <= x.keys() for x in fewer)
    assert set().union(*fewer) == set(PAIRS)  # other epochs draw others


def test_each_row_with_one_text_of_its_class_and_one_of_another(source: TableSource) -> None:
    dataset = dataset_of(source, task_of(), fixed=False)
    assert dataset.num_items == 2 * len(ROWS) - 1  # the only row of d has no other of its class
    pairs = dataset.layouts(np.arange(200 * dataset.num_items))["pair"]
    assert (pairs[:, 0] != pairs[:, 1]).all()
    times = Counter(map(tuple, pairs.tolist()))
    assert set(times) == {(a, b) for pair in PAIRS for a, b in (pair, pair[::-1])}
    for row in range(len(ROWS) - 1):
        own = [times[row, x] for x in range(len(ROWS)) if x != row and CLASSES[x] == CLASSES[row]]
        other = [times[row, x] for x in range(len(ROWS)) if CLASSES[x] != CLASSES[row]]
        for drawn in (own, other):
            assert sum(drawn) == 200 and min(drawn) > 100 / len(drawn)
    again = dataset_of(source, task_of(), fixed=False).layouts(np.arange(50, 60))
    assert (again["pair"] == pairs[50:60]).all()  # of n alone


@pytest.mark.parametrize("fixed", [True, False])
def test_targets_and_texts(source: TableSource, fixed: bool) -> None:
    dataset = dataset_of(source, task_of(max_length=8), fixed=fixed)
    built, batch = built_of(dataset)
    examples = [each for row in built for each in row]
    assert batch.count("pairs") == len(examples)
    for ref, example in examples:
        one, other = ref.layout["pair"]
        assert example.item == one and one != other or CLASSES[one] == "d"
        assert example.labels["pairs"][1].tolist() == [CLASSES[one] == CLASSES[other]] * 2
        assert example.sub_lengths == tuple(min(row + 3, 8) for row in (one, other))
    if fixed:
        assert [
            ref.layout["pair"][0] for ref, _ in sorted(examples, key=lambda x: x.ref.number)
        ] == [*range(len(ROWS))]


def test_refused(tmp_path: Path) -> None:
    def check(rows: list[dict], message: str, **values) -> None:
        source = source_of(tmp_path, rows)
        with pytest.raises(UserError, match=re.escape(message)):
            task = task_of(**values)
            task.check(source, labeled=True)
            task.check_step(source, 1)
            task.training_items(source, 64)

    check([{"text_a": " ", "label": 1}, *ROWS], "text_a is empty; remove the row")
    check([{"text_a": "x", "label": ["a", "b"]}, *ROWS], "2 labels, but tasks.pairs expects one")
    check([{**row, "text_b": "x"} for row in ROWS], "name one column, such as [text_a]")
    check([{"text_a": "x"}], "has no column 'label'")
    check(ROWS[:2], "no two rows are of one class")
    check([ROWS[1], ROWS[3]], "no two rows are of two classes")
    check(ROWS, "one pair per step: CoSENT compares pairs", loss="cosent")
    many = [{"text_a": "x", "label": n % 2} for n in range(5000)]
    check(many, "unique makes 12,497,500 pairs of these rows, more than", sampling="unique")
    task_of().check(source_of(tmp_path, [{"text_a": "x"}]), labeled=False)


def test_a_head_on_means_equals_transformers(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = make_task(Classification, "topic", pooling="mean").resolved(source)
    theirs = BertModel(bert_config()).eval()
    model = model_of(task)
    state, _ = from_names({f"bert.{k}": v for k, v in theirs.state_dict().items()}, "bert")
    head = {f"heads.{name}": x for name, x in model.heads.state_dict().items()}
    model.load_state_dict(state | head, strict=True)
    rows = padded([[row["text_a"]] for row in ROWS])
    mask = rows.mask[..., None]
    with torch.no_grad():
        hidden = theirs(**rows.arguments).last_hidden_state
        mean = (hidden * mask).sum(1) / mask.sum(1)
        expected = mean @ head["heads.topic.out.weight"].T
        expected += head["heads.topic.out.bias"]
    made = predictions(model, source, task)["topic"]
    logits = np.array([made[n]["logits"] for n in range(len(ROWS))])
    np.testing.assert_allclose(logits, expected.numpy(), atol=1e-5)
    assert task.hf_export().outputs.averaged
    assert make_task(Classification, "other", share="topic").with_head_of(task).pooling == "mean"
    sharing = make_task(Classification, "other", share="topic", pooling="pooler")
    with pytest.raises(UserError, match="tasks.other.pooling: 'pooler', but the head is that of"):
        sharing.with_head_of(task)
