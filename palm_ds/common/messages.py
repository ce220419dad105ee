"""Messages for users. Text from files is made safe for terminals and reports by escaping control
characters:

printable("w\x1b[2J")            "w\\x1b[2J"
json_line({"w": "\x9b2J"})       '{"w": "\\u009b2J"}'

The library logs to `logging.getLogger("palm_ds...")`, one logger per module, and prints nothing
itself; the importing program decides what is shown:

    logging.getLogger("palm_ds").setLevel(logging.WARNING)

Commands, and a Trainer in a program that configured no logging, print the bare messages: progress
to stdout, warnings and errors to stderr.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

_SUSPECT = re.compile(r"[^\x20-\x7e]")


def printable(text: str, *, keep: str = "") -> str:
    """The text with every unprintable character escaped, except those in `keep`."""

    def escaped(match: re.Match[str]) -> str:
        char = match[0]
        if char.isprintable() or char in keep:
            return char
        return char.encode("unicode_escape").decode("ascii")

    return _SUSPECT.sub(escaped, text)


_SECRETS = (
    *("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PALM_DS_TOKEN"),
)
"""Environment variables whose values belong into no message or report."""
_SHORTEST_SECRET = 6
"""A shorter value is no secret, but may be part of any word."""


def without_secrets(text: str) -> str:
    """The text without passwords in URLs, signatures of URLs that are signed, and the values of
    secret variables."""
    text = re.sub(r"://[^/@\s\"']+@", "://***@", text)
    text = re.sub(r"(?i)([?&][\w-]*(?:signature|token|sig|key)=)[^&\s\"']+", r"\1***", text)
    for name in _SECRETS:
        if len(value := os.environ.get(name, "")) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text


_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "B"))
_SENTENCE = re.compile(r"(?>\([^()]*\)|.)*?(?<!\bal)(?<!\.)[.?](?=\s|$)", re.S)


def first_sentence(text: str) -> str:
    """Up to the first full stop or question mark that ends a sentence: not those of `et al.`, of
    `...` and of what is in parentheses."""
    found = _SENTENCE.match(text)
    return found[0] if found else text


def counted(number: int, what: str) -> str:
    """A number of things: `1 row`, `2,000 rows`, `0 queries`, `2 keys`, `3 processes`."""
    if number == 1:
        return f"1 {what}"
    if what.endswith("y") and not what.endswith(("ay", "ey", "oy")):
        return f"{number:,} {what[:-1]}ies"
    return f"{number:,} {what}{'es' if what.endswith('s') else 's'}"


def short_number(number: int) -> str:
    """`25.3 k`, `1.3 M`, to stand before a unit."""
    size, prefix = (1e6, "M") if number >= 1e5 else (1e3, "k")
    return f"{number / size:,.1f} {prefix}"


def byte_size(count: float) -> str:
    """`38.7 KB`, `1.24 GB`, `80 GB`."""
    size, unit = next(unit for unit in _BYTE_UNITS if count >= 0.9995 * unit[0] or unit[0] == 1)
    value = count / size
    return f"{value:,.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"


def nan_to_null(value: object) -> object:
    """The same values with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(value, Mapping):
        return {str(key): nan_to_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_null(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_line(value: object) -> str:
    """JSON on one line; text stays readable, unprintable characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _SUSPECT.sub(lambda m: m[0] if m[0].isprintable() else json.dumps(m[0])[1:-1], text)


def leave_closed_terminal() -> None:
    """Let messages go nowhere from now on if the terminal was closed: each would be an error, and a
    run is to save, or to continue."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def print_error(line: str) -> None:
    """Print a line to standard error, if anybody reads it: where `2>&1 | tee` has ended or the
    terminal was closed, a process that is to end, or to continue, still does so."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        leave_closed_terminal()


LIBRARY = "palm_ds"
"""Name of the parent logger of all modules."""


@contextmanager
def plain_messages(level: int = logging.INFO) -> Iterator[None]:
    """Prints messages of a level and above inside the block, unless the program gave the logger a
    handler or a level."""
    logger = logging.getLogger(LIBRARY)
    if logger.handlers or logger.level != logging.NOTSET:
        yield
        return
    handler = _PlainLines()
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def only_warnings() -> None:
    """Silences progress messages: all processes but rank 0 would only repeat them."""
    logger = logging.getLogger(LIBRARY)
    logger.setLevel(max(logger.level, logging.WARNING))


def only_warnings_shown() -> bool:
    """Whether `only_warnings` was called: notes are then left out too."""
    return logging.getLogger(LIBRARY).level >= logging.WARNING


def progress_to_stderr() -> None:
    """Prints progress messages to stderr too, so that stdout has results only."""
    for handler in logging.getLogger(LIBRARY).handlers:
        if isinstance(handler, _PlainLines):
            handler.to_stdout = False


class _PlainLines(logging.Handler):
    """Looks up stdout and stderr for each message, since a live display may replace them."""

    to_stdout = True
    """Of progress messages."""

    def emit(self, record: logging.LogRecord) -> None:
        progress = self.to_stdout and record.levelno < logging.WARNING
        stream = sys.stdout if progress else sys.stderr
        with suppress(OSError):  # the output may be a file on a full disk
            text = without_secrets(printable(self.format(record), keep="\n\t\r"))
            print(text, file=stream, flush=True)
