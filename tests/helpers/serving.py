"""A server in this process: small models behind the whole application, without a socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn

from palm_ds.serve.http.app import make_app
from palm_ds.serve.http.gate import App
from palm_ds.serve.http.server import address_of, configured, listen
from palm_ds.serve.limits import ServingLimits
from palm_ds.serve.model_set import ModelSet, Served, open_set
from palm_ds.serve.served_model import ModelOptions
from palm_ds.serve.service import Service

T = TypeVar("T")


@dataclass(frozen=True)
class Local:
    """A service, and clients of its application."""

    service: Service
    token: str = ""
    allowed_hosts: Collection[str] = ()

    @cached_property
    def app(self) -> App:
        return make_app(self.service, token=self.token, allowed_hosts=self.allowed_hosts)

    def run(self, use: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        """The result of `use`, which gets a client."""

        async def main() -> T:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return await use(client)

        return asyncio.run(main())

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.run(lambda client: client.post(path, json=body, **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.run(lambda client: client.get(path, **options))

    def answer(self, path: str, body: Any) -> Any:
        """The JSON of an answer that must be right."""
        found = self.post(path, body)
        assert found.status_code == 200, found.text
        return found.json()

    def refusal(self, path: str, body: Any, **options: Any) -> tuple[int, str]:
        """The status and message of an answer that must be an error."""
        found = self.post(path, body, **options)
        error = found.json()["error"]
        assert error["code"] == found.status_code
        assert error["request_id"] == found.headers["x-request-id"]
        return found.status_code, error["message"]


@contextmanager
def local(
    opened: ModelSet, served: Served | None = None, *, token: str = "", **limits: Any
) -> Iterator[Local]:
    """A server of opened models."""
    served = served or Served(models={}, options=ModelOptions())
    service = Service(opened, served, ServingLimits(**limits))
    try:
        yield Local(service, token)
    finally:
        service.close()


def opened(**models: Path) -> tuple[ModelSet, Served]:
    """Models by name, and what they were opened from."""
    served = Served(models=models, options=ModelOptions())
    return open_set(served), served


@contextmanager
def listening(service: Service, *, token: str = "") -> Iterator[str]:
    """The URL of a server on loopback, in a thread."""
    bound = listen("127.0.0.1", 0)
    server = uvicorn.Server(configured(service, token=token))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield address_of(bound)
    finally:
        server.should_exit = True
        thread.join()
        bound.close()
