"""Names a process of the run that is lost, and ends the others, which would wait for it.

Every process has a connection to rank 0 on which both give signs of life. A connection that closes
without a farewell is a process that was killed; silence is one that hangs, or a host or link that
is gone. The collectives of torch notice only some of this, after half an hour, without a name.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from palm_ds.common import errors
from palm_ds.common.messages import print_error, printable
from palm_ds.runtime.processes import rank_status
from palm_ds.runtime.processes.launch_env import LaunchedProcess

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)
_GRACE = 2.0
"""Seconds in which a process may end by itself, for example with the same mistake."""
_COMMUNICATION = re.compile("gloo|nccl|connection|socket|peer|store", re.IGNORECASE)
_BACKLOG = 4096
"""All processes of a run connect in the same moment."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_GREETING_BYTES = 4096
ADDRESS = "palm_ds/liveness"
"""Key of the store: where rank 0 listens, and the secret of the run."""


@dataclass
class PeerLink:
    """A connection to another process, and what was heard of it."""

    connection: socket.socket
    rank: int = -1
    """-1: it has not said yet who it is."""
    host: str = ""
    step: int = 0
    heard: float = field(default_factory=time.monotonic)
    buffer: bytes = b""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host} (last step {self.step})"

    def say(self, **message: object) -> None:
        with contextlib.suppress(OSError):  # its end is noticed when reading
            self.connection.send(json.dumps(message).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None: the connection was closed."""
        try:
            data = self.connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Liveness(threading.Thread):
    """Rank 0 watches all others, which watch rank 0."""

    def __init__(
        self,
        links: list[PeerLink],
        place: LaunchedProcess,
        *,
        seconds: float,
        listener: socket.socket | None = None,
        secret: str = "",
    ):
        """`listener`: where the others connect to rank 0, with the run's `secret`."""
        super().__init__(daemon=True, name="liveness")
        self.links, self.rank, self.world, self.step = links, place.rank, place.world, 0
        self._seconds, self._listener, self._secret = seconds, listener, secret
        self._ended = threading.Event()
        self._another_failed = False
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._close)  # a worker's copy would keep them open

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def run(self) -> None:
        pause = min(self._seconds / 5, 2.0)
        with selectors.DefaultSelector() as selector:
            for link in self.links:
                selector.register(link.connection, selectors.EVENT_READ, link)
            if self._listener:
                selector.register(self._listener, selectors.EVENT_READ)
            woke = time.monotonic()
            while not self.ended:
                for link in self.links:
                    link.say(step=self.step)
                for key, _ in selector.select(pause):
                    if key.data is None:
                        self._accept(selector)
                    elif key.data.rank < 0:
                        self._greet(key.data, selector)
                    else:
                        self._read(key.data, selector)
                slept, woke = time.monotonic() - woke, time.monotonic()
                self._check_silence(forgive=slept > self._seconds / 2)
                self._ended.wait(pause / 4)

    def end(self, code: int, why: str = "") -> bool:
        """Say farewell; the others go on if `code` is that of a run that has ended. Returns
        whether another has heard of it, or has failed itself."""
        if self.ended:
            return False
        self._ended.set()
        for link in self.links:
            link.say(code=code, why=why)
        return bool(self.links) or self._another_failed

    def end_all(self, code: int, why: str) -> None:
        """Say farewell; the others end with the same code."""
        if not self.ended:
            self._ended.set()
            for link in self.links:
                link.say(lost=why, code=code)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, PeerLink(connection))

    def _greet(self, link: PeerLink, selector: selectors.BaseSelector) -> None:
        """The first message of a connection; closes those of strangers."""
        messages = None
        try:
            messages = link.hear()
            if messages == [] and len(link.buffer) < _MAX_GREETING_BYTES:
                return
            first = (messages or [{}])[0]
            ours = secrets.compare_digest(str(first["secret"]).encode(), self._secret.encode())
            link.rank, link.host = (int(first["rank"]), str(first["host"])) if ours else (-1, "")
        except (ValueError, KeyError, TypeError, RecursionError):
            link.rank = -1
        if link.rank < 0:
            selector.unregister(link.connection)
            link.connection.close()
            return
        self.links.append(link)
        if len(self.links) == self.world - 1 and self._listener:
            selector.unregister(self._listener)
            self._listener.close()
        self._take(link, messages or (), selector)  # it may have left again

    def _read(self, link: PeerLink, selector: selectors.BaseSelector) -> None:
        messages = link.hear()
        if messages is None:
            self._leave(f"{link.name} was killed or crashed", errors.FAILED, lost=link)
        self._take(link, messages or (), selector)

    def _take(
        self,
        link: PeerLink,
        messages: Sequence[Mapping[str, Any]],
        selector: selectors.BaseSelector,
    ) -> None:
        for message in messages:
            if "step" in message:
                link.step = message["step"]
            if "lost" in message:
                self._leave(message["lost"], message["code"])
            if "code" in message:
                selector.unregister(link.connection)
                self.links.remove(link)
                self._farewell(link, message["code"], message.get("why", ""))
                return

    def _farewell(self, link: PeerLink, code: int, why: str) -> None:
        if code in (errors.FINISHED, errors.STOPPED):
            return
        self._another_failed = True
        text = f"{link.name} ended with exit code {code}" + (f": {why}" if why else "")
        final = code in errors.FINAL or code == errors.WATCHDOG
        self._leave(text, code if final else errors.FAILED)

    def _check_silence(self, *, forgive: bool) -> None:
        """`forgive`: this process itself was suspended."""
        now = time.monotonic()
        for link in self.links:
            if forgive:
                link.heard = now
            elif now - link.heard > self._seconds:
                text = f"{link.name} has given no sign of life for {self._seconds:g} seconds"
                self._leave(text, errors.WATCHDOG, lost=link)

    def _leave(self, text: str, code: int, lost: PeerLink | None = None) -> None:
        """End this process, and from rank 0 all others, unless it is ending anyway."""
        if self.rank == 0:
            for link in self.links:
                if link is not lost:
                    link.say(lost=text, code=code)
        if self._ended.wait(_GRACE):
            return
        first_of_host = os.environ.get("LOCAL_RANK") == "0" or self.rank == 1
        if self.rank == 0 or (lost and first_of_host):
            line = f"error: {text}; this run ends; the same command continues it"
            print_error(printable(line))
        rank_status.report(code=code, why=text)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)

    def _at_exit(self) -> None:
        self.end(errors.FAILED if getattr(sys, "last_value", None) else errors.FINISHED)

    def _close(self) -> None:
        for link in self.links:
            link.connection.close()
        if self._listener:
            self._listener.close()


