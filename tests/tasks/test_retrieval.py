"""Queries and texts: candidates, duplicates, search over all texts, and what is refused."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.example import text_numbers
from palm_ds.tasks.retrieval import Retrieval
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    make_task,
    model_of,
    opened,
    predictions,
    source_of,
)

ROWS: list[dict[str, Any]] = [
    {"query": "so ?", "positive": "good", "negatives": ["bad x", "y"]},
    {"query": "very ?", "positive": "a b c", "negatives": []},
    {"query": None, "positive": "so good", "negatives": None},
    {"query": "so ?", "positive": "so good", "negatives": ["good"]},
]


task_of = partial(make_task, Retrieval, "found")


def test_rows_become_texts_that_share_a_row_of_the_batch(tmp_path: Path) -> None:
    source, task = source_of(tmp_path, ROWS), task_of()
    task.check(source, labeled=True)
    built, batch = built_of(dataset_of(source, task))
    examples = {each.example.item: each.example for row in built for each in row}
    assert examples[0].sub_lengths == (4, 3, 4, 3) and examples[2].sub_lengths == (4,)
    assert [task.class_name(role) for role in range(3)] == ["query", "positive", "negative"]
    words = source.tokenizer.tokens(examples[0].input_ids.tolist())
    assert words[:4] == ["[CLS]", "so", "?", "[SEP]"] and words[4:7] == ["[CLS]", "good", "[SEP]"]
    roles = {i: each.labels["found"][1][:, 0].tolist() for i, each in examples.items()}
    assert roles == {0: [0, 1, 2, 2], 1: [0, 1], 2: [2], 3: [0, 1, 2]}
    number = {i: text_numbers(each).tolist() for i, each in examples.items()}
    assert number[0][0] == number[3][0] and number[0][1] == number[3][2]  # the query; good
    assert number[2][0] == number[3][1] != number[0][1]
    assert task.training_items(source, 64).tolist() == [[0], [1], [3]]
    assert task.describe_rows(source, 64) == "found: 4 rows; 3 queries, 7 texts to find"
    assert batch.count("found") == 4 and len(batch.labels["found"][0]) == 10


def test_texts_are_cut_one_by_one_and_then_together(tmp_path: Path) -> None:
    rows = [{"query": "x " * 20, "positive": "y " * 40, "negatives": ["z " * 8]}]
    source = source_of(tmp_path, rows)
    lengths = lambda most, **values: (  # noqa: E731
        built_of(dataset_of(source, task_of(**values), max_length=most))[0][0][0][1].sub_lengths
    )
    assert lengths(128) == (22, 42, 10)
    assert lengths(128, max_length=16) == (16, 16, 10)
    assert lengths(40, max_length=16) == (15, 15, 10)
    assert task_of(max_length=16).cut_rows(source, 64) == 1
    with pytest.raises(
        UserError, match="3 texts leave fewer than 8 tokens for each in a row of 20"
    ):
        lengths(20)
    assert task_of(max_length=16).longest_text(64) == 16 and task_of().longest_text(64) == 64


def test_predictions_and_search(tmp_path: Path) -> None:
    source, task = source_of(tmp_path, ROWS), task_of(k=2)
    model = model_of(task)
    made = predictions(model, source, task)["found"]
    vectors = {i: torch.tensor(x["vectors"]) for i, x in made.items()}
    own = vectors[0][1:] @ vectors[0][0]
    assert made[0]["scores"] == pytest.approx(own.tolist(), abs=1e-6)
    assert made[0]["score"] == made[0]["scores"][0] and "score" not in made[2]
    # Both rows of "so ?" are one query with two relevant texts: `good`, `so good`.
    texts = ["good", "bad x", "y", "a b c", "so good"]
    every = torch.stack([*vectors[0][1:], vectors[1][1], vectors[2][0]])
    relevant = [{0, 4}, {3}]
    recalls = []
    for query, wanted in zip((vectors[0][0], vectors[1][0]), relevant, strict=True):
        best = (every @ query).argsort(descending=True)[:2].tolist()
        recalls.append(len(wanted & set(best)) / len(wanted))
    found = task.metrics(made, source)
    assert list(found) == ["ndcg@2", "recall@2", "mrr", "map"] and len(texts) == 5
    assert found["recall@2"] == pytest.approx(np.mean(recalls))
    stored = {i: {k: v for k, v in x.items() if k not in task.eval_only} for i, x in made.items()}
    right = [x["scores"][0] > max(x["scores"][1:]) for i, x in stored.items() if i in (0, 3)]
    assert task.metrics(stored, source) == {"accuracy": np.mean(right)}


def test_a_query_that_is_a_text_does_not_find_itself(tmp_path: Path) -> None:
    rows = [
        {"query": "so good", "positive": "very good"},
        {"query": "very good", "positive": "so good"},
    ]
    source, task = source_of(tmp_path, rows), task_of()
    assert task.metrics(predictions(model_of(task), source, task)["found"], source)["mrr"] == 1.0


def test_teacher_scores_reach_the_head_as_they_are(tmp_path: Path) -> None:
    rows = [
        row | {"teacher_scores": [0.1, -2.5, 7.0][: 1 + len(row["negatives"] or [])]}
        for row in ROWS
    ]
    source, task = source_of(tmp_path, rows), task_of(distillation="kl")
    task.check(source, labeled=True)
    _, batch = built_of(dataset_of(source, task))
    bits = batch.labels["found"][1][:4, 2].to(torch.int32).view(torch.float32)
    assert bits.tolist() == [0.0, *np.float32([0.1, -2.5, 7.0]).tolist()]


def test_columns_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text("q\tgood_one\tbad_1\tbad_2\nso ?\tgood\tbad\tx y\n")
    columns = {"query": "q", "positive": "good_one", "negatives": ["bad_1", "bad_2"]}
    source = opened(file, columns=columns)
    assert task_of().row_texts(source, 0) == ["so ?", "good", "bad", "x y"]
    assert task_of(negatives="ignore").row_texts(source, 0) == ["so ?", "good"]


def test_refused(tmp_path: Path) -> None:
    def check(rows: list[dict[str, Any]], message: str, **values: Any) -> None:
        source = source_of(tmp_path, rows)
        with pytest.raises(UserError, match=re.escape(message)):
            task = task_of(**values)
            task.check(source, labeled=True)
            task.check_step(source, 1)

    plain = {"query": "so ?", "positive": "good"}
    check([plain], "no column 'negatives'", negatives="need")
    check(
        [plain | {"negatives": []}], "negatives is empty; tasks.found needs some", negatives="need"
    )
    check([plain, {"query": "", "positive": "x"}], ":2: query is empty; remove the row")
    check([{"query": "x", "positive": "  "}], ":1: positive is empty")
    check([{"query": "x", "positive": None}], ":1: positive: expected a text, got nothing")
    check([plain | {"negatives": ["x", ""]}], ":1: negatives is empty")
    check([{"query": None, "positive": "x"}], "no row has a query")
    check([plain], "one row per step and no column `negatives`")
    check([{"query": "x", "label": 1}], "no column 'positive'")
    check([{"positive": "x", "label": 1}], "no column 'query'")
    check([plain], "no column 'negatives'", distillation="kl")
    scored = ROWS[0] | {"teacher_scores": [1.0]}
    check([scored], "1 teacher_scores, for a positive and 2 negatives", distillation="kl")
    for nothing in (None, []):
        unscored = [ROWS[0] | {"teacher_scores": [1.0, 2.0, 3.0]}, ROWS[0]]
        unscored[1] = unscored[1] | {"teacher_scores": nothing}
        check(unscored, "0 teacher_scores, for a positive and 2 neg", distillation="kl")
    with pytest.raises(UserError, match="teacher_scores is 'high', not a list of numbers"):
        source_of(tmp_path, [ROWS[0] | {"teacher_scores": "high"}])
    for values, message in (
        ({"temperature": -1}, "temperature: expected a number above 0, got -1"),
        ({"k": 0}, "k: expected a number above 0, got 0"),
        (
            {"distillation": "kl", "distillation_share": 2},
            "distillation_share: expected at most 1, got 2",
        ),
        ({"distillation": "kl", "negatives": "ignore"}, "but `negatives` is ignore"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            task_of(**values)
