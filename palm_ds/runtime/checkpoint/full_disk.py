"""Retries on a full or read-only disk, a used-up quota or a file server that is away: wait and try
again.

    problem = retried(write, group=processes, say=print, stop=lambda: flag.stop_requested)

Nothing is lost while training continues, since it needs no disk; what must be written (the last
checkpoint, the final weights) is tried again until there is space, or the server is back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from safetensors import SafetensorError

from palm_ds.common.errors import FULL_DISK, SERVER_AWAY, TemporaryError, UserError, first_line
from palm_ds.runtime.processes.process_group import ProcessGroup

_WORDS = tuple(map(os.strerror, (*FULL_DISK, *SERVER_AWAY)))
RETRY_SECONDS = 30.0
PATIENCE_SECONDS = 1800.0
"""How long a run waits that is finished, or starts again."""
STOPPING_SECONDS = 20.0
"""How long a run that was asked to stop waits: it is killed soon after."""


def may_pass(problem: str) -> bool:
    """Whether a problem is that of a full, used-up or read-only disk or of a file server."""
    return any(words in problem for words in _WORDS)


def error_of(problem: str) -> UserError | TemporaryError:
    """The error for a problem that stays: no mistake, if a restart may get past it."""
    if may_pass(problem):
        return TemporaryError(f"{problem}; the same command tries again")
    return UserError(problem)


def at_rank0(group: ProcessGroup, write: Callable[[], None]) -> str:
    """Call `write` on rank 0. Returns why it failed, on every process, or nothing. Collective."""
    problem = ""
    if group.rank == 0:
        try:
            write()
        except OSError as error:
            where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
            problem = f"{where}{error.strerror or error}"
        except (SafetensorError, UserError) as error:
            problem = first_line(error)
    return group.gather(problem)[0]


def retried(
    attempt: Callable[[], str],
    *,
    group: ProcessGroup,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
    patience: float = PATIENCE_SECONDS,
    pause: float = RETRY_SECONDS,
) -> str:
    """Repeat `attempt` while its problem may pass, for up to `patience` seconds or until `stop()`
    on some process. Returns why the last one failed, or nothing. `attempt` returns the same on all
    processes, as `at_rank0` does. Collective."""
    pause = min(pause, patience)
    left = round(patience / pause) if pause else 0
    said = ""
    while (problem := attempt()) and may_pass(problem) and left and not _any(group, stop):
        if problem != said:
            say(f"{problem}; tries again every {pause:g} s for {left * pause / 60:.3g} minutes")
            said = problem
        time.sleep(pause)
        left -= 1
    return problem


def _any(group: ProcessGroup, stop: Callable[[], bool]) -> bool:
    return any(group.gather(stop()))
