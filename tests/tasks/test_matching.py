"""Matching: pointwise as a classifier of pairs; pairwise two pairs through one tower."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import BertForSequenceClassification

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.task import build
from palm_ds.tasks.classification import Classification
from palm_ds.tasks.matching import Matching
from palm_ds.tasks.ranking import Ranking
from tests.helpers.text_tables import (
    bert_config,
    built_of,
    dataset_of,
    make_task,
    model_of,
    padded,
    predictions,
    same_weights,
    small_tokenizer,
    source_of,
)

TRIPLES = [
    {"text_a": "so good ?", "text_b": "good", "text_b_neg": "bad bad"},
    {"text_a": "x y", "text_b": "x", "text_b_neg": "very bads"},
    {"text_a": "", "text_b": "z z z", "text_b_neg": "y"},
]
PAIRS = [
    {"text_a": "so good", "text_b": "good", "label": "1"},
    {"text_a": "x y", "text_b": "bad", "label": "0"},
    {"text_a": "z", "text_b": "", "label": "1"},
]


task_of = partial(make_task, Matching, "match")


@pytest.mark.parametrize("margin", [0.5, 0.05])
def test_pairwise_is_the_hinge_of_two_sigmoids(tmp_path: Path, margin: float) -> None:
    source = source_of(tmp_path, TRIPLES)
    task = task_of(strategy="pairwise", margin=margin).resolved(source)
    theirs = BertForSequenceClassification(bert_config(num_labels=1)).eval()
    model = model_of(task)
    same_weights(model, theirs, "match")
    with torch.no_grad():
        good, bad = (
            theirs(**padded([(row["text_a"], row[name]) for row in TRIPLES]).arguments)
            .logits[:, 0]
            .sigmoid()
            for name in ("text_b", "text_b_neg")
        )
    _, batch = built_of(dataset_of(source, task))
    assert batch.count("match") == 3
    with torch.no_grad():
        output = model(batch)["match"]
    expected = F.margin_ranking_loss(good, bad, torch.ones(3), margin=margin, reduction="sum")
    torch.testing.assert_close(output.loss_sum, expected, atol=1e-5, rtol=0)
    assert output.correct == (good > bad).sum()
    made = predictions(model, source, task)["match"]
    for item in range(3):
        assert made[item]["probs"] == pytest.approx(float(good[item]), abs=1e-5)
        assert made[item]["probs_neg"] == pytest.approx(float(bad[item]), abs=1e-5)
    led = float((good > bad).float().mean())
    assert task.metrics(made, source) == {"accuracy": pytest.approx(led)}


def test_sure_scores_of_two_texts_are_told_apart(tmp_path: Path) -> None:
    source, task = source_of(tmp_path, TRIPLES), task_of(strategy="pairwise")
    scores = [(19.0, 18.0), (-18.0, -19.0), (18.0, 19.0)]
    made = {
        i: task.decode(np.array(pair)[:, None], None, source)  # type: ignore[arg-type]
        for i, pair in enumerate(scores)
    }
    assert task.metrics(made, source) == {"accuracy": pytest.approx(2 / 3)}


def test_texts_that_surely_match_are_ordered(tmp_path: Path) -> None:
    """As `/rerank` orders them, and `palm-ds mine`."""
    source = source_of(tmp_path, PAIRS)
    for task in (task_of(labels=["0", "1"]), make_task(Ranking, "rank")):
        logits = [-20.0, -3.0, 0.5, 3.0, 13.5, 14.0, 18.0, 25.0]
        found = [
            task.relevance(task.decode(np.array([[0.0, x]]), None, source))  # type: ignore[arg-type]
            for x in logits
        ]
        assert found == sorted(set(found))
        assert found == pytest.approx([1 / (1 + np.exp(-x)) for x in logits], abs=1e-6)


def test_pairs_are_scored_at_a_precision(tmp_path: Path) -> None:
    made = {i: {"label": "0", "probs": [1 - x, x]} for i, x in enumerate((0.9, 0.4, 0.3))}
    scores = task_of(labels=["0", "1"], recall_at_precision=0.6).metrics(
        made, source_of(tmp_path, PAIRS)
    )
    assert scores["recall_at_precision"] == 1.0 and "precision_at_threshold" not in scores
    with pytest.raises(UserError, match="precision_at_threshold: pairwise matching has no classes"):
        task_of(strategy="pairwise", precision_at_threshold=0.5)


def test_the_score_of_a_pair_does_not_depend_on_a_worse_text(tmp_path: Path) -> None:
    long = {"text_a": "x y " * 40, "text_b": "good " * 40, "text_b_neg": "bad " * 3}
    triples = [*TRIPLES, long]
    pairs = [{k: row[k] for k in ("text_a", "text_b")} for row in triples]
    task = task_of(strategy="pairwise")
    model = model_of(task)
    with_worse = predictions(model, source_of(tmp_path, triples), task)["match"]
    source = source_of(tmp_path, pairs)
    task.check(source, labeled=False)
    alone = predictions(model, source, task)["match"]
    assert all(list(made) == ["probs"] for made in alone.values())
    for item in range(4):
        assert alone[item]["probs"] == pytest.approx(with_worse[item]["probs"], abs=1e-6)
    assert task.metrics(alone, source) == {}


def test_a_single_text_has_no_loss_but_a_gradient() -> None:
    task = task_of(strategy="pairwise", dropout=0.0)
    head = task.head(model_of(task).backbone)
    rows = torch.randn(3, 16)
    loss, correct = head(rows, torch.tensor([1, 0, 1]), torch.tensor([0, 0, 1]))
    pair, _ = head(rows[:2], torch.tensor([1, 0]), torch.tensor([0, 0]))
    assert loss == pair
    assert correct <= 1
    loss.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_both_pairs_are_separate_and_truncated_alike(tmp_path: Path) -> None:
    long = {"text_a": "x y " * 40, "text_b": "good " * 40, "text_b_neg": "bad " * 3}
    source = source_of(tmp_path, [*TRIPLES, long])
    built, batch = built_of(dataset_of(source, task_of(strategy="pairwise"), max_length=40))
    (example,) = (e for row in built for _, e in row if e.item == 3)
    assert example.sub_lengths == (20, 3 + 14 + 3)
    tokens = small_tokenizer().tokens(example.input_ids)
    assert tokens[:10] == ["[CLS]", *["x", "y"] * 4, "x"]
    assert (tokens[10], tokens[19], tokens[20], tokens[-4:]) == (
        "[SEP]",
        "[SEP]",
        "[CLS]",
        ["bad", "bad", "bad", "[SEP]"],
    )
    assert batch.cu_seqlens.diff().max() == 20
    at, target = example.labels["match"]
    assert (at.tolist(), target.tolist()) == ([0, 20], [1, 0])


def test_the_second_label_is_the_match(tmp_path: Path) -> None:
    from sklearn.metrics import f1_score

    rows = [{**PAIRS[0], "label": x} for x in ("same", "other", "same", "unknown", "other")]
    source = source_of(tmp_path, rows)
    task = task_of(labels=["other", "same"])
    found = ["same", "same", "other", "same", "other"]
    scores = task.metrics({i: {"label": x} for i, x in enumerate(found)}, source)
    assert scores["accuracy"] == 0.5
    assert scores["f1"] == pytest.approx(f1_score([1, 0, 1, 0], [1, 1, 0, 0]))
    assert task.metrics({3: {"label": "same"}}, source) == {}


def test_the_baseline_of_equal_scores(tmp_path: Path) -> None:
    task = task_of(strategy="pairwise", margin=0.4)
    source = source_of(tmp_path, TRIPLES)
    loss, right = task.baseline(np.array([1, 0, 1, 0]), source)
    assert (loss.sum(), right.sum()) == pytest.approx((0.8, 1.0))
    pointwise = task_of(labels=["0", "1"])
    loss, right = pointwise.baseline(np.array([1, 0]), source_of(tmp_path, PAIRS))
    assert loss == pytest.approx(-np.log([3 / 5, 2 / 5]))
    assert right.tolist() == [1, 0]


def test_pointwise_matching_works_in_a_task_group(tmp_path: Path) -> None:
    source = source_of(tmp_path, PAIRS)
    first = build("kind", {"kind": "classification", "source": "s"})
    assert isinstance(first, Classification)
    first, second = first.resolved(source), task_of().resolved(source)
    model = model_of(first, second)
    both = predictions(model, source, first, second)
    assert both["match"] == predictions(model, source, second)["match"]
    assert both["kind"] == predictions(model, source, first)["kind"]


def test_pairwise_builds_its_own_texts(tmp_path: Path) -> None:
    source = source_of(tmp_path, TRIPLES)
    first = build("kind", {"kind": "classification", "source": "s", "labels": ["a", "b"]})
    with pytest.raises(UserError, match="tasks.match: it builds its own pairs"):
        built_of(dataset_of(source, first, task_of(strategy="pairwise")))


def test_two_pairs_must_fit_in_a_row(tmp_path: Path) -> None:
    source = source_of(tmp_path, TRIPLES)
    with pytest.raises(UserError, match="two pairs of 40 tokens, but rows hold 64; .* to 80"):
        built_of(dataset_of(source, task_of(strategy="pairwise", max_length=40)))


def test_heads_are_shared_by_tasks_of_one_strategy() -> None:
    origin = task_of(strategy="pairwise")
    assert task_of(strategy="pairwise").with_head_of(origin).labels == ()
    with pytest.raises(UserError, match="'match' matches pairwise, this task pointwise"):
        task_of().with_head_of(origin)
