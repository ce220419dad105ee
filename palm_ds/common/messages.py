"""Prints the library's log messages as plain lines on the terminal.

The library logs to `logging.getLogger("palm_ds...")`, one logger per module, and prints nothing
itself; the importing program decides what is shown:

    logging.getLogger("palm_ds").setLevel(logging.WARNING)

Commands, and a Trainer in a program that configured no logging, print the bare messages: progress
to stdout, warnings and errors to stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from palm_ds.common.printable import printable

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
            print(printable(self.format(record), keep="\n\t\r"), file=stream, flush=True)
