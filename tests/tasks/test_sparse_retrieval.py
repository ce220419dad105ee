"""Search by sparse vectors against the same by dense ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.sparse_vectors import SparseVectors
from palm_ds.tasks.retrieval import Retrieval
from palm_ds.tasks.sparse_retrieval import SparseRetrieval
from tests.helpers.text_tables import make_task, source_of
from tests.tasks.test_retrieval import ROWS


@pytest.mark.parametrize("words_of_queries", [3, 12])
def test_it_finds_what_dense_vectors_find(tmp_path: Path, words_of_queries: int) -> None:
    """Also where no query has the last words that texts have, or the other way round."""
    source, rng = source_of(tmp_path, ROWS), np.random.default_rng(1)
    sparse = make_task(SparseRetrieval, "found", k=2)
    dense = make_task(Retrieval, "found", k=2, similarity="dot")
    known: dict[tuple[str, bool], np.ndarray] = {}
    rows: dict[int, np.ndarray] = {}
    for item, row in enumerate(ROWS):
        asks = [True, *[False] * 9] if row["query"] else [False]
        texts = zip(dense.row_texts(source, item), asks, strict=False)
        for text in texts:
            vector = np.zeros(12, np.float32)
            vector[: words_of_queries if text[1] else 9] = rng.random()
            known.setdefault(text, vector * (rng.random(12) < 0.6))
            rows[item] = np.array([*rows.get(item, ()), known[text]])
    found = sparse.metrics(
        {i: {"vectors": [*SparseVectors.of(x)]} for i, x in rows.items()}, source
    )
    expected = dense.metrics({i: {"vectors": x} for i, x in rows.items()}, source)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert set(found) - set(expected) == {"query_active_dims", "document_active_dims"}