def start(place: LaunchedProcess, seconds: float, store: Store) -> None:
    """Give signs of life from now on, and watch those of the others. `seconds` of silence: lost;
    0: never. `store`: where rank 0 says at which port it listens."""
    if not seconds or running():
        return
    if place.rank == 0:
        listener, secret = _listen(place.address), secrets.token_hex(16)
        facts = {"port": listener.getsockname()[1], "secret": secret, "host": socket.gethostname()}
        Liveness([], place, seconds=seconds, listener=listener, secret=secret).start()
        store.set(ADDRESS, json.dumps(facts))
    else:
        links = _connect(place, json.loads(store.get(ADDRESS)), seconds)
        Liveness(links, place, seconds=seconds).start()


def warn_of_the_unwatched() -> None:
    """On rank 0, once all processes have joined: whether signs of life come from all of them."""
    thread = running()
    if thread is None or thread.rank:
        return
    deadline = time.monotonic() + _GRACE
    while (missing := thread.world - 1 - len(thread.links)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if missing:
        log.warning("%d processes cannot be watched: they do not reach a port of rank 0", missing)


def running() -> Liveness | None:
    """The thread of this process."""
    threads = (thread for thread in threading.enumerate() if isinstance(thread, Liveness))
    return next((thread for thread in threads if not thread.ended), None)


def reached(step: int) -> None:
    """This process has completed `step` steps."""
    if thread := running():
        thread.step = step


def end(code: int, why: str = "") -> bool:
    """This process leaves the run; returns whether another has heard of it, or failed, too."""
    thread = running()
    return thread is not None and thread.end(code, why)


def leave_if_another_was_lost(error: BaseException) -> None:
    """Ends this process, with one line, if `error` comes from the loss of another one."""
    thread = running()
    if thread and isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error)):
        thread.join(_GRACE * 3)  # it ends this process


def end_all(code: int, why: str) -> None:
    """This process leaves the run before its first step; the others cannot do without it."""
    if thread := running():
        thread.end_all(code, why)


def _listen(address: str) -> socket.socket:
    """A server on the loopback interface if no other host takes part. `address`: of rank 0, as the
    launcher gives it to all processes."""
    if address in _LOOPBACK:
        return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    try:
        return socket.create_server(
            ("::", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    except (OSError, ValueError):
        return socket.create_server(("", 0), backlog=_BACKLOG)


def _connect(place: LaunchedProcess, facts: Mapping[str, Any], seconds: float) -> list[PeerLink]:
    """The connection to rank 0, if it can be reached."""
    with contextlib.suppress(OSError):
        address = "127.0.0.1" if place.address in _LOOPBACK else place.address
        connection = socket.create_connection((address, facts["port"]), timeout=seconds)
        link = PeerLink(connection, 0, facts["host"])
        link.say(secret=facts["secret"], rank=place.rank, host=socket.gethostname())
        connection.setblocking(False)
        return [link]
    return []
