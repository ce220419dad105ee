"""A full queue, deadlines, and reloads that lose nothing."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx

from palm_ds.serve.service import Service
from tests.helpers.serving import Local, local, opened

BODY = {"texts": ["good bad", "so"]}


class Held:
    """No device takes anything inside the block."""

    def __init__(self, service: Service) -> None:
        self.condition = service._scheduler._changed

    async def __aenter__(self) -> None:
        self.condition.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.condition.release()


def test_a_full_queue_says_when_to_come_again(words_run: Path) -> None:
    models, served = opened(words=words_run)
    with local(models, served, max_queue=4, max_texts=3) as server:

        async def ask(client: httpx.AsyncClient) -> tuple[list[httpx.Response], httpx.Response]:
            async with Held(server.service):
                waiting = [asyncio.ensure_future(client.post("/embed", json=BODY)) for _ in "ab"]
                await asyncio.sleep(0.1)
                refused = await client.post("/embed", json=BODY)
            return list(await asyncio.gather(*waiting)), refused

        answers, refused = server.run(ask)
        assert [each.status_code for each in answers] == [200, 200]
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["message"].startswith("4 texts are waiting, of at most 4")
        assert server.post("/embed", BODY).status_code == 200


def test_a_queue_takes_any_allowed_request_when_it_is_empty(words_run: Path) -> None:
    """Also a query and as many documents as fit into it."""
    models, served = opened(words=words_run)
    body = {"query": "so", "documents": ["good", "bad", "?"], "use": "vectors"}
    with local(models, served, max_queue=3, max_texts=3) as server:
        assert len(server.answer("/rerank", body)["results"]) == 3
        server.service.in_work = 1
        assert server.post("/rerank", body).status_code == 429
        server.service.in_work = 0


def test_a_deadline_ends_the_wait_and_frees_the_queue(words_run: Path) -> None:
    models, served = opened(words=words_run)
    with local(models, served) as server:

        async def ask(client: httpx.AsyncClient) -> httpx.Response:
            async with Held(server.service):
                headers = {"x-request-timeout": "0.1"}
                return await client.post("/embed", json=BODY, headers=headers)

        found = server.run(ask)
        assert found.status_code == 504
        assert found.json()["error"]["type"] == "deadline_exceeded"
        assert server.service.in_work == 0
        assert server.post("/embed", BODY).status_code == 200


def vectors(server: Local) -> Any:
    return server.answer("/embed", BODY)["embeddings"]


def test_a_reload_uses_the_new_weights_and_loses_no_request(
    words_run: Path, tasks_run: Path, tmp_path: Path
) -> None:
    """Requests run all the time while other weights take the place of the old ones."""
    folder = tmp_path / "model"
    shutil.copytree(words_run, folder)
    models, served = opened(model=folder)
    with local(models, served, token="t") as server:
        client_headers = {"authorization": "Bearer t"}

        async def ask(client: httpx.AsyncClient) -> tuple[list[int], Any, Any]:
            client.headers.update(client_headers)
            before = (await client.post("/embed", json=BODY)).json()["embeddings"]
            shutil.rmtree(folder)
            shutil.copytree(tasks_run, folder)
            reload = asyncio.ensure_future(client.post("/reload"))
            statuses = []
            while not reload.done():
                statuses.append((await client.post("/embed", json=BODY)).status_code)
            assert reload.result().json() == {"models": ["model"]}
            after = (await client.post("/embed", json=BODY)).json()["embeddings"]
            return statuses, before, after

        statuses, before, after = server.run(ask)
        assert set(statuses) == {200}
        assert before != after
        assert server.post("/predict/mood", {"inputs": ["x"]}, headers=client_headers).is_success

        shutil.rmtree(folder)  # a reload that fails keeps what there is
        failed = server.post("/reload", {}, headers=client_headers)
        assert failed.status_code == 500
        assert "the old models stay: " in failed.json()["error"]["message"]
        again = server.post("/embed", BODY, headers=client_headers).json()["embeddings"]
        assert again == after


def test_a_reload_does_not_need_the_client_that_asked(words_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(words_run, folder)
    models, served = opened(model=folder)
    with local(models, served, token="t") as server:

        async def ask(client: httpx.AsyncClient) -> None:
            asked = asyncio.ensure_future(server.service.reload())
            await asyncio.sleep(0)
            asked.cancel()
            busy = await client.post("/reload", headers={"authorization": "Bearer t"})
            assert busy.status_code == 409
            while server.service.models is models:
                await asyncio.sleep(0.01)

        server.run(lambda client: asyncio.wait_for(ask(client), 30))
        assert 'palm_ds_reloads_total{result="done"} 1.0' in server.service.metrics.text().decode()


def test_tokens_have_the_same_limits(words_run: Path) -> None:
    """The queue's length, the deadline, and the signal to stop."""
    models, served = opened(words=words_run)
    with local(models, served, max_queue=3, max_texts=3) as server:
        server.service.in_work = 2
        assert server.post("/tokenize", BODY).status_code == 429
        server.service.in_work = 0
        late = server.post("/tokenize", BODY, headers={"x-request-timeout": "1e-9"})
        assert late.status_code == 504
        server.service.draining = True
        assert server.post("/tokenize", BODY).status_code == 503
        server.service.draining = False
        assert server.post("/tokenize", BODY).status_code == 200
        assert server.service.in_work == 0
