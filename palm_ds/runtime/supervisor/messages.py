"""Messages between `palm-ds run` and its agents: one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import Any

SILENCE = 30.0


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that each side waits. A cut link ends everything within twice `silence`."""

    silence: float = SILENCE
    """Without a message: the other side is lost."""

    @property
    def pause(self) -> float:
        """Between messages."""
        return min(2.0, self.silence / 5)

    @property
    def others(self) -> float:
        """For the other processes or hosts to end by themselves once one has."""
        return self.silence / 2

    @property
    def cut_off(self) -> float:
        """For processes that nobody can reach to end by themselves."""
        return self.silence * 2 / 3


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
        messages = []
        for line in lines:  # a login shell may print a greeting
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                messages += [message] if isinstance(message, dict) else []
        return messages


def send(descriptor: int, **message: object) -> None:
    """Without effect if nobody listens any more."""
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps(message).encode() + b"\n")
