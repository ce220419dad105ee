"""The client sends a few texts at a time, waits as it is asked to, and gives up as it should."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from palm_ds.serve.client import ServerError, ServingClient
from tests.helpers.serving import listening, local, opened

Answer = Callable[[httpx.Request], httpx.Response]


def client(answer: Answer, waits: list[float], **options: int) -> ServingClient:
    transport = httpx.MockTransport(answer)
    return ServingClient("http://there", transport=transport, sleep=waits.append, **options)


def refusal(status: int, **headers: str) -> httpx.Response:
    error = {"error": {"message": "too much", "code": status}}
    return httpx.Response(status, json=error, headers={"x-request-id": "r1", **headers})


def test_it_comes_again_when_the_server_says() -> None:
    answers = [refusal(429, **{"retry-after": "7"}), refusal(503, **{"retry-after": "2"})]
    waits: list[float] = []

    def answer(_: httpx.Request) -> httpx.Response:
        return answers.pop(0) if answers else httpx.Response(200, json={"results": ["found"]})

    with client(answer, waits) as asking:
        assert asking.search("x") == ["found"]
    assert 7 <= waits[0] <= 10.5 and 2 <= waits[1] <= 3


def test_it_connects_again_and_gives_up_in_the_end() -> None:
    waits: list[float] = []

    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with client(unreachable, waits, retries=3) as asking, pytest.raises(httpx.ConnectError):
        asking.search("x")
    assert len(waits) == 3 and waits == sorted(waits)


@pytest.mark.parametrize("status", [401, 404, 413, 422, 500, 504])
def test_what_cannot_be_mended_by_waiting_is_an_error(status: int) -> None:
    waits: list[float] = []
    with client(lambda _: refusal(status), waits) as asking, pytest.raises(ServerError) as found:
        asking.search("x")
    assert (found.value.status, found.value.message, found.value.request_id) == (
        status,
        "too much",
        "r1",
    )
    assert waits == []


def test_texts_are_sent_in_batches_and_come_back_in_order() -> None:
    sizes: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        texts = json.loads(request.content)["texts"]
        sizes.append(len(texts))
        coded = [base64.b64encode(np.array([text], "<f4").tobytes()).decode() for text in texts]
        return httpx.Response(200, json={"embeddings": coded, "size": 1})

    with client(answer, [], batch=10, parallel=3) as asking:
        found = asking.embed([str(number) for number in range(35)])
        assert found[:, 0].tolist() == list(range(35))
        assert asking.embed([]).shape == (0, 0)
        with pytest.raises(TypeError, match="texts: expected a list"):
            asking.embed("one text")
    assert sorted(sizes) == [5, 10, 10, 10]


def test_of_several_texts_with_one_id_the_last_is_added_last() -> None:
    """Requests that add others may overtake each other."""
    kept: dict[str, str] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        texts = json.loads(request.content)["texts"]
        if texts[0]["text"] == "old":
            time.sleep(0.2)
        kept.update({text["id"]: text["text"] for text in texts})
        return httpx.Response(200, json={"ids": [text["id"] for text in texts]})

    with client(answer, [], batch=1) as asking:
        texts = [{"id": "1", "text": "old"}, {"id": "2", "text": "x"}, {"id": "1", "text": "new"}]
        assert asking.add(texts) == ["1", "2", "1"]
    assert kept == {"1": "new", "2": "x"}


def test_against_a_real_server(
    tasks_run: Path, words_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose host a proxy of the environment does not know."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    models, served = opened(tasks=tasks_run, words=words_run)
    with (
        local(models, served) as server,
        listening(server.service, token="t") as url,
        ServingClient(url, token="t", batch=2) as asking,
    ):
        assert [each["label"] for each in asking.predict("mood", ["so", "bad", "very ?"])] == [
            each["label"]
            for each in server.answer("/predict/mood", {"inputs": ["so", "bad", "very ?"]})[
                "predictions"
            ]
        ]
        texts = ["good", "bad so", "very"]
        vectors = asking.embed(texts, model="words", normalize=True)
        assert vectors.shape == (3, 16)
        assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5
        ranked = asking.rerank("good", texts, use="vectors", model="words")
        assert ranked[0] == (0, pytest.approx(1.0, abs=1e-5))
        assert sorted(place for place, _ in ranked) == [0, 1, 2]
        assert len(asking.fill_mask(["so [MASK]"], top=2)[0]["masks"][0]["guesses"]) == 2
        ids = [each["ids"] for each in asking.tokenize(texts, model="words")]
        as_ids = asking.embed([np.array(x) for x in ids], model="words", normalize=True)
        np.testing.assert_allclose(as_ids, vectors, atol=1e-5)
        (_, bad, _), states = ids, asking.hidden_states(ids, [0, -1], model="words")
        assert [x.shape for x in states] == [(2, len(x), 16) for x in ids]
        labels = asking.predict("mood", ids)
        assert labels[1] == asking.predict("mood", [bad], token_type_ids=[[0] * len(bad)])[0]
        assert asking.tokenize(["so"], model="words")[0]["tokens"] == ["[CLS]", "so", "[SEP]"]
        assert [each["name"] for each in asking.info()["models"]] == ["tasks", "words"]
        with pytest.raises(ServerError, match="404: no task 'a/b'"):
            asking.predict("a/b", ["x"])
    with ServingClient(url, retries=0) as asking, pytest.raises(httpx.TransportError):
        asking.info()
