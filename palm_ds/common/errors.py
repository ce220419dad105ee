"""User errors as one clear line (the file, line or key, what is wrong, what would be right), and
exit codes for what started a command: a shell, a launcher, `palm-ds run`, Slurm, Kubernetes.

Only after STOPPED, WATCHDOG or any other code (a crash, a signal) is a restart of any use.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from palm_ds.common.messages import plain_messages, print_error, printable, without_secrets

FINISHED = 0
FAILED = 1
"""A crash, a process that was lost, a last checkpoint that could not be written."""
MISTAKE = 2
"""A mistake in the arguments, the recipe or the data: a restart would meet it again."""
NONFINITE = 3
"""A loss or gradient was not finite: a restart would meet it again."""
WATCHDOG = 42
"""No progress, or no sign of life from another process, for too long."""
STOPPED = 75
"""Stopped on request, with a good checkpoint; the same command resumes. (EX_TEMPFAIL)"""

FINAL = (FINISHED, MISTAKE, NONFINITE)
"""After these nothing is started again."""


_OF_THE_SYSTEM = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
}
"""Errors caused by the user's path; others may be bugs."""

_NO_TEMPORARY_FOLDER = "No usable temporary directory"  # as Python says it

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""A full disk, a used-up quota, a file system that has become read-only."""
SERVER_AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)
"""A file server that does not answer, a disk that fails."""


_MAX_LINE_LENGTH = 1_500


class UserError(ValueError):
    """A mistake the user can fix. Its message is one self-contained line: what it quotes from files
    is escaped, and a long one loses its middle."""

    def __init__(self, message: object = ""):
        line = printable(str(message))
        if len(line) > _MAX_LINE_LENGTH:
            line = f"{line[: _MAX_LINE_LENGTH - 300]} ... {line[-200:]}"
        super().__init__(line)


class TemporaryError(Exception):
    """Something outside that may be well again later, such as the network: not a mistake, so a
    restart may get past it. Its message is one self-contained line."""

    def __init__(self, message: str, code: int = FAILED):
        super().__init__(message)
        self.code = code


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if it has no message."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def named_line(error: BaseException) -> str:
    """`ValueError: ` and the first line of its message, or the class alone."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def suggest(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` with the nearest known name, or `; known: ...` with all of them."""
    names = sorted(map(str, known))
    return did_you_mean(wrong, names) or f"; known: {', '.join(names) or 'none'}"


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` with the nearest known name, or nothing if none is near."""
    near = difflib.get_close_matches(str(wrong), list(known), n=1)
    return f'; did you mean "{near[0]}"?' if near else ""


def suggest_path(wrong: str | os.PathLike[str]) -> str:
    """`; did you mean "runs/mine"?` with the nearest name in the same folder, or where a link leads
    that is broken; or nothing."""
    if os.path.islink(wrong):
        return f"; it is a link to {os.readlink(wrong)}, which does not exist"
    folder, name = os.path.split(os.fspath(wrong).rstrip("/"))
    try:
        near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1, cutoff=0.7)
    except OSError:
        return ""
    return f'; did you mean "{os.path.join(folder, near[0])}"?' if near else ""


def _print_error(message: str, code: int) -> None:
    print_error(f"error: {message}")


def _line_of(error: OSError) -> tuple[str, int] | None:
    """The line for an error of the system, and the exit code; None if it may be a bug."""
    why, temporary = error.strerror or "", error.errno in (*FULL_DISK, *SERVER_AWAY)
    if why.startswith(_NO_TEMPORARY_FOLDER):
        return f"{why}: each is full or cannot be written; name another in TMPDIR", FAILED
    if error.filename is not None and (temporary or error.errno in _OF_THE_SYSTEM):
        return f"{os.fsdecode(error.filename)}: {why}", FAILED if temporary else MISTAKE
    return None


@contextmanager
def exit_on_user_error(say: Callable[[str, int], None] = _print_error) -> Iterator[None]:
    """Wraps every command: prints log messages and turns a UserError, or a file system error for a
    path, into `error: ...` and exit code 2; a TemporaryError likewise, with a code of its own, and
    a disk that is full or away, or no folder for temporary files, with 1. `say(message, code)`
    prints the error."""
    try:
        with plain_messages():
            yield
        return
    except UserError as error:
        message, code = str(error), MISTAKE
    except TemporaryError as error:
        message, code = str(error), error.code
    except OSError as error:
        if (line := _line_of(error)) is None:
            raise
        message, code = line
    say(without_secrets(printable(message)), code)
    sys.exit(code)


def need_extra(what: str, extra: str, *packages: str) -> None:
    """Raises UserError, which begins with `what` needs them, if a package is not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        names = " and ".join(missing)
        raise UserError(f"{what} needs {names}: pip install 'palm_ds[{extra}]'")
