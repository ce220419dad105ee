"""A server whose index is searched, added to and deleted from."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.search.add_files import embedding_of
from palm_ds.inference.search.index import SearchHit, create_index, open_index
from palm_ds.inference.search.ranking import fused
from palm_ds.inference.search.texts import IndexedText
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.serve.client import ServingClient
from palm_ds.serve.model_set import Served, open_set
from palm_ds.serve.served_model import ModelOptions
from tests.helpers.serving import Local, listening, local
from tests.helpers.small_index import no_room_for_pages, writing

RNG = np.random.default_rng(3)
WORDS = ["good", "bad", "so", "very", "?"]
TEXTS = [" ".join(RNG.choice(WORDS, n % 12 + 1)) for n in range(30)]
HEADERS = {"Authorization": "Bearer secret"}


@pytest.fixture
def folder(tasks_run: Path, tmp_path: Path) -> Path:
    embedder = TrainedModel.open(tasks_run).embedder()
    create_index(tmp_path / "i", embedding_of(embedder, tasks_run), embedder.size)
    texts = [
        IndexedText(id=f"t{n}", text=text, title=f"n{n}", metadata={"even": n % 2 == 0})
        for n, text in enumerate(TEXTS)
    ]
    with open_index(tmp_path / "i") as index:
        index.add(texts, embedder.embed([text.passage for text in texts]))
    return tmp_path / "i"


@pytest.fixture
def served(folder: Path, tasks_run: Path) -> Served:
    return Served(models={"tasks": tasks_run}, options=ModelOptions(), index=folder)


@pytest.fixture
def server(served: Served) -> Iterator[Local]:
    with local(open_set(served), served, token="secret") as found:
        yield found


def ask(server: Local, path: str, body: Any, method: str = "POST") -> Any:
    found = server.run(lambda client: client.request(method, path, json=body, headers=HEADERS))
    assert found.status_code == 200, found.text
    return found.json()


def search(server: Local, query: str, **options: Any) -> list[dict[str, Any]]:
    return ask(server, "/search", {"query": query, "top": 99, **options})["results"]


def test_answers_have_ids_titles_and_metadata(server: Local) -> None:
    info = server.get("/info", headers=HEADERS).json()["search"]
    assert info == {"texts": 30, "hybrid": True, "rerank": True}
    found = search(server, "so bad", filter={"even": False})
    assert [each["id"] for each in found if each["metadata"]["even"]] == []
    assert len(found) == 15
    for each in found:
        assert each["id"] == f"t{each['index']}" and each["title"] == f"n{each['index']}"
        assert each["text"] == TEXTS[each["index"]]


def test_hybrid_and_rerank(server: Local, tasks_run: Path, folder: Path) -> None:
    """By the same numbers as /rerank gives, and by the fusion of both rankings."""
    near = [(each["index"], each["score"]) for each in search(server, "n7 very")]
    with open_index(folder) as index, index.store.reading() as now:
        words = now.by_words("n7 very", 100)
    hybrid = [(each["index"], each["score"]) for each in search(server, "n7 very", hybrid=True)]
    wanted = fused([near, words])
    assert [row for row, _ in hybrid] == [row for row, _ in wanted]
    np.testing.assert_allclose([x for _, x in hybrid], [x for _, x in wanted], atol=1e-6)
    body = {"query": "so", "documents": [f"n{n} {text}" for n, text in enumerate(TEXTS)]}
    ranked = ask(server, "/rerank", body)["results"]
    scores = {each["index"]: each["relevance_score"] for each in ranked}
    again = search(server, "so", rerank=True)
    assert {each["index"]: each["score"] for each in again} == pytest.approx(scores, abs=1e-5)
    assert [each["score"] for each in again] == sorted(scores.values(), reverse=True) or (
        np.all(np.diff([each["score"] for each in again]) <= 0)
    )
    assert len(search(server, "so", rerank=True, top=3)) == 3


def test_a_head_orders_as_many_texts_as_are_asked_for(server: Local, monkeypatch) -> None:
    monkeypatch.setattr("palm_ds.serve.index_requests.RERANKED", 4)
    assert len(search(server, "so", rerank=True)) == len(TEXTS)


def test_texts_come_and_go(server: Local, tasks_run: Path, folder: Path) -> None:
    new = {"id": "new", "text": "very very bad", "title": "n99", "metadata": {"n": 1}}
    done = ask(server, "/index", {"texts": [new, {"text": "bad ?"}]})
    assert (done["added"], done["replaced"], done["texts"]) == (2, 0, 32)
    assert done["ids"][0] == "new" and len(done["ids"][1]) == 16
    assert ask(server, "/index", {"texts": [new]}) == done | {"added": 0, "ids": ["new"]}
    best = search(server, "n99 very very bad", top=1)[0]
    assert best | {"score": 1} == {"index": 30, "score": 1, **new}
    assert best["score"] == pytest.approx(1, abs=1e-5)
    changed = ask(server, "/index", {"texts": [new | {"text": "so"}]})
    assert (changed["added"], changed["replaced"], changed["texts"]) == (1, 1, 32)
    with open_index(folder) as other:  # another program's changes are seen, too
        other.delete(["t0"])
    assert "t0" not in {each["id"] for each in search(server, "so")}
    assert ask(server, "/index", {"ids": ["new", "no"]}, "DELETE") == {"deleted": 1, "texts": 30}
    gone = ask(server, "/index", {"filter": {"even": True}}, "DELETE")
    assert gone == {"deleted": 14, "texts": 16}
    vectors = TrainedModel.open(tasks_run).embedder().embed(["bad ?"])
    with open_index(folder) as other:
        found = other.search(vectors[0], "", top=1)[0]
    assert found.record.id == done["ids"][1] and found.score == pytest.approx(1, abs=1e-5)


def test_the_client_adds_searches_and_deletes(server: Local) -> None:
    with (
        listening(server.service, token="secret") as url,
        ServingClient(url, token="secret") as client,
    ):
        assert client.add([{"id": "a", "text": "so ?"}, {"id": "b", "text": "?"}]) == ["a", "b"]
        found = client.search("so ?", top=1, filter={"even": None}, hybrid=True)
        assert found[0]["id"] == "a"
        assert client.delete(["a"]) == 1 and client.delete(filter={"even": None}) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "line"),
    [
        (
            "POST",
            "/search",
            {"query": "x", "filter": {"a": {"=>": 1}}},
            422,
            "'=>' is not an operator",
        ),
        ("POST", "/search", {"query": "x", "filter": 3}, 422, "filter: "),
        ("POST", "/index", {"texts": [{"text": " "}]}, 422, "texts[0]: the text is empty"),
        ("POST", "/index", {"texts": []}, 422, "texts: empty"),
        ("POST", "/index", {"texts": [{"text": "x"}] * 257}, 413, "texts: 257 texts; at most 256"),
        (
            *("POST", "/index", {"texts": [{"text": "x", "metadata": {"a": 1 << 63}}]}, 422),
            "texts[0]: metadata.a: an integer of more than 64 bits",
        ),
        (
            *("POST", "/index", {"texts": [{"text": "x", "metadata": {"a": "x" * 100_001}}]}, 413),
            "texts[0].metadata: 100,001 characters",
        ),
        ("DELETE", "/index", {}, 422, "name the texts: `ids`, or a `filter`"),
        ("DELETE", "/index", {"filter": {}}, 422, "filter: empty: it would delete every text"),
    ],
)
def test_mistakes_in_one_line(
    method: str, path: str, body: Any, status: int, line: str, server: Local
) -> None:
    found = server.run(lambda client: client.request(method, path, json=body, headers=HEADERS))
    message = found.json()["error"]["message"]
    assert (found.status_code, "\n" in message) == (status, False)
    assert line in message
    assert server.service.in_work == 0


def test_a_full_disk_is_no_mistake_of_the_client(
    server: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room_for_pages(monkeypatch)
    texts = [{"text": " ".join(f"w{n}x{m}" for m in range(60))} for n in range(20)]
    status, message = server.refusal("/index", {"texts": texts}, headers=HEADERS)
    assert (status, message.partition(": ")[2]) == (500, "database or disk is full")
    assert len(search(server, "so")) == 30 and server.service.in_work == 0


def test_who_waits_too_long_for_another_program_is_to_try_again(
    server: Local, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palm_ds.inference.search.store._PATIENCE", 0.01)
    with writing(folder):
        found = server.run(
            lambda client: client.request("DELETE", "/index", json={"ids": ["t0"]}, headers=HEADERS)
        )
    assert found.status_code == 503 and int(found.headers["retry-after"]) >= 1
    assert "another process is changing it; try again later" in found.json()["error"]["message"]
    monkeypatch.undo()
    assert ask(server, "/index", {"ids": ["t0"]}, "DELETE") == {"deleted": 1, "texts": 29}


PATIENT = {"x-request-timeout": "20"}


def test_changes_that_wait_for_another_program_stop_nothing_else(
    server: Local, folder: Path
) -> None:
    """Nor are they made later, when nobody waits for them any more."""

    async def ask(client: httpx.AsyncClient) -> tuple[list[httpx.Response], list[httpx.Response]]:
        client.headers.update(HEADERS)

        async def delete(identity: str, seconds: str) -> httpx.Response:
            headers = {"x-request-timeout": seconds}
            body = {"ids": [identity]}
            return await client.request("DELETE", "/index", json=body, headers=headers)

        with writing(folder):
            late = await asyncio.gather(*(delete(each, "0.2") for each in ("t0", "t1", "t2")))
            answers = [
                await client.post("/embed", json={"texts": ["so"]}, headers=PATIENT),
                await client.post("/search", json={"query": "so"}, headers=PATIENT),
            ]
        return late, [*answers, await delete("t3", "20")]

    late, answers = server.run(ask)
    assert {each.status_code for each in late} <= {503, 504}
    assert [each.status_code for each in answers] == [200, 200, 200]
    assert answers[-1].json() == {"deleted": 1, "texts": 29}


def test_slow_searches_do_not_stop_other_requests(
    server: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, end = threading.Semaphore(0), threading.Event()

    def slow(*_: object, **__: object) -> list[SearchHit]:
        started.release()
        end.wait(60)
        return []

    monkeypatch.setattr(server.service.models.index, "search", slow)

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        client.headers.update(HEADERS)
        body = {"query": "so"}
        searches = [asyncio.ensure_future(client.post("/search", json=body)) for _ in range(3)]
        for _ in range(2):
            await asyncio.to_thread(started.acquire)
        embedded = await client.post("/embed", json={"texts": ["so"]}, headers=PATIENT)
        end.set()
        return [embedded, *await asyncio.gather(*searches)]

    assert [each.status_code for each in server.run(ask)] == [200] * 4


def test_who_may_change_it(server: Local, served: Served, words_run: Path, tmp_path: Path) -> None:
    body = {"texts": [{"text": "x"}]}
    assert server.refusal("/index", body)[0] == 401
    other = server.run(lambda client: client.put("/index", headers=HEADERS))
    assert (other.status_code, other.headers["allow"]) == (405, "POST, DELETE")
    alone = Served(models={"words": words_run}, options=ModelOptions(), index=served.index)
    with pytest.raises(UserError, match="not the vectors that words gives"):
        open_set(alone)
    (tmp_path / "empty").mkdir()
    for index, line in ((tmp_path / "empty", "not an index"), (tmp_path / "none", "no such file")):
        with pytest.raises(UserError, match=line):
            open_set(Served(models=served.models, options=ModelOptions(), index=index))
    with pytest.raises(UserError, match="--texts: .* has its texts"):
        open_set(
            Served(models=served.models, options=ModelOptions(), index=served.index, texts=["x"])
        )
