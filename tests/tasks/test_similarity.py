"""Scored pairs: vectors as transformers has them, targets, and what is refused."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.tasks.similarity import Similarity
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

ROWS = [
    {"text_a": "so good", "text_b": "very good", "label": 4.5},
    {"text_a": "a b c d", "text_b": "bad", "label": 1.0},
    {"text_a": "x", "text_b": "y z z", "label": 2.75},
]


task_of = partial(make_task, Similarity, "alike")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_values_equal_transformers(tmp_path: Path, pooling: str, similarity: str) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of(pooling=pooling, similarity=similarity).resolved(source)
    theirs = BertModel(bert_config()).eval()
    model = model_of(task)
    state, _ = from_names({f"bert.{k}": v for k, v in theirs.state_dict().items()}, "bert")
    model.load_state_dict(state, strict=True)
    vectors = []
    for column in ("text_a", "text_b"):
        rows = padded([[row[column]] for row in ROWS])
        with torch.no_grad():
            hidden = theirs(**rows.arguments).last_hidden_state
        mask = rows.mask[..., None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        vectors.append(mean if pooling == "mean" else hidden[:, 0])
    one, other = vectors
    expected = (one * other).sum(1)
    if similarity == "cosine":
        expected = torch.cosine_similarity(one, other)
    made = predictions(model, source, task)["alike"]
    assert [made[i]["value"] for i in range(3)] == pytest.approx(expected.tolist(), abs=1e-5)


def test_metrics_equal_scipy(tmp_path: Path) -> None:
    from scipy.stats import pearsonr, spearmanr

    source, values = source_of(tmp_path, ROWS), [0.8, 0.3, 0.1]
    found = task_of().metrics({i: {"value": x} for i, x in enumerate(values)}, source)
    labels = [row["label"] for row in ROWS]
    assert found["spearman"] == pytest.approx(spearmanr(values, labels)[0])
    assert found["pearson"] == pytest.approx(pearsonr(values, labels)[0])


def test_targets_are_from_0_to_1(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of().resolved(source)
    assert (task.low, task.high) == (1.0, 4.5)
    built, batch = built_of(dataset_of(source, task))
    assert batch.count("alike") == 3 and len(built[0]) == 3
    targets = {each.example.item: each.example.labels["alike"][1].tolist() for each in built[0]}
    assert targets == {0: [1, 1], 1: [0, 0], 2: [0.5, 0.5]}
    wide = task_of(low=0, high=5).resolved(source)
    _, batch = built_of(dataset_of(source, wide))
    np.testing.assert_allclose(np.sort(batch.labels["alike"][1][::2]), [0.2, 0.55, 0.9], rtol=1e-6)


def test_metrics_of_the_users_own_get_numbers(tmp_path: Path) -> None:
    assert task_of().true_labels(source_of(tmp_path, ROWS)) == [4.5, 1.0, 2.75]


def test_texts_do_not_see_each_other(tmp_path: Path) -> None:
    other = [{**row, "text_b": "q q q"} for row in ROWS]
    task = task_of(low=0, high=5)
    model = model_of(task)
    vectors = []
    for rows in (ROWS, other):
        _, batch = built_of(dataset_of(source_of(tmp_path, rows), task))
        with torch.no_grad():
            vectors.append(model(batch)["alike"].scores[::2])
    torch.testing.assert_close(*vectors, atol=1e-6, rtol=1e-5)


def test_stored_predictions(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    stored = [StoredPrediction(values={"value": x}, place="p") for x in (0.9, 0.1, 0.5)]
    task, made = task_of().prepared(source, stored)
    assert task.metrics(made, source)["spearman"] == pytest.approx(1.0)


def test_refused(tmp_path: Path) -> None:
    def check(rows: list[dict], message: str, **values) -> None:
        source = source_of(tmp_path, rows)
        with pytest.raises(UserError, match=re.escape(message)):
            task = task_of(**values).resolved(source)
            task.check(source, labeled=True)
            task.check_step(source, 1)

    check([{"text_a": "x", "text_b": " ", "label": 1}, ROWS[0]], "text_b is empty; remove the row")
    check([ROWS[0] | {"label": "high"}], "'high' is not a number")
    check([ROWS[0], ROWS[0]], "tasks.alike: all labels are 4.5; there is nothing to learn")
    check([{"text_a": "x", "label": 1}], "has no column 'text_b'", low=0, high=1)
    check(ROWS, "one row per step: CoSENT compares rows")
    check(ROWS, "1 column; name two", texts=["text_a"])
    for values, message in (
        ({"temperature": 0}, "temperature: expected a number above 0, got 0"),
        ({"low": 2, "high": 1}, "low 2.0 is not below high 1.0"),
        ({"matryoshka": [4, 4]}, "expected different numbers"),
        ({"matryoshka": [4], "matryoshka_weights": [1, 2]}, "2, for 1 sizes"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            task_of(**values)
    with pytest.raises(UserError, match="matryoshka: 16, but vectors have 16 numbers"):
        model_of(task_of(matryoshka=[16]))
