"""A client of `palm-ds serve`: many texts in requests of a few, sent side by side, with retries.

    with ServingClient("http://127.0.0.1:8080") as client:
        client.predict("mood", ["a fine film", "two hours too long"])   # a prediction for each text
        client.embed(["a text", "another"])                             # (2, size) float32
        client.search("towers in France", top=3)

A server that is full says when to try again, and the client does; so it does after a lost
connection. It needs httpx and NumPy, neither torch nor a model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np

_RETRIED = (408, 429, 502, 503)
_FIRST_WAIT = 0.2  # seconds, doubled with each retry
_MAX_WAIT = 30.0


class ServerError(Exception):
    """An answer that is an error: its HTTP status, the server's one line, and the request's id in
    the server's log."""

    def __init__(self, status: int, message: str, request_id: str) -> None:
        super().__init__(f"{status}: {message} (request {request_id})")
        self.status, self.message, self.request_id = status, message, request_id


class ServingClient:
    """A connection to a server; safe to use from several threads."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        batch: int = 64,
        parallel: int = 4,
        timeout: float = 60.0,
        retries: int = 6,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`batch`: texts of a request; `parallel`: requests at the same time; `timeout`: seconds
        for each; `retries`: further attempts where the server is full or cannot be reached."""
        if batch < 1 or parallel < 1:
            raise ValueError(f"batch {batch}, parallel {parallel}: expected at least 1")
        headers = {"X-Request-Timeout": f"{timeout:g}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._batch, self._retries, self._sleep = batch, retries, sleep
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="palm-ds-client")
        # the server answers a late request itself, a little before this
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout + 5, transport=transport
        )

    def __enter__(self) -> ServingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections."""
        self._pool.shutdown()
        self._http.close()

    def predict(self, task: str, inputs: Sequence[Any], *, model: str = "") -> list[dict[str, Any]]:
        """A prediction for each text, pair or row."""
        path = f"/predict/{quote(task, safe='')}"
        answers = self._in_batches(path, "inputs", inputs, {"model": model})
        return [prediction for answer in answers for prediction in answer["predictions"]]

    def embed(self, texts: Sequence[Any], *, model: str = "", **settings: object) -> np.ndarray:
        """(texts, size) float32, of texts and pairs; `settings`: pooling, normalize, dimensions,
        prompt."""
        answers = self._in_batches("/embed", "texts", texts, {"model": model, **settings})
        if not answers:
            return np.empty((0, 0), np.float32)
        return np.concatenate([np.array(answer["embeddings"], np.float32) for answer in answers])

    def fill_mask(
        self, texts: Sequence[str], *, top: int = 5, model: str = ""
    ) -> list[dict[str, Any]]:
        """The guesses for every [MASK] of each text."""
        answers = self._in_batches("/fill-mask", "texts", texts, {"top": top, "model": model})
        return [result for answer in answers for result in answer["results"]]

    def tokenize(self, texts: Sequence[str], *, model: str = "") -> list[dict[str, Any]]:
        """The tokens of each text."""
        answers = self._in_batches("/tokenize", "texts", texts, {"model": model})
        return [result for answer in answers for result in answer["results"]]

    def rerank(
        self, query: str, documents: Sequence[str], *, model: str = "", **settings: Any
    ) -> list[tuple[int, float]]:
        """[(place among the documents, score)], the best first; `settings`: task, use, top_n."""
        top = settings.pop("top_n", None)
        answers = self._in_batches(
            "/rerank", "documents", documents, {"query": query, "model": model, **settings}
        )
        ranked = [
            (first * self._batch + result["index"], result["relevance_score"])
            for first, answer in enumerate(answers)
            for result in answer["results"]
        ]
        return sorted(ranked, key=lambda pair: (-pair[1], pair[0]))[:top]

    def search(self, query: str, *, top: int = 10, **options: Any) -> list[dict[str, Any]]:
        """The best texts of the server's index; `options`: filter, hybrid, rerank."""
        return self._post("/search", {"query": query, "top": top, **options})["results"]

    def add(self, texts: Sequence[Mapping[str, Any]]) -> list[str]:
        """Add texts (`text`, perhaps `id`, `title`, `metadata`) to the server's index; returns
        their ids."""
        answers = self._in_batches("/index", "texts", texts, {})
        return [identity for answer in answers for identity in answer["ids"]]

    def delete(
        self, ids: Sequence[str] | None = None, *, filter: Mapping[str, Any] | None = None
    ) -> int:
        """Delete texts of the server's index by id or by a filter; returns how many."""
        body = {"ids": list(ids)} if ids is not None else {"filter": filter}
        return self._send("DELETE", "/index", body)["deleted"]

    def info(self) -> dict[str, Any]:
        """The models and what they can do."""
        return self._send("GET", "/info", None)

    def _in_batches(
        self, path: str, key: str, values: Sequence[Any], others: Mapping[str, Any]
    ) -> list[Any]:
        """The answers for the values, a few in each request, in order."""
        if isinstance(values, str):
            raise TypeError(f"{key}: expected a list of texts, got one text")
        others = {name: value for name, value in others.items() if value not in ("", None)}
        bodies = [
            {key: list(values[first : first + self._batch]), **others}
            for first in range(0, len(values), self._batch)
        ]
        if len(bodies) == 1:
            return [self._post(path, bodies[0])]
        return list(self._pool.map(lambda body: self._post(path, body), bodies))

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._send("POST", path, body)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """The JSON of the answer. Raises ServerError, or httpx.TransportError if the server cannot
        be reached."""
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                answer = self._http.request(method, path, json=body)
            except httpx.TransportError:
                if last:
                    raise
                self._sleep(_wait(attempt, ""))
                continue
            if answer.is_success:
                return answer.json()
            if last or answer.status_code not in _RETRIED:
                raise _error(answer)
            self._sleep(_wait(attempt, answer.headers.get("retry-after", "")))
        raise AssertionError("the last attempt returns or raises")


def _wait(attempt: int, stated: str) -> float:
    """Seconds before the next attempt: as the server states, and up to half as much again so that
    clients do not return together; else doubling."""
    seconds = float(stated) if stated.isdigit() else _FIRST_WAIT * 2**attempt
    return min(seconds, _MAX_WAIT) * (1 + random.random() / 2)


def _error(answer: httpx.Response) -> ServerError:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.reason_phrase
    return ServerError(answer.status_code, message, answer.headers.get("x-request-id", "-"))
