"""A connection that waits for no client for ever.

uvicorn bounds the pause between two requests. It bounds neither the time nor (with httptools) the
size of what comes before a request's body, nor the time in which a client reads its answer: such
clients would keep their connections, and what is stored for these, as long as they like. Nor does
it bound the number of connections: they would take all files that the process may open, also those
of a search, and clients that come later would be cut off without an answer.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from palm_ds.serve.http.gate import SECURITY_HEADERS, log, new_request_id, refusal
from palm_ds.serve.limits import RequestError

LARGEST_HEAD = 1 << 16  # bytes of a request line with its headers
_MOST = 8192
_OTHER_FILES = 128  # that the process may open: models, databases, connections that are refused
_REFUSED_AT_ONCE = 64
_REFUSED_SECONDS = 1.0  # in which the client sends the request that is refused


def most_connections() -> int:
    """The number of connections that this process keeps open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST
    return min(max(files - _OTHER_FILES, files // 2), _MOST)


class _WriteWhileOpen:
    """A transport that ignores what is written once the connection is lost, where uvloop's raises.
    uvicorn tells only the last of several pipelined requests that their client has left."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self.lost:
            self._transport.write(data)


class BoundedConnection(asyncio.Protocol):
    """Passes everything on to uvicorn. Closes the connection of a client that sends no whole head
    of a request in `seconds`, or reads nothing of its answer in that time. If more than `most`
    connections are open, answers the first request with 503 and closes the connection."""

    def __init__(self, *, seconds: float, most: int, **given: Any) -> None:
        """`given`: what uvicorn gives its protocol."""
        self._http: Any = AutoHTTPProtocol(**given)
        not_http = RequestError(400, "not a request of HTTP/1.1")
        self._http.send_400_response = lambda _: self._refuse(not_http)
        self._seconds, self._most = seconds, most
        self._is_one_too_many = False
        self._head = 0  # bytes of an unfinished head
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._written = _WriteWhileOpen(self._transport)
        self._http.connection_made(self._written)
        too_many = len(self._http.connections) - self._most
        if too_many > _REFUSED_AT_ONCE:
            self._transport.abort()
        elif too_many > 0:
            self._is_one_too_many = True
            self._seconds = min(self._seconds, _REFUSED_SECONDS)
        self._late = self._after(self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in filter(None, (self._late, self._stuck)):
            timer.cancel()
        self._written.lost = True
        self._http.connection_lost(exc)

    def _after(self, action: Callable[..., object], *values: object) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._seconds, action, *values)

    # ---- what the client sends ----

    def data_received(self, data: bytes) -> None:
        if self._is_one_too_many:
            line = f"{self._most:,} connections are open, as many as this server keeps"
            self._refuse(RequestError(503, line, retry_after=1))
            return
        self._http.data_received(data)
        request = self._http.cycle
        if request is not None and not request.response_complete:
            self._head = 0
            if self._late:
                self._late = self._late.cancel()
            return
        self._head += len(data)
        if self._head > LARGEST_HEAD:
            line = f"the head of the request has more than {LARGEST_HEAD:,} bytes"
            self._refuse(RequestError(431, line))
        self._late = self._late or self._after(self._transport.close)

    def _refuse(self, error: RequestError) -> None:
        """Answer what cannot be read as a request, in the form of all errors, and close."""
        request = self._http.cycle
        # while another request waits for its answer, it would take this one for it
        if (
            request is None
            or request.response_complete
            or (request.more_body and not request.response_started)
        ):
            made = new_request_id()
            headers, body = refusal(error, made, close=True)
            headers += [(b"x-request-id", made.encode()), *SECURITY_HEADERS]
            phrase = HTTPStatus(error.status).phrase.encode()
            lines = [b"HTTP/1.1 %d %s" % (error.status, phrase)]
            lines += [name + b": " + value for name, value in headers]
            self._written.write(b"\r\n".join([*lines, b"", body]))
            client = (self._http.client or "-")[0]
            log.info("%s %s - %d %s", made, client, error.status, error.message)
        self._transport.close()

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    # ---- what it reads ----

    def pause_writing(self) -> None:
        self._http.pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._http.resume_writing()
        if self._stuck:
            self._stuck = self._stuck.cancel()

    def _watch(self, before: int = -1) -> None:
        """Abort if as much is left to send as before."""
        left = self._transport.get_write_buffer_size()
        if left == before:
            self._transport.abort()
        self._stuck = self._after(self._watch, left)
