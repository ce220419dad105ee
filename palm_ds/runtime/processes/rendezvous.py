"""Brings the processes of a run together, and says which of them it waits for.

torch waits half an hour for a process that does not come, in silence, and no signal has an effect
meanwhile. Here a thread waits, each process gives signs of life as soon as it is there, and the
main thread says every 30 seconds who is missing. torch then finds all of them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from palm_ds.common import errors
from palm_ds.common.errors import TemporaryError, UserError, first_line
from palm_ds.runtime.processes import liveness
from palm_ds.runtime.processes.launch_env import LaunchedProcess
from palm_ds.runtime.processes.launchers import host_of

_TELL_SECONDS = 30.0
_MAX_NAMED = 8
_ARRIVED, _ALL = "palm_ds/arrived", "palm_ds/all"
"""Keys of the store: how many processes are there; set once all are."""
log = logging.getLogger(__name__)


def meet(place: LaunchedProcess, *, peer_seconds: float, timeout: timedelta) -> Rendezvous:
    """Wait for all processes of the run. Raises UserError if a rank was started twice,
    TemporaryError after `timeout` or if rank 0 cannot listen."""
    meeting = Rendezvous(place, peer_seconds, timeout)
    meeting.start()
    began = reported = time.monotonic()
    while meeting.is_alive():
        meeting.join(0.1)
        now = time.monotonic()
        if now - began > timeout.total_seconds():
            minutes = timeout.total_seconds() / 60
            text = f"waited {minutes:g} minutes for {meeting.missing or 'the others'}"
            meeting.give_up()
            raise TemporaryError(text, errors.WATCHDOG)
        if now - reported > _TELL_SECONDS and meeting.missing:
            reported = now
            log.warning("waits for %s", meeting.missing)
    if meeting.error is not None:
        raise meeting.error
    liveness.warn_of_the_unwatched()
    return meeting


class Rendezvous(threading.Thread):
    """A store that all processes have reached, until `close`."""

    def __init__(self, place: LaunchedProcess, peer_seconds: float, timeout: timedelta):
        super().__init__(daemon=True, name="rendezvous")
        self.place, self.missing = place, ""
        self.error: BaseException | None = None
        self._peer_seconds, self._timeout = peer_seconds, timeout
        self._store: Store | None = None
        self._over = threading.Event()

    def run(self) -> None:
        try:
            self._store = store = self._open_store()
            self._arrive(store)
        except BaseException as error:
            self.error = error

    def give_up(self) -> None:
        """End the thread: Python would abort the process if it ended inside torch's calls."""
        self._over.set()
        self.join(2)

    def close(self) -> None:
        """Forget this rendezvous: the processes may have another one later. To be called once
        torch has connected all of them."""
        assert self._store is not None
        self._store.delete_key(_key(self.place.rank))
        if self.place.rank == 0:
            for key in (_ARRIVED, _ALL, liveness.ADDRESS):
                self._store.delete_key(key)
        self._store = None

    def _open_store(self) -> Store:
        """The store of the run, which rank 0 or torchrun's agent holds."""
        address, port = self.place.address, self.place.port
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        pause = 0.02
        if self.place.rank == 0 and not agent:
            while problem := _why_unknown(address):
                self.missing = f"MASTER_ADDR={address}: {problem}"
                pause = self._pause(pause, most=2.0)
            self.missing = f"MASTER_ADDR={address}, which does not lead back to rank 0"
            return self._make_store(address, port)
        while problem := _why_unreachable(address, port):
            self.missing = f"{self._named(0)} at {address}:{port}: {problem}"
            pause = self._pause(pause, most=2.0)
        self.missing = f"{self._named(0)} at {address}:{port}"
        options = {"timeout": self._timeout, "wait_for_workers": False}
        store = TCPStore(address, port, self.place.world, is_master=False, **options)
        if not agent:
            return store
        # torchrun's store outlives the processes that it starts again
        return PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def _make_store(self, address: str, port: int) -> Store:
        """The store, held by this process. Raises TemporaryError."""
        options = {"timeout": self._timeout, "wait_for_workers": False, "multi_tenant": True}
        try:
            return TCPStore(address, port, self.place.world, is_master=True, **options)
        except (dist.DistError, RuntimeError) as error:
            taken = "in use" in str(error)
            why = "the port is in use" if taken else first_line(error)
            raise TemporaryError(
                f"MASTER_PORT={port}: rank 0 cannot listen there: {why}; choose another port"
            ) from None

    def _arrive(self, store: Store) -> None:
        rank = self.place.rank
        if store.add(_key(rank), 1) > 1:
            raise UserError(f"RANK={rank}: started twice; each process needs a rank of its own")
        liveness.start(self.place, self._peer_seconds, store)
        store.add(_ARRIVED, 1)
        self.missing = ""
        pause, looked = 0.01, time.monotonic()
        while rank and not store.check([_ALL]):
            pause = self._pause(pause, most=0.5)
        while not rank and store.add(_ARRIVED, 0) < self.place.world:
            pause = self._pause(pause, most=0.2)
            if time.monotonic() - looked > _TELL_SECONDS / 10:
                ranks = range(1, self.place.world)
                self.missing = self._list([r for r in ranks if not store.check([_key(r)])])
                looked = time.monotonic()
        if not rank:
            store.set(_ALL, "")

    def _pause(self, seconds: float, *, most: float) -> float:
        """Wait; returns how long the next time. Raises TemporaryError if nobody waits any more."""
        if self._over.wait(seconds):
            raise TemporaryError("the wait is over", errors.WATCHDOG)
        return min(1.3 * seconds, most)

    def _list(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
        return ", ".join(map(self._named, ranks[:_MAX_NAMED])) + more

    def _named(self, rank: int) -> str:
        host = host_of(rank)
        return f"rank {rank} of {host}" if host else f"rank {rank}"


def _key(rank: int) -> str:
    return f"palm_ds/rank/{rank}"


def _why_unknown(address: str) -> str:
    """Empty if the address is one, or the name of one. torch would wait for it without a word."""
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _why_unreachable(address: str, port: int) -> str:
    """Empty if somebody listens there. torch would print a stack for each attempt."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
