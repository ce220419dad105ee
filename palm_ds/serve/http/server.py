"""Runs the application with uvicorn until a signal says to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, cast

import uvicorn

from palm_ds.common.errors import UserError
from palm_ds.serve.http.app import make_app
from palm_ds.serve.http.connection import BoundedConnection, most_connections
from palm_ds.serve.limits import RequestError
from palm_ds.serve.service import Service

log = logging.getLogger(__name__)
_KEEP_ALIVE = 30  # seconds that an idle connection stays open
_BACKLOG = 1024
_SWITCH = 0.0002  # seconds


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0: any that is free. Raises UserError."""
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port {port}: expected 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host}: {error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        # two sockets that do not listen yet may be bound to the same port
        bound.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        bound.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise UserError(f"--port {port}: in use on {host}; choose another, or 0") from None
        raise UserError(f"--host {host} --port {port}: {error}") from None
    return bound


def address_of(bound: socket.socket) -> str:
    """`http://127.0.0.1:8080`"""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configured(
    service: Service, *, token: str = "", allowed_hosts: Collection[str] = ()
) -> uvicorn.Config:
    """Configuration of uvicorn for the application."""
    bounds = {"seconds": service.limits.read_timeout, "most": most_connections()}
    return uvicorn.Config(
        cast(Any, make_app(service, token=token, allowed_hosts=allowed_hosts)),
        http=cast(Any, partial(BoundedConnection, **bounds)),
        ws="none",
        log_config=None,
        access_log=False,  # the gate has its own
        server_header=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(service.limits.drain_timeout)),
    )


def serve(
    service: Service,
    bound: socket.socket,
    *,
    token: str = "",
    allowed_hosts: Collection[str] = (),
    ready: Callable[[], None],
) -> None:
    """Answer requests until SIGTERM or SIGINT, then those that were accepted; SIGHUP reloads.
    `ready` is called when the signals do so and the first request can be answered."""
    # A forward pass takes the interpreter again after each operation; threads that parse requests
    # would make it wait 5 ms each time.
    sys.setswitchinterval(_SWITCH)
    config = configured(service, token=token, allowed_hosts=allowed_hosts)
    _Server(config, service, ready).run(sockets=[bound])


class _Server(uvicorn.Server):
    """With signals that stop it gently or reload its models."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready
        self._reloads: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        yield
        log.info("stopped")

    def _stop(self) -> None:
        """Accept nothing more and answer what was accepted; the second time stop immediately."""
        self.force_exit = self._service.draining
        log.info("stopping: %d texts in work", self._service.in_work)
        self._service.draining = self.should_exit = True

    def _reload(self) -> None:
        task = asyncio.get_running_loop().create_task(_reload(self._service))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)


async def _reload(service: Service) -> None:
    with contextlib.suppress(RequestError):  # it is logged
        await service.reload()
