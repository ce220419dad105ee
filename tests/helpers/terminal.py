"""A program on a pseudo-terminal, as a user sees it.

terminal = Terminal(["-m", "palm_ds", "embed", ...], columns=100)
terminal.wait_for("rows")
terminal.press("\\x03")                  # Ctrl-C
code, text = terminal.end()             # what was written, without colors and cursor movements
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.warm_python import Program

COLOR = re.compile(r"\x1b\[(?:[0-9;]*;)?[34]\d(?:;[0-9;]*)?m")
"""A control sequence that sets a color."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")


class Terminal:
    """A running program whose input and output are a terminal."""

    def __init__(
        self,
        words: Sequence[object],
        *,
        columns: int = 100,
        rows: int = 30,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._written, self._open = b"", True
        with open(theirs, "wb", buffering=0) as end:
            given = {"TERM": "xterm-256color", "FORCE_COLOR": "", **(env or {})}
            self.program = Program(words, env=given, cwd=cwd, output=end)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # Linux's way to say that nobody can write any more
            while self._open:
                if select.select([self._ours], [], [], 0.05)[0]:
                    self._written += os.read(self._ours, 65536)

    @property
    def raw(self) -> str:
        """All that was written so far."""
        return self._written.decode(errors="replace")

    @property
    def text(self) -> str:
        """The same without control sequences."""
        return _CONTROL.sub("", self.raw)

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Until this was written."""
        ends = time.monotonic() + timeout
        while text not in self.text:
            assert time.monotonic() < ends, f"no {text!r} in:\n{self.text}"
            assert self.program.poll() is None, f"ended without {text!r}:\n{self.text}"
            time.sleep(0.01)

    def press(self, keys: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._ours, keys.encode())

    def end(self, timeout: float = 300) -> tuple[int, str]:
        """The exit code and all text."""
        try:
            code = self.program.wait(timeout)
        finally:
            self.program.clear_away()
            self._reader.join(30)
            self.close()
        return code, self.text

    def close(self) -> None:
        """Close it, as a user closes a window or loses a connection. May be called twice."""
        if self._open:
            self._open = False
            self._reader.join(30)
            os.close(self._ours)
