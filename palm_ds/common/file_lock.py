"""Locks on files that end with their process, however it ends."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from palm_ds.common.errors import UserError


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process alone; False if another one has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(
    path: Path, *, busy: str = "", on_wait: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Admit one process at a time; `path` is created if absent, and stays.

    `on_wait` is called before waiting for another process. Raises UserError with the message `busy`
    instead, if there is one."""
    with path.open("ab") as file:
        if not try_lock(file.fileno()):
            if busy:
                raise UserError(busy)
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
