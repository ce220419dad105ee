"""Requests that a run saves and stops: SIGTERM, SIGUSR1 (what many batch jobs ask Slurm for),
Ctrl-C, the end of its terminal or its launcher."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType

import psutil

from palm_ds.common import errors
from palm_ds.common.messages import leave_closed_terminal, print_error
from palm_ds.runtime.processes import liveness, rank_status, run_lock
from palm_ds.runtime.processes.launchers import has_ended, launchers

_LOOK_SECONDS = 1.0
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
log = logging.getLogger(__name__)


@dataclass
class StopFlag:
    """Set by SIGTERM, SIGUSR1, SIGHUP, Ctrl-C and when a launcher has ended; read between steps."""

    signalled: bool = False
    interrupted: bool = False
    """By Ctrl-C, or the stop button of a notebook."""
    launchers: list[psutil.Process] = field(default_factory=list)
    starting: bool = False
    """There is nothing to save yet."""

    @property
    def stop_requested(self) -> bool:
        """Without this, processes whose launcher was killed would continue unnoticed, alongside
        those of the next start."""
        if not self.signalled and any(map(has_ended, self.launchers)):
            log.info("the launcher has ended: saves and stops")
            self.signalled = True
        return self.signalled


@contextmanager
def stop_signals(*, starting: bool = False) -> Iterator[StopFlag]:
    """Within the context, SIGTERM, SIGINT, SIGHUP (unless `nohup` ignores it) and SIGUSR1 (unless
    the program handles it already, as submitit does) request that the run saves and stops; a second
    Ctrl-C (more than two seconds later) interrupts it immediately.

    `starting`, for whole programs: until the flag's `starting` is set to False there is nothing to
    save, and they end the process immediately. Signals that come after a request, while the program
    ends, have no effect."""
    flag = StopFlag(launchers=launchers(), starting=starting)

    def handle(number: int, frame: FrameType | None) -> None:
        leave_closed_terminal()
        if flag.starting:
            return  # _end_start does it, also where the main thread is in C++ and never comes here
        if flag.signalled and number == signal.SIGINT and time.monotonic() - first[0] > 2:
            raise KeyboardInterrupt
        first[0] = first[0] or time.monotonic()
        flag.signalled = True
        flag.interrupted |= number == signal.SIGINT

    first = [0.0]
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {s: signal.signal(s, handle) for s in _STOPPING if not _is_taken(s)}
    with _watched_start(flag) if before and starting else nullcontext():
        try:
            yield flag
        finally:
            for number, handler in before.items():
                ending = starting and flag.signalled
                signal.signal(number, signal.SIG_IGN if ending else handler)


def _is_taken(number: int) -> bool:
    """Whether the signal means something else in this program."""
    handler = signal.getsignal(number)
    if number == signal.SIGHUP:
        return handler is signal.SIG_IGN
    return number == signal.SIGUSR1 and callable(handler)


@contextmanager
def _watched_start(flag: StopFlag) -> Iterator[None]:
    """A thread acts on signals until the start is over. Python's own handlers wait for the main
    thread, and what they raise is lost in a destructor or in somebody's `except`."""
    inward, outward = os.pipe()
    os.set_blocking(outward, False)
    signal.set_wakeup_fd(outward, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget_wakeup)  # of the parent, which is still starting
    watcher = threading.Thread(target=_watch_start, args=(flag, inward), daemon=True, name="start")
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        os.close(outward)
        watcher.join()
        os.close(inward)  # not when the start is over: signals still go into the pipe


def _watch_start(flag: StopFlag, descriptor: int) -> None:
    going_on = True
    while going_on:
        going_on = flag.starting  # once more after it is over: the handler left that signal to us
        pause = _LOOK_SECONDS if going_on else 0.0
        if select.select([descriptor], [], [], pause)[0]:
            numbers = set(os.read(descriptor, 64))
            flag.signalled |= bool(numbers & {*_STOPPING})
            going_on = going_on and bool(numbers)
        if going_on and flag.stop_requested and flag.starting:
            _end_start()


def _end_start() -> None:
    """End this process, and the others of its run, before the first step."""
    leave_closed_terminal()
    code, why = errors.STOPPED, "was asked to stop before the first step"
    rank_status.report(code=code, why=why)
    liveness.end_all(code, f"rank {os.environ.get('RANK', '0')} {why}")
    run_lock.release_held()
    if os.environ.get("RANK", "0") == "0":
        text = "stopped before the first step; the same command starts it again"
        print_error(text)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _forget_wakeup() -> None:
    with suppress(ValueError):  # another thread than the main one has forked
        signal.set_wakeup_fd(-1)
