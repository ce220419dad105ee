"""The forms of other servers: what their clients send, and what they read in an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from packaging.version import Version

from palm_ds.serve.client import ServingClient
from palm_ds.serve.http.compatible import _log_odds
from tests.helpers.serving import Local, listening, local, opened

TOKEN = "a-secret"
TEXTS = ["bad", "very good", "good ? so good"]


@pytest.fixture(scope="module")
def server(tasks_run: Path, words_run: Path) -> Iterator[Local]:
    with local(*opened(tasks=tasks_run, words=words_run)) as started:
        yield started


@pytest.fixture(scope="module")
def words(words_run: Path) -> Iterator[Local]:
    """A server without a head that scores pairs or classifies."""
    with local(*opened(words=words_run)) as started:
        yield started


@pytest.mark.parametrize("path", ["/embed", "/"])
def test_teis_vectors(server: Local, path: str) -> None:
    wanted = server.answer("/embed", {"texts": TEXTS, "normalize": True})["embeddings"]
    assert server.answer(path, {"inputs": TEXTS, "truncate": True, "prompt_name": None}) == wanted
    one = server.answer(path, {"inputs": TEXTS[0]})
    np.testing.assert_allclose(one, wanted[:1], atol=1e-5)
    raw = server.answer(path, {"inputs": TEXTS, "normalize": False})
    assert raw == server.answer("/embed", {"texts": TEXTS, "normalize": False})["embeddings"]


def test_teis_scores_of_a_query(server: Local) -> None:
    ours = server.answer("/rerank", {"query": "so good ?", "documents": TEXTS})["results"]
    body = {"query": "so good ?", "texts": TEXTS, "raw_scores": False, "truncate": True}
    wanted = [{"index": x["index"], "score": x["relevance_score"]} for x in ours]
    assert server.answer("/rerank", body) == wanted
    raw = server.answer("/rerank", {**body, "raw_scores": True})
    rows = [{"text_a": body["query"], "text_b": text} for text in TEXTS]
    logits = [x["logits"] for x in server.answer("/predict/rank", {"inputs": rows})["predictions"]]
    np.testing.assert_allclose(
        [x["score"] for x in raw], [np.diff(logits[x["index"]])[0] for x in raw], atol=1e-4
    )
    named = server.answer("/rerank", {**body, "return_text": True})
    assert [x["text"] for x in named] == [TEXTS[x["index"]] for x in ours]


def test_raw_scores_have_the_order_of_probabilities_near_0_and_1() -> None:
    given = [1e-9, 1e-8, 0.5, 1 - 1e-8, 1 - 1e-9]
    found = _log_odds(given)
    wanted = torch.tensor(given, dtype=torch.float64).logit()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert np.isfinite(_log_odds([0.0, 1.0])).all()


def test_teis_labels(server: Local) -> None:
    """The best first; of the first task that classifies, a text alone or lists of one or two."""
    made = server.answer("/predict/mood", {"inputs": TEXTS})["predictions"]
    one = server.answer("/predict", {"inputs": TEXTS[0]})
    assert one[0]["label"] == made[0]["label"]
    assert sorted(x["score"] for x in one) == sorted(made[0]["probs"])
    every = server.answer("/predict", {"inputs": [[text] for text in TEXTS], "raw_scores": True})
    assert [x[0]["label"] for x in every] == [x["label"] for x in made]
    assert [sorted(y["score"] for y in x) for x in every] == [sorted(x["logits"]) for x in made]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_of_jina_and_cohere(server: Local, path: str) -> None:
    ours = server.answer("/rerank", {"query": "so", "documents": TEXTS, "top_n": 2})["results"]
    body = {"query": "so", "documents": TEXTS, "top_n": 2, "model": "tasks"}
    found = server.answer(path, body)
    assert (found["results"], found["model"]) == (ours, "tasks")
    objects = [{"text": text, "title": "x"} for text in TEXTS]
    named = server.answer(path, {**body, "documents": objects, "return_documents": True})
    assert [x["document"]["text"] for x in named["results"]] == [TEXTS[x["index"]] for x in ours]


def test_without_a_head_vectors_rank(words: Local) -> None:
    body: dict[str, Any] = {"query": "so good", "documents": TEXTS}
    wanted = words.answer("/rerank", {**body, "use": "vectors"})["results"]
    assert words.answer("/v1/rerank", body)["results"] == wanted
    scores = [x["score"] for x in words.answer("/rerank", {"query": "so good", "texts": TEXTS})]
    assert np.allclose(scores, [x["relevance_score"] for x in wanted])
    status, message = words.refusal("/predict", {"inputs": "so"})
    assert status == 404 and message == "no head that classifies texts in words"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (
            "/embed",
            {"inputs": ["good " * 99]},
            413,
            'inputs: 1 text with more tokens .* "truncate"',
        ),
        ("/predict", {"inputs": "good " * 99}, 413, "inputs: 1 text with more tokens"),
        ("/embed", {"inputs": []}, 422, "inputs: empty"),
        ("/embed", {"inputs": 3}, 422, "inputs: expected a text or a list of texts"),
        ("/embed", {"texts": 3}, 422, "texts: "),
        ("/embed", {"text": ["a"]}, 422, "the body: no key `text`; did you mean"),
        ("/rerank", {"query": "a", "texts": []}, 422, "texts: empty"),
        ("/rerank", {"query": "a", "texts": ["b"], "raw_scores": 1}, 422, "raw_scores: "),
        ("/predict", {"inputs": [["a", "b", "c"]]}, 422, "inputs"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "x"}, 404, "model 'x' is not"),
    ],
)
def test_mistakes(
    server: Local, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    found, text = server.refusal(path, body)
    assert found == status and re.match(message, text), text


# ---- other people's clients, where they are installed ----


@pytest.fixture(scope="module")
def url(tasks_run: Path) -> Iterator[str]:
    with (
        local(*opened(tasks=tasks_run)) as found,
        listening(found.service, token=TOKEN) as address,
    ):
        yield address


@pytest.fixture(scope="module")
def vectors(url: str) -> np.ndarray:
    with ServingClient(url, token=TOKEN) as client:
        found = client.embed(TEXTS)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def best(url: str) -> list[int]:
    """The places of the texts, the best for `so` first."""
    with ServingClient(url, token=TOKEN) as client:
        return [index for index, _ in client.rerank("so", TEXTS)]


def test_openai(url: str, vectors: np.ndarray) -> None:
    openai = pytest.importorskip("openai", reason="no openai here: pip install openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN) as client:
        found = client.embeddings.create(input=TEXTS, model="tasks").data
    got = np.array([each.embedding for each in found])
    got /= np.linalg.norm(got, axis=1, keepdims=True)
    np.testing.assert_allclose(got, vectors, atol=1e-5)


def test_cohere(url: str, best: list[int]) -> None:
    cohere = pytest.importorskip("cohere", reason="no cohere here: pip install cohere")
    for kind in (cohere.Client, cohere.ClientV2):
        with httpx.Client() as http:  # theirs is never closed
            client = kind(api_key=TOKEN, base_url=url, httpx_client=http)
            found = client.rerank(model="tasks", query="so", documents=TEXTS, top_n=2)
        assert [each.index for each in found.results] == best[:2]


def test_llama_index(url: str, vectors: np.ndarray, best: list[int]) -> None:
    embeddings = pytest.importorskip(
        "llama_index.embeddings.text_embeddings_inference",
        reason="pip install llama-index-embeddings-text-embeddings-inference",
    )
    reranks = pytest.importorskip(
        "llama_index.postprocessor.tei_rerank",
        reason="pip install llama-index-postprocessor-tei-rerank",
    )
    schema = pytest.importorskip("llama_index.core.schema")
    made = embeddings.TextEmbeddingsInference(model_name="", base_url=url, auth_token=TOKEN)
    found = made.get_text_embedding_batch(TEXTS)
    np.testing.assert_allclose(found, vectors, atol=1e-5)
    nodes = [schema.NodeWithScore(node=schema.TextNode(text=text)) for text in TEXTS]
    whole = f"Bearer {TOKEN}"  # this one sends the header as it is
    rerank = reranks.TextEmbeddingInference(model_name="", base_url=url, auth_token=whole, top_n=3)
    kept = rerank.postprocess_nodes(nodes, query_str="so")
    assert [TEXTS.index(each.node.text) for each in kept] == best


def test_langchain(
    url: str, vectors: np.ndarray, best: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    made = openai.OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key=TOKEN, model="tasks", check_embedding_ctx_length=False
    )
    found = np.array(made.embed_documents(TEXTS))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(found, vectors, atol=1e-5)
    jina = pytest.importorskip(
        "langchain_community.document_compressors.jina_rerank",
        reason="pip install langchain-community",
    )
    monkeypatch.setattr(jina, "JINA_API_URL", f"{url}/v1/rerank")
    rerank = jina.JinaRerank(jina_api_key=TOKEN, model="tasks", top_n=2)
    assert [each["index"] for each in rerank.rerank(TEXTS, "so")] == best[:2]


def test_langchain_before_it_refused_addresses(
    url: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface = pytest.importorskip(
        "langchain_huggingface", reason="pip install 'langchain-huggingface<1.2.2'"
    )
    if Version(version("langchain-huggingface")) >= Version("1.2.2"):
        pytest.skip("langchain-huggingface takes names of the hub alone since 1.2.2")
    # Its client refuses any address while the hub is offline, loopback too.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    made = huggingface.HuggingFaceEndpointEmbeddings(model=url, huggingfacehub_api_token=TOKEN)
    np.testing.assert_allclose(made.embed_documents(TEXTS), vectors, atol=1e-5)
