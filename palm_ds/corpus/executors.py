"""Maps a function over items in this process, in several processes, or on several machines.

    with open_executor(workers=4, mpi=False, watch=show) as run:
        for result in run(function, items):      # in the items' order, few of them in flight
            ...

Functions are pickled by name and read their job from disk, so that all three work alike.
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

from palm_ds.common.errors import UserError, first_line

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray

IN_FLIGHT = 2  # items submitted per worker
_POLL_SECONDS = 0.2


class ProgressCallback(Protocol):
    """Called from time to time with the bytes of text and of input processed."""

    def __call__(self, text_bytes: int, input_bytes: int) -> None: ...


ParallelMap = Callable[[Callable[..., Any], Iterable[Any]], Iterator[Any]]


_COUNT: ContextVar[ProgressCallback] = ContextVar("count")
"""Receives the progress of the work: set during a run in this process, permanently in a worker."""


def report_progress(text_bytes: int, input_bytes: int) -> None:
    """Reports newly processed bytes, from inside the mapped function."""
    _COUNT.get(lambda text_bytes, input_bytes: None)(text_bytes, input_bytes)


def _sum_for(watch: ProgressCallback) -> ProgressCallback:
    """Calls `watch` with running totals."""
    text, done = 0, 0

    def add(text_bytes: int, input_bytes: int) -> None:
        nonlocal text, done
        text, done = text + text_bytes, done + input_bytes
        watch(text, done)

    return add


def _add_to(counts: SynchronizedArray[int]) -> ProgressCallback:
    """Adds progress to an array shared with the parent process."""

    def add(text_bytes: int, input_bytes: int) -> None:
        with counts.get_lock():
            counts[0] += text_bytes
            counts[1] += input_bytes

    return add


@contextmanager
def open_executor(
    *, workers: int, mpi: bool, watch: ProgressCallback | None = None
) -> Iterator[ParallelMap]:
    """Yields the function that maps others over items: see the top of this file."""
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
def _watched(watch: ProgressCallback | None) -> Iterator[None]:
    """Sends progress in this process to `watch`."""
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
    """Yields results in the order of the items, with at most `in_flight` of them submitted."""
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
                "a worker process was killed, perhaps because memory ran out; repeat the command "
                "with fewer --workers to resume"
            ) from None
        except TimeoutError:
            if future.done():
                raise
        finally:
            if report:
                report()


def _begin_worker(counts: SynchronizedArray[int]) -> None:
    """Initializes a worker: it uses one core, reports progress to its parent and exits with it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops workers
    _COUNT.set(_add_to(counts))
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def check_mpi() -> int:
    """Returns the number of MPI workers. Raises UserError unless this process is the master of at
    least one; call it before any work that only one process may do."""
    try:
        from mpi4py import MPI
        from mpi4py.futures import _core
    except (ImportError, RuntimeError) as error:
        reason = first_line(error)
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
