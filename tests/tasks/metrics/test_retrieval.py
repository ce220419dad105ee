"""Retrieval metrics equal those of palm_ds's own ranking metrics, and a few lines of Python."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from palm_ds.tasks.metrics.ranking import average_precision, mrr, ndcg, rank, recall_at
from palm_ds.tasks.metrics.retrieval import DEPTH, retrieval_metrics


def by_hand(order: list[int], relevant: set[int], k: int) -> dict[str, float]:
    hits = [text in relevant for text in order]
    best = sum(1 / math.log2(i + 2) for i in range(min(k, len(relevant))))
    precisions = [sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit]
    return {
        f"ndcg@{k}": sum(hit / math.log2(i + 2) for i, hit in enumerate(hits[:k])) / best,
        f"recall@{k}": sum(hits[:k]) / len(relevant),
        "mrr": 1 / (hits.index(True) + 1) if any(hits) else 0.0,
        "map": sum(precisions) / len(relevant),
    }


@pytest.mark.parametrize("k", [1, 5, 10])
def test_metrics_equal_a_plain_restatement(k: int) -> None:
    rng = np.random.default_rng(k)
    queries, texts = rng.normal(size=(9, 6)), rng.normal(size=(40, 6))
    relevant = [sorted(rng.choice(40, rng.integers(1, 6), replace=False)) for _ in queries]
    found = retrieval_metrics(queries, texts, relevant, k=k)
    scores = queries @ texts.T
    each = [
        by_hand(np.argsort(-s).tolist(), set(r), k) for s, r in zip(scores, relevant, strict=True)
    ]
    for name, value in found.items():
        assert value == pytest.approx(np.mean([one[name] for one in each])), name
    labels = np.array([[t in own for t in range(40)] for own in relevant])
    ranking = rank(np.repeat(np.arange(9), 40).tolist(), scores.flatten(), labels.flatten())
    own = [ndcg(ranking, k), recall_at(ranking, k), mrr(ranking), average_precision(ranking)]
    assert list(found.values()) == pytest.approx(own)


def test_a_text_that_is_left_out_is_not_found() -> None:
    queries = np.eye(2)
    texts = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    assert retrieval_metrics(queries, texts, [[1], [2]])["mrr"] == 0.75
    assert retrieval_metrics(queries, texts, [[1], [2]], left_out={0: 0})["mrr"] == 1.0


def test_nothing_beyond_the_depth_counts() -> None:
    texts = np.linspace(1, 0, DEPTH + 1)[:, None]
    found = retrieval_metrics(np.ones((1, 1)), texts, [[DEPTH]])
    assert set(found.values()) == {0.0}


def test_memory_does_not_grow_with_the_queries() -> None:
    """The texts found for a query take 130 KB: 65 MB of these."""
    queries, texts = np.ones((500, 1), np.float32), np.linspace(1, 0, DEPTH)[:, None]
    tracemalloc.start()
    try:
        retrieval_metrics(queries, texts.astype(np.float32), [[0]] * len(queries))
        assert tracemalloc.get_traced_memory()[1] < 45e6
    finally:
        tracemalloc.stop()


def test_no_queries() -> None:
    assert retrieval_metrics(np.empty((0, 2)), np.ones((1, 2)), []) == {}
