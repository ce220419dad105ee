"""Messages between `palm-ds run` and its agents: one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import Any

SILENCE = 30.0
"""Seconds without a message after which the other side is lost."""
PAUSE = 2.0
"""Seconds between messages."""


@dataclass
class MessageReader:
    """Reads messages from a file descriptor that `select` has found ready."""

    descriptor: int
    closed: bool = False
    _buffer: bytes = b""

    def read(self) -> list[dict[str, Any]]:
        try:
            data = os.read(self.descriptor, 65536)
        except OSError:
            data = b""
        self.closed = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        found = []
        for line in lines:  # a login shell may print a greeting
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                found += [message] if isinstance(message, dict) else []
        return found


def send(descriptor: int, **message: Any) -> None:
    """Without effect if nobody listens any more."""
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps(message).encode() + b"\n")
