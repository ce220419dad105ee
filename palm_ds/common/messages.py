"""The library's messages as plain lines on the terminal.

The library logs to `logging.getLogger("palm_ds...")`, one logger a module, and prints nothing; a
program that imports it decides what becomes of that:

    logging.getLogger("palm_ds").setLevel(logging.WARNING)

Commands, and a Trainer whose program configured nothing, show the messages: progress on stdout,
warnings and errors on stderr, each line as it is.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LIBRARY = "palm_ds"
"""The logger above those of all modules."""


@contextmanager
def plain_messages() -> Iterator[None]:
    """Shows messages within the block, unless the program gave the logger a handler or a level."""
    logger = logging.getLogger(LIBRARY)
    if logger.handlers or logger.level != logging.NOTSET:
        yield
        return
    handler = _PlainLines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def only_warnings() -> None:
    """For processes other than the first: what they would tell, the first tells already."""
    logger = logging.getLogger(LIBRARY)
    logger.setLevel(max(logger.level, logging.WARNING))


class _PlainLines(logging.Handler):
    """Prints to what is stdout or stderr at that moment: a live display may stand in for it."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        print(self.format(record), file=stream, flush=True)
