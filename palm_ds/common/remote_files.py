"""Files behind a URL, read and written through fsspec: s3://, gs://, hf://, http(s)://, memory://.

    folder = RemoteFolder("s3://bucket/wiki")
    folder.read("manifest.json")                          # bytes
    folder.download("data-0.arrow", size, handle)         # appended, from where the handle ends

Credentials and options are those that fsspec finds (environment, configuration files). Every
request is repeated with growing waits if it fails; then one line says what failed.
"""

from __future__ import annotations

import io
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from palm_ds.common.errors import TemporaryError, UserError, first_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

log = logging.getLogger(__name__)
T = TypeVar("T")

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_CHUNK = 16 << 20  # bytes per request of a download
_BUFFER = 4 << 20  # and of an open file


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Rules for repeating an attempt that failed."""

    tries: int = 6
    """Attempts in a row that fail and bring nothing new."""
    wait: float = 1.0
    """Seconds before the second attempt; doubled before each further one."""
    longest_wait: float = 30.0


RETRIES = Retries()


class RetryableError(Exception):
    """An attempt that failed where another may succeed."""

    def __init__(self, why: str, wait: float | None = None, *, tries: int = 0) -> None:
        """`wait`: seconds, if the server asks for them. `tries`: other than usual, as long as no
        attempt has brought anything; 0: as usual."""
        super().__init__(why)
        self.wait, self.tries = wait, tries


def retried(
    attempt: Callable[[], T],
    where: str,
    retries: Retries,
    *,
    failure: Callable[[RetryableError, int], Exception],
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """`attempt()`, repeated while it raises RetryableError; one that has increased `progress()` is
    the first of a new row. Raises `failure(the last error, attempts in a row)`."""
    first = best = progress()
    failed = 0
    while True:
        try:
            return attempt()
        except RetryableError as error:
            done = progress()
            failed = 1 if done > best else failed + 1
            best = max(best, done)
            hopeless = error.tries > 0 and best == first
            if failed >= (error.tries if hopeless else retries.tries):
                raise failure(error, failed) from None
            wait = retries.wait * 2 ** (failed - 1) if error.wait is None else error.wait
            wait = min(wait, retries.longest_wait)
            if wait >= 1 and not hopeless:
                log.warning("%s: %s; again in %.0f s", where, error, wait)
            time.sleep(wait)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, such as s3://bucket/wiki."""
    return bool(_URL.match(os.fspath(path)))


def check_local(path: str | os.PathLike[str], where: str = "") -> None:
    """Raises UserError for a URL, also as a Path, which has one slash less; `where` begins it."""
    if re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(path)):
        raise UserError(
            f"{where}{path}: is a URL; give a path on this machine, and copy the result afterwards"
        )


