"""Checks that every request passes before a route sees it, as ASGI middleware.

    bytes ──id, host, token, size, time to send──> the whole body ──route──> answer, log, metrics

A client that goes away is noticed, and what it asked for is dropped. Every refusal has the body of
`error_body` and the id of its request.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from palm_ds.serve.limits import FAILED, RequestError, ServingLimits, error_body
from palm_ds.serve.service import Service

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

log = logging.getLogger("palm_ds.serve.access")

OPEN = ("/", "/health", "/ready", "/docs", "/openapi.json")
"""Paths that need no token: they tell nothing about models or texts. Also those under /static/."""
_ID = re.compile(r"[\w.:-]{1,64}")
ANY_HOST = "*"
SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
"""Of every answer: a page loads nothing from elsewhere, runs no script of a text that it shows, and
is in no frame of another page."""
_QUIET = ("health", "ready", "metrics_text")  # polled: not logged
_UNREAD = (400, 401, 408, 413, 421)  # what the client still sends is not read


class _ClientLeftError(Exception):
    """The client has closed its connection."""


@dataclass
class _Exchange:
    """One request and its result."""

    id: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    answered: bool = False
    """Whether all of the answer was sent; for uvicorn the client is then gone."""


@dataclass(frozen=True)
class Gate:
    """Wraps the app of the routes."""

    app: App
    service: Service
    token: str = ""
    """What clients must send as `Authorization: Bearer ...`; empty: nothing."""
    allowed_hosts: Collection[str] = ()
    """Names of this server in requests, besides addresses and localhost; `*`: any."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(_request_id(scope))
        scope.setdefault("state", {})["request_id"] = exchange.id
        sending = _with_headers(send, exchange, only_head=scope["method"] == "HEAD")
        try:
            self._check_host(scope)
            self._authorize(scope)
            body = await _body(scope, receive, self.service.limits)
            await self._routed(scope, body, receive, sending, exchange)
        except RequestError as error:
            await refuse(sending, error, exchange.id)
        except _ClientLeftError:
            exchange.status = 499
        except asyncio.CancelledError:  # the server has waited long enough for what it accepted
            if not exchange.status:
                late = RequestError(503, "this server has stopped", retry_after=1)
                await refuse(sending, late, exchange.id)
        except Exception:  # a bug: the client learns the request's id, the log has the rest
            log.exception("request %s failed", exchange.id)
            if not exchange.status:
                await refuse(sending, RequestError(500, FAILED), exchange.id)
        finally:
            self._note(scope, exchange)

    def _check_host(self, scope: MutableMapping[str, Any]) -> None:
        """Raises RequestError for a name that is not this server's. A browser sends the name it
        looked up, so a page elsewhere whose name was rebound to this address is refused."""
        given = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        if len(given) > 1 or (not given and scope["http_version"] != "1.0"):
            raise RequestError(400, f"{len(given)} Host headers; expected one")
        if given and ANY_HOST not in self.allowed_hosts and not self._is_ours(given[0]):
            raise RequestError(
                421, f"Host {given[0]!r}: not a name of this server; --allowed_host adds one"
            )

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            return False
        if name == "localhost" or name.endswith(".localhost") or name in self.allowed_hosts:
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _authorize(self, scope: MutableMapping[str, Any]) -> None:
        path = scope["path"]
        read = scope["method"] in ("GET", "HEAD")  # a POST to / is text-embeddings-inference's
        if not self.token or (read and (path in OPEN or path.startswith("/static/"))):
            return
        given = _header(scope, b"authorization")
        scheme, _, value = given.partition(b" ")
        same = hmac.compare_digest(value.strip(), self.token.encode())  # in constant time
        if scheme.lower() != b"bearer" or not same:
            raise RequestError(401, "send the server's token: Authorization: Bearer TOKEN")

    async def _routed(
        self,
        scope: MutableMapping[str, Any],
        body: bytes,
        receive: Receive,
        send: Send,
        exchange: _Exchange,
    ) -> None:
        """The answer of the routes, unless the client leaves before. Raises _ClientLeftError."""
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await asyncio.Future()

        # uvicorn sends no body to HEAD
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        answer = asyncio.ensure_future(self.app(asked, replay, send))
        left = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and not exchange.answered:
                raise _ClientLeftError
            await answer  # a file is closed after it was sent
            scope["endpoint"] = asked.get("endpoint")
        finally:
            for task in (answer, left):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    def _note(self, scope: MutableMapping[str, Any], exchange: _Exchange) -> None:
        """Count the request and log it in one line."""
        route = scope.get("endpoint")
        endpoint = getattr(route, "__name__", "none")
        seconds = time.monotonic() - exchange.started
        self.service.metrics.request(endpoint, exchange.status, seconds)
        if endpoint in _QUIET and exchange.status == 200:
            return
        client = (scope.get("client") or ("-",))[0]
        log.info(
            "%s %s %s %s %d %.1fms",
            *(exchange.id, client, scope["method"], _printable(scope["path"])),
            *(exchange.status, 1000 * seconds),
        )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(scope: MutableMapping[str, Any], receive: Receive, limits: ServingLimits) -> bytes:
    """The whole body. Raises RequestError if it is too large or comes too slowly."""
    length = _header(scope, b"content-length")
    if length.isdigit() and int(length) > limits.max_bytes:
        raise _too_large(limits)
    try:
        return await asyncio.wait_for(_read(receive, limits), limits.read_timeout)
    except TimeoutError:
        raise RequestError(408, f"no whole request in {limits.read_timeout:g} s") from None


async def _read(receive: Receive, limits: ServingLimits) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeftError
        parts += message.get("body", b"")
        if len(parts) > limits.max_bytes:
            raise _too_large(limits)
        if not message.get("more_body"):
            return bytes(parts)


def _too_large(limits: ServingLimits) -> RequestError:
    return RequestError(413, f"the body has more than {limits.max_bytes:,} bytes")


async def refuse(send: Send, error: RequestError, request_id: str) -> None:
    """Send an error as the answer."""
    headers, body = refusal(error, request_id)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def refusal(
    error: RequestError, request_id: str, *, close: bool = False
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """(headers, body) of an error. `close`: the connection is closed after it."""
    body = json.dumps(error_body(error.status, error.message, request_id)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in headers_of(error).items()]
    if close or error.status in _UNREAD:
        headers.append((b"connection", b"close"))
    return headers, body


def headers_of(error: RequestError) -> dict[str, str]:
    """The headers that belong to an error."""
    if error.retry_after:
        return {"retry-after": str(error.retry_after)}
    return {"www-authenticate": "Bearer"} if error.status == 401 else {}


def _with_headers(send: Send, exchange: _Exchange, *, only_head: bool) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            own = (b"x-request-id", exchange.id.encode())
            message["headers"] = [*message.get("headers", []), own, *SECURITY_HEADERS]
            exchange.answered = only_head
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            exchange.answered = True
        await send(message)

    return sending


def _request_id(scope: MutableMapping[str, Any]) -> str:
    """The client's, if it is a plain word; else a new one."""
    given = _header(scope, b"x-request-id").decode("latin-1")
    return given if _ID.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    return secrets.token_hex(8)


def _header(scope: MutableMapping[str, Any], name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _printable(path: str) -> str:
    """A path that cannot forge another line of the log."""
    return path.encode("unicode_escape").decode()[:200]
