"""A connection that waits for no client for ever.

uvicorn bounds the pause between two requests. It bounds neither the time nor (with httptools) the
size of what comes before a request's body, nor the time in which a client reads its answer: such
clients would keep their connections, and what is stored for these, as long as they like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from palm_ds.serve.http.gate import SECURITY_HEADERS, log, new_request_id, refusal
from palm_ds.serve.limits import RequestError

LARGEST_HEAD = 1 << 16  # bytes of a request line with its headers


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
    of a request in `seconds`, or reads nothing of its answer in that time."""

    def __init__(self, *, seconds: float, **given: Any) -> None:
        """`given`: what uvicorn gives its protocol."""
        self._http: Any = AutoHTTPProtocol(**given)
        self._http.send_400_response = lambda _: self._refuse(400, "not a request of HTTP/1.1")
        self._seconds = seconds
        self._head = 0  # bytes of an unfinished head
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._written = _WriteWhileOpen(self._transport)
        self._http.connection_made(self._written)
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
        self._http.data_received(data)
        request = self._http.cycle
        if request is not None and not request.response_complete:
            self._head = 0
            if self._late:
                self._late = self._late.cancel()
            return
        self._head += len(data)
        if self._head > LARGEST_HEAD:
            self._refuse(431, f"the head of the request has more than {LARGEST_HEAD:,} bytes")
        self._late = self._late or self._after(self._transport.close)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what cannot be read as a request, in the form of all errors, and close."""
        request = self._http.cycle
        # while another request waits for its answer, it would take this one for it
        if (
            request is None
            or request.response_complete
            or (request.more_body and not request.response_started)
        ):
            made = new_request_id()
            headers, body = refusal(RequestError(status, message), made)
            headers += [(b"x-request-id", made.encode()), *SECURITY_HEADERS]
            lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
            lines += [name + b": " + value for name, value in headers]
            self._written.write(b"\r\n".join([*lines, b"", body]))
            log.info("%s %s - %d %s", made, (self._http.client or "-")[0], status, message)
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
