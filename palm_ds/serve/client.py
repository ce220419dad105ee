"""A client of `palm-ds serve`: many texts in requests of a few, sent side by side, with retries.

    with ServingClient("http://127.0.0.1:8080") as client:
        client.predict("mood", ["a fine film", "two hours too long"])   # a prediction for each text
        client.embed(["a text", "another"])                             # (2, size) float32
        client.embed([[2, 7, 9, 3]], layers=[4, 8])                     # ids; the mean of layers
        client.hidden_states(["a text"], layers=[4, 8, -1])             # [(3, tokens, hidden)]
        client.search("towers in France", top=3)

A server that is full says when to try again, and the client does; so it does after a lost
connection. It needs httpx and NumPy, neither torch nor a model.
"""

from __future__ import annotations

import base64
import ipaddress
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


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=timeout + 5,  # the server answers a late request itself, a little before
            transport=transport,
            trust_env=not is_loopback(httpx.URL(url).host),  # which no proxy can reach
        )

    def __enter__(self) -> ServingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections."""
        self._pool.shutdown()
        self._http.close()

    def predict(
        self,
        task: str,
        inputs: Sequence[Any],
        *,
        token_type_ids: Sequence[Sequence[int]] = (),
        model: str = "",
    ) -> list[dict[str, Any]]:
        """A prediction for each text, pair or row, or for the ids of each text with its special
        tokens; `token_type_ids`: of such ids, by default 0."""
        path = f"/predict/{quote(task, safe='')}"
        given = _texts_or_ids("inputs", inputs, token_type_ids)
        answers = self._in_batches(path, given, {"model": model})
        return [prediction for answer in answers for prediction in answer["predictions"]]

    def embed(
        self,
        texts: Sequence[Any],
        *,
        token_type_ids: Sequence[Sequence[int]] = (),
        model: str = "",
        **settings: object,
    ) -> np.ndarray:
        """(texts, size) float32, of texts and pairs, or of the ids of each text; `settings`:
        pooling, normalize, dimensions, prompt, layers, concat."""
        given = _texts_or_ids("texts", texts, token_type_ids)
        found = self._vectors(given, {"model": model, **settings})
        return np.concatenate(found) if found else np.empty((0, 0), np.float32)

    def hidden_states(
        self,
        texts: Sequence[Any],
        layers: Sequence[int] = (-1,),
        *,
        token_type_ids: Sequence[Sequence[int]] = (),
        model: str = "",
        **settings: object,
    ) -> list[np.ndarray]:
        """The outputs of layers (layers, tokens, hidden) for each text, float32; 1 is the first, -1
        the last, 0 the embeddings."""
        given = _texts_or_ids("texts", texts, token_type_ids)
        wanted = {"layers": list(layers), "concat": True, "tokens": True}
        found = self._vectors(given, {"model": model, **settings, **wanted})
        return [x.reshape(len(x), len(layers), -1).swapaxes(0, 1) for x in found]

    def _vectors(
        self, given: Mapping[str, Sequence[Any]], settings: Mapping[str, object]
    ) -> list[np.ndarray]:
        """The vectors (any, size) of each text."""
        others = {**settings, "encoding_format": "base64"}
        return [
            np.frombuffer(base64.b64decode(each), "<f4").reshape(-1, answer["size"])
            for answer in self._in_batches("/embed", given, others)
            for each in answer["embeddings"]
        ]

    def fill_mask(
        self, texts: Sequence[str], *, top: int = 5, model: str = ""
    ) -> list[dict[str, Any]]:
        """The guesses for every [MASK] of each text."""
        answers = self._in_batches("/fill-mask", {"texts": texts}, {"top": top, "model": model})
        return [result for answer in answers for result in answer["results"]]

    def tokenize(self, texts: Sequence[str], *, model: str = "") -> list[dict[str, Any]]:
        """The tokens of each text."""
        answers = self._in_batches("/tokenize", {"texts": texts}, {"model": model})
        return [result for answer in answers for result in answer["results"]]

    def rerank(
        self, query: str, documents: Sequence[str], *, model: str = "", **settings: Any
    ) -> list[tuple[int, float]]:
        """[(place among the documents, score)], the best first; `settings`: task, use, top_n."""
        top = settings.pop("top_n", None)
        answers = self._in_batches(
            "/rerank", {"documents": documents}, {"query": query, "model": model, **settings}
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
        their ids. Of several texts with one id the last stays."""
        ids = [text["id"] for text in texts if text.get("id") is not None]
        in_order = len({*map(str, ids)}) < len(ids)
        answers = self._in_batches("/index", {"texts": texts}, {}, in_order=in_order)
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
        self,
        path: str,
        given: Mapping[str, Sequence[Any]],
        others: Mapping[str, Any],
        *,
        in_order: bool = False,
    ) -> list[Any]:
        """The answers for the values of some keys, a few in each request, in order. `in_order`:
        each request waits for the answer to the one before."""
        for key, values in given.items():
            if isinstance(values, str):
                raise TypeError(f"{key}: expected a list of texts, got one text")
        others = {name: value for name, value in others.items() if value not in ("", None)}
        count = max(map(len, given.values()))
        bodies = [
            {key: list(values[first : first + self._batch]) for key, values in given.items()}
            | others
            for first in range(0, count, self._batch)
        ]
        if len(bodies) == 1 or in_order:
            return [self._post(path, body) for body in bodies]
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


def _texts_or_ids(
    name: str, values: Sequence[Any], types: Sequence[Sequence[int]]
) -> Mapping[str, Sequence[Any]]:
    """The keys of a request: lists of numbers are ids, anything else has the name of texts."""
    first = values[0] if len(values) else ""
    if isinstance(first, str | Mapping) or not len(first) or isinstance(first[0], str):
        return {name: values, "token_type_ids": types} if len(types) else {name: values}
    ids = {"input_ids": [[int(x) for x in each] for each in values]}
    return ids | ({"token_type_ids": [[int(x) for x in y] for y in types]} if len(types) else {})


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
