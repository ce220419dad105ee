"""A file that lines are appended to, and that a full disk does not break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class PatientFile:
    """Lines are written immediately. What the disk does not take is kept, in order, and written
    with the next line that fits; `say` gets a line when that begins and when it ends."""

    def __init__(self, path: Path, say: Callable[[str], None]):
        self.path, self._say = path, say
        self._file = path.open("ab", buffering=0)
        self._left = b""
        self._failing = False

    def append(self, line: str) -> None:
        self._left += line.encode("utf-8") + b"\n"
        self._write()

    def _write(self) -> None:
        try:
            while self._left:
                self._left = self._left[self._file.write(self._left) or 0 :]
        except OSError as error:
            if not self._failing:
                self._say(f"{self.path}: cannot be written ({error.strerror}); lines are kept")
            self._failing = True
            return
        if self._failing:
            self._say(f"{self.path}: can be written again; no line is lost")
        self._failing = False

    def close(self) -> None:
        """Write what is left, if that is possible now. May be called twice."""
        if not self._file.closed:
            self._write()
            if self._left:
                self._say(f"{self.path}: {self._left.count(10)} lines could not be written")
            self._file.close()
