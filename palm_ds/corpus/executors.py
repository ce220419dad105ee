"""One function over many units: in this process, in several, or on several machines.

    with open_executor(workers=4, mpi=False, progress=show) as run:
        for result in run(function, items):      # in the items' order, few of them in flight
            ...

The functions are pickled by name and find their job on the disk, so that the three ways are one.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Protocol

from palm_ds.common.errors import UserError

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray

IN_FLIGHT = 2  # units handed out for each worker
_POLL_SECONDS = 0.2


class Watch(Protocol):
    """Called from time to time with the bytes of text and of input that are done."""

    def __call__(self, text_bytes: int, input_bytes: int) -> None: ...


Run = Callable[[Callable[..., Any], Iterable[Any]], Iterator[Any]]


_COUNT: ContextVar[Watch] = ContextVar("count")
"""Where the work counts into: set for the time of a run here, for good in a worker process."""


def count(text_bytes: int, input_bytes: int) -> None:
    """Reports, from inside the work, how much has just been done."""
    _COUNT.get(lambda text_bytes, input_bytes: None)(text_bytes, input_bytes)


def _sum_for(watch: Watch) -> Watch:
    """Calls `watch` with the sums of what is counted."""
    text, done = 0, 0

    def add(text_bytes: int, input_bytes: int) -> None:
        nonlocal text, done
        text, done = text + text_bytes, done + input_bytes
        watch(text, done)

    return add


def _add_to(counts: SynchronizedArray[int]) -> Watch:
    """Adds what is counted to an array shared with the parent process."""

    def add(text_bytes: int, input_bytes: int) -> None:
        with counts.get_lock():
            counts[0] += text_bytes
            counts[1] += input_bytes

    return add


@contextmanager
def open_executor(*, workers: int, mpi: bool, watch: Watch | None = None) -> Iterator[Run]:
    """The function that runs others: see the top of this file."""
    if mpi:
        with _watched(watch), _open_mpi() as (executor, machines):
            flight = IN_FLIGHT * machines
            yield lambda function, items: _in_order(executor, function, items, flight, None)
    elif workers <= 1:
        with _watched(watch):
            yield lambda function, items: map(function, items)
    else:
        context = multiprocessing.get_context("spawn")
        counts = context.Array(ctypes.c_int64, 2)
        executor = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_begin_worker, initargs=(counts,)
        )
        report = (lambda: watch(counts[0], counts[1])) if watch else None
        try:
            flight = IN_FLIGHT * workers
            yield lambda function, items: _in_order(executor, function, items, flight, report)
        finally:
            executor.shutdown(cancel_futures=True)


@contextmanager
def _watched(watch: Watch | None) -> Iterator[None]:
    """What is counted in this process goes to `watch`."""
    if watch is None:
        yield
        return
    token = _COUNT.set(_sum_for(watch))
    try:
        yield
    finally:
        _COUNT.reset(token)


def _in_order(
    executor: Executor,
    function: Callable[..., Any],
    items: Iterable[Any],
    in_flight: int,
    report: Callable[[], None] | None,
) -> Iterator[Any]:
    """Results in the order of the items, never more than `in_flight` of them begun."""
    pending: deque[Future] = deque()
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) >= in_flight:
                yield _result(pending.popleft(), report)
        while pending:
            yield _result(pending.popleft(), report)
    finally:
        for future in pending:
            future.cancel()


def _result(future: Future, report: Callable[[], None] | None) -> Any:
    while True:
        try:
            return future.result(timeout=_POLL_SECONDS if report else None)
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed, perhaps for want of memory; run the same command "
                "again to go on, with fewer --workers"
            ) from None
        except TimeoutError:
            if future.done():
                raise
        finally:
            if report:
                report()


def _begin_worker(counts: SynchronizedArray[int]) -> None:
    """A worker uses one core, counts for its parent and ends with it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    _COUNT.set(_add_to(counts))
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def check_mpi() -> int:
    """The number of MPI workers; a mistake if this is not the master of some. To be called before
    anything that only one of several processes may do."""
    try:
        from mpi4py import MPI
        from mpi4py.futures import _core
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--mpi needs mpi4py and an MPI library (pip install mpi4py mpich): {reason}"
        ) from None
    workers = MPI.COMM_WORLD.Get_size() - 1
    if workers < 1 or getattr(_core, "SharedPool", True) is None:
        raise UserError(
            "--mpi: no workers; start it as mpirun -n N python -m mpi4py.futures "
            "-m palm_ds.cli.prepare ..., with N at least 2"
        )
    return workers


@contextmanager
def _open_mpi() -> Iterator[tuple[Executor, int]]:
    workers = check_mpi()
    from mpi4py.futures import MPIPoolExecutor

    with MPIPoolExecutor(env={"TOKENIZERS_PARALLELISM": "false"}) as executor:
        yield executor, workers