def open_file_system(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and its path there. Raises UserError if fsspec has none."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except Exception as error:  # some connect here, and each has its own errors
        raise UserError(f"{url}: cannot be opened: {_reason(error)}") from None


class RemoteFolder:
    """The files below a URL."""

    def __init__(self, url: str, retries: Retries = RETRIES) -> None:
        self.url, self.retries = url.rstrip("/"), retries
        self._system, self._root = open_file_system(self.url)

    def read(self, name: str) -> bytes:
        """The contents of a file. Raises UserError if it is not there or may not be read."""
        return self._try(name, lambda: self._bytes(name))

    def download(self, name: str, size: int, file: BinaryIO) -> None:
        """Appends to `file` what it lacks of a remote file of `size` bytes."""
        while (done := file.tell()) < size:
            file.write(self._try(name, lambda at=done: self._piece(name, at, size)))

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return self._try(name, lambda: self._system.exists(self._path(name)))

    def info(self, name: str = "") -> dict[str, Any]:
        """Metadata of a file or folder in the file system: type, size and more."""
        return self._try(name, lambda: self._system.info(self._path(name)))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """The bytes start .. end of a file."""
        data = self._try(name, lambda: self._range(name, start, end))
        if len(data) > end - start:
            raise UserError(
                f"{self._where(name)}: the server has no range requests; download the file first"
            )
        return data

    def find(self) -> list[str]:
        """The names of all files below the URL, sorted."""
        paths = self._try("", lambda: self._system.find(self._root))
        return sorted(path.removeprefix(self._root).lstrip("/") for path in paths)

    def glob(self, pattern: str) -> list[str]:
        """The URLs of the files that match a pattern, sorted."""
        paths = self._try(pattern, lambda: list(self._system.glob(self._path(pattern))))
        return sorted(self._system.unstrip_protocol(str(path)) for path in paths)

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file. Raises UserError if files cannot be written there."""
        self._try(name, lambda: self._pipe(name, data))

    def upload(self, file: Path, name: str) -> None:
        """Writes a file, in place of one that is there."""
        self._try(name, lambda: self._put(file, name))

    def remove(self, name: str) -> None:
        """Removes a file."""
        self._try(name, lambda: self._system.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _bytes(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        data = self._system.cat_file(self._path(name), start=start, end=end)
        return data.encode("utf-8") if isinstance(data, str) else data

    def _piece(self, name: str, start: int, size: int) -> bytes:
        """The next bytes; all that are missing if the server knows no ranges."""
        end = min(start + _CHUNK, size)
        data = self._bytes(name, start, end)
        if len(data) == end - start or (start == 0 and len(data) == size):
            return data
        if len(data) == size:
            return data[start:]
        raise OSError(f"{len(data)} bytes came instead of {end - start}")

    def _range(self, name: str, start: int, end: int) -> bytes:
        data = self._bytes(name, start, end)
        if len(data) < end - start:
            raise OSError(f"{len(data)} bytes came instead of {end - start}")
        return data

    def _put(self, file: Path, name: str) -> None:
        path = self._path(name)
        self._system.makedirs(self._system._parent(path), exist_ok=True)
        self._system.put_file(str(file), path)

    def _pipe(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            self._system.makedirs(self._system._parent(path), exist_ok=True)
            self._system.pipe_file(path, data)
        except NotImplementedError:
            raise UserError(f"{self.url}: nothing can be written there") from None

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}".rstrip("/")

    def _try(self, name: str, ask: Callable[[], T]) -> T:
        return with_retries(self._where(name), ask, self.retries)


class RemoteFile(io.RawIOBase):
    """A file behind a URL, read in ranges; see `open_remote`."""

    def __init__(self, url: str) -> None:
        self._folder, self._at = RemoteFolder(url), 0
        size = self._folder.info().get("size")
        if not isinstance(size, int):
            raise UserError(f"{url}: the server does not state the file's size; download it first")
        self._size = size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        data = self._folder.read_range("", self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_remote(url: str) -> BinaryIO:
    """A file behind a URL, streamed."""
    return io.BufferedReader(RemoteFile(url), _BUFFER)


def with_retries(where: str, ask: Callable[[], T], retries: Retries = RETRIES) -> T:
    """`ask()` of a file system, repeated while it fails. Raises UserError immediately for what is
    not there or not allowed, and TemporaryError at last; both name `where`."""

    def failure(error: RetryableError, times: int) -> TemporaryError:
        return TemporaryError(f"{where}: {error}, {times} times; is the network up?")

    return retried(lambda: _attempt(where, ask), where, retries, failure=failure)


def _attempt(where: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except FileNotFoundError:
        raise UserError(f"{where}: no such file") from None
    except PermissionError as error:
        raise UserError(f"{where}: access denied: {_reason(error)}") from None
    except (UserError, MemoryError, NotImplementedError):
        raise
    except Exception as error:  # each file system has its own errors
        if _is_final(error):
            raise UserError(f"{where}: the server's answer is {_reason(error)}") from None
        raise RetryableError(_reason(error)) from None


def _is_final(error: Exception) -> bool:
    """Whether an HTTP answer will be the same the next time."""
    status = getattr(error, "status", None)
    return (
        isinstance(status, int)
        and (400 <= status < 500 or status == 501)
        and (status not in (408, 425, 429))
    )


def _reason(error: Exception) -> str:
    if isinstance(status := getattr(error, "status", None), int):  # an HTTP answer
        return f"{status} {getattr(error, 'message', '')}".rstrip()
    return first_line(error)
