"""A server whose model has sparse vectors: TEI's form of them, and an index of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.embedder import Embedder, EmbeddingSettings
from palm_ds.inference.search.add_files import embedding_of
from palm_ds.inference.search.index import create_index
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.serve.model_set import Served, open_set
from palm_ds.serve.served_model import ModelOptions
from tests.helpers.serving import Local, local, opened

TEXTS = ["bad", "very good", "good ? so good", "a b c d"]
HEADERS = {"Authorization": "Bearer secret"}
SPARSE = EmbeddingSettings(pooling="splade", max_active_dims=9)


@pytest.fixture(scope="module")
def embedder(words_run: Path) -> Embedder:
    return TrainedModel.open(words_run).embedder(SPARSE)


@pytest.fixture(scope="module")
def server(
    words_run: Path, embedder: Embedder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("sparse") / "index"
    create_index(folder, embedding_of(embedder, words_run), embedder.size)
    options = ModelOptions(embedding=SPARSE)
    served = Served(models={"words": words_run}, options=options, index=folder)
    with local(open_set(served), served, token="secret") as started:
        yield started


def ask(server: Local, path: str, body: Any) -> Any:
    answer = server.post(path, body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_teis_sparse_vectors(server: Local, embedder: Embedder) -> None:
    vectors = embedder.vectors(TEXTS)
    found = ask(server, "/embed_sparse", {"inputs": TEXTS, "truncate": True})
    for own, vector in zip(found, vectors, strict=True):
        assert [each["index"] for each in own] == vector.indices.tolist()
        np.testing.assert_allclose([x["value"] for x in own], vector.values, atol=1e-5)
        assert 0 < len(own) <= 9
    (one,) = ask(server, "/embed_sparse", {"inputs": TEXTS[0]})
    assert [each["index"] for each in one] == [each["index"] for each in found[0]]
    status, message = server.refusal("/embed_sparse", {"inputs": "a " * 100}, headers=HEADERS)
    assert status == 413 and "1 text with more tokens than the model reads" in message
    dense = ask(server, "/embed", {"texts": TEXTS})["embeddings"]
    np.testing.assert_allclose(dense, embedder.embed(TEXTS), atol=1e-5)


def test_an_index_of_them_is_searched(server: Local, embedder: Embedder) -> None:
    rows = {"texts": [{"id": str(n), "text": text} for n, text in enumerate(TEXTS)]}
    assert ask(server, "/index", rows)["added"] == 4
    hits = ask(server, "/search", {"query": "so good"})["results"]
    scores = embedder.embed(TEXTS) @ embedder.embed(["so good"])[0]
    assert [int(each["id"]) for each in hits] == np.argsort(-scores, kind="stable").tolist()
    np.testing.assert_allclose([x["score"] for x in hits], np.sort(scores)[::-1], atol=1e-4)
    ranked = {"query": "so good", "documents": TEXTS, "use": "vectors"}
    best = ask(server, "/rerank", ranked)["results"]
    assert [each["index"] for each in best] == [int(each["id"]) for each in hits]


def test_a_model_of_dense_vectors_has_none(words_run: Path) -> None:
    with local(*opened(words=words_run)) as dense:
        status, message = dense.refusal("/embed_sparse", {"inputs": TEXTS})
    assert status == 404 and message.startswith("words has dense vectors (mean)")


def test_an_index_of_them_needs_a_masked_lm_head(
    words_run: Path, tasks_run: Path, embedder: Embedder, tmp_path: Path
) -> None:
    create_index(tmp_path / "i", embedding_of(embedder, words_run), embedder.size)
    served = Served(models={"tasks": tasks_run}, options=ModelOptions(), index=tmp_path / "i")
    with pytest.raises(UserError, match="no model served here gives such vectors"):
        open_set(served)
