"""An index of sparse vectors finds what a product with all of them does, while it changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.common.sparse_vectors import SparseVector, SparseVectors
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.search.index import IndexEmbedding, SearchIndex, create_index, open_index
from palm_ds.inference.search.ranking import fused
from palm_ds.inference.search.vectors import unit
from tests.helpers.small_index import names, texts_of

SIZE = 40
SPARSE = EmbeddingSettings(pooling="splade")


def dense(ids: Sequence[str], note: str = "") -> np.ndarray:
    """(ids, SIZE) float32, about a quarter of which is not 0; some vectors are empty."""
    made = np.zeros((len(ids), SIZE), np.float32)
    for row, each in enumerate(ids):
        rng = np.random.default_rng([*(each + note).encode()])
        made[row] = rng.gamma(1.0, size=SIZE) * (rng.random(SIZE) < rng.integers(0, 3) / 4)
    return made


def index_of(folder: Path, ids: Sequence[str]) -> SearchIndex:
    create_index(folder, IndexEmbedding(model="none", fingerprint="", settings=SPARSE), SIZE)
    index = open_index(folder)
    index.add(texts_of(ids), SparseVectors.of(dense(ids)))
    return index


def query(word: str = "which") -> SparseVector:
    return SparseVectors.of(dense([word, "query 1"]))[1]


def by_force(ids: Sequence[str], vectors: np.ndarray, top: int) -> list[tuple[str, float]]:
    """What shares a token with the query, by the products with all vectors."""
    asked = dense(["query 1"])[0].astype(np.float64)
    scores = vectors.astype(np.float64) @ asked
    order = [n for n in np.argsort(-scores, kind="stable") if scores[n] > 0][:top]
    return [(ids[n], pytest.approx(scores[n], rel=1e-12)) for n in order]


def found(index: SearchIndex, **options: object) -> list[tuple[str, float]]:
    return [(each.record.id, each.score) for each in index.search(query(), "", **options)]  # type: ignore[arg-type]


def test_additions_deletions_filters_and_compaction(tmp_path: Path) -> None:
    ids = names(0, 700)  # the postings of a token are several blocks
    index, vectors = index_of(tmp_path / "i", ids[:600]), dense(ids)
    index.add(texts_of(ids[600:]), SparseVectors.of(vectors[600:]))
    assert found(index, top=9) == by_force(ids, vectors, 9)
    assert len(found(index, top=999)) == len(by_force(ids, vectors, 999)) < 700
    some = ["n3", "n50", "n9", "n650"]
    some.sort(key=ids.index)
    assert found(index, filter={"of": some}) == by_force(some, dense(some), 10)
    index.delete(names(10, 400))
    index.add(texts_of(ids[:5], " again"), SparseVectors.of(dense(ids[:5], "again")))
    left = [*ids[5:10], *ids[400:], *ids[:5]]
    vectors = np.concatenate([dense(left[:-5]), dense(ids[:5], "again")])
    for _ in range(2):
        assert found(index, top=999) == by_force(left, vectors, 999)
        passages, samples = index.samples()
        kept = [left.index(each.split()[1]) for each in passages]
        np.testing.assert_array_equal(samples, unit(vectors[kept]))
        index.compact()
    index.close()
    with open_index(tmp_path / "i") as again:
        assert again.total == len(left) and again.store.sparse and not again.wants_graph
        assert not list((tmp_path / "i").glob("vectors-*"))
        assert found(again, top=20) == by_force(left, vectors, 20)


def test_hybrid_is_the_fusion_with_words(tmp_path: Path) -> None:
    index, ids = index_of(tmp_path / "i", names(0, 30)), names(0, 30)
    best = [(ids.index(each), score) for each, score in by_force(ids, dense(ids), 30)]
    wanted = fused([best, [(17, 1.0), (4, 1.0)]])
    both = index.search(query(), "n17 n4", top=30, hybrid=True)
    assert {each.record.id for each in both} == {ids[row] for row, _ in wanted}
    assert {"n17", "n4"} <= {each.record.id for each in both[:4]}
    index.close()


def test_vectors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    index = index_of(tmp_path / "i", names(0, 3))
    with pytest.raises(UserError, match="vectors of 39 numbers; the index has 40"):
        index.add(texts_of(["x"]), SparseVectors.of(np.ones((1, 39), np.float32)))
    with pytest.raises(UserError, match="not finite"):
        index.add(texts_of(["x"]), SparseVectors.of(np.full((1, 40), np.inf, np.float32)))
    index.close()
