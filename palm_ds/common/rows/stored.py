"""Opens plain or compressed files and URLs as bytes; errors name the damaged ones."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from palm_ds.common.errors import UserError
from palm_ds.common.remote_files import is_url, open_remote

COMPRESSED = (".gz", ".zst")
_SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".ods")
_ZSTD_PIECE = 1 << 10  # compressed bytes, of which at most 32 MiB come
_ARCHIVES = (".bz2", ".xz", ".zip", ".7z", ".rar", ".tar", ".tgz")


def suffixes_of(path: str | Path) -> tuple[str, str]:
    """The suffix of a name in small letters, and that of its compression: `.jsonl` and `.gz`."""
    file = PurePosixPath(path)
    compression = file.suffix if file.suffix in COMPRESSED else ""
    return PurePosixPath(file.name.removesuffix(compression)).suffix.lower(), compression


def how_to_convert(path: str | Path) -> str:
    """What to do about a spreadsheet or an archive, by its name; empty for any other file."""
    suffix = suffixes_of(path)[0]
    if suffix in _SPREADSHEETS:
        return "is a spreadsheet, which is not read; export the sheet as CSV in UTF-8"
    if suffix in _ARCHIVES:
        return f"{suffix} files are not read; unpack it, or compress its files with gzip or zstd"
    return ""


def open_bytes(path: str | Path) -> BinaryIO:
    """Opens a file, decompressing it if its name ends in .gz or .zst."""
    path = str(path)
    if path.endswith(".gz"):
        return cast(BinaryIO, _Gzip(path))
    if path.endswith(".zst"):
        return io.BufferedReader(_Zstandard(path), 1 << 20)
    return open_stored(path)


def open_stored(path: str | Path) -> BinaryIO:
    """Opens a file or URL as it is stored."""
    return open_remote(str(path)) if is_url(path) else open(path, "rb", buffering=1 << 20)


@contextmanager
def reading(path: str | Path, at: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turns read errors into a UserError that names the file and the position, `at()`."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        where = at()
        raise UserError(f"input {path}: damaged gzip file{where}: {error}") from None
    except OSError as error:
        raise UserError(f"input {path}: cannot be read: {error.strerror or error}") from None


def first_bytes(path: str | Path) -> bytes:
    """The beginning of a file's contents."""
    with reading(path), open_bytes(path) as handle:
        return handle.read(4096)


class _Gzip(gzip.GzipFile):
    """Closes the file that it decompresses too."""

    def __init__(self, path: str) -> None:
        self._stored = open_stored(path)
        super().__init__(fileobj=self._stored, mode="rb")

    def close(self) -> None:
        super().close()
        self._stored.close()


class _Zstandard(io.RawIOBase):
    """Decompresses frame by frame and, unlike the library's reader, detects truncated files. Four
    bytes may stand for 128 KiB, so that few are decompressed at a time."""

    def __init__(self, path: str) -> None:
        import zstandard

        self.path, self._handle = path, open_stored(path)
        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new()
        self._ready, self._waiting, self._started = memoryview(b""), b"", False

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._handle.close()
        super().close()

    def readinto(self, buffer) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._ready:
            data = self._waiting or self._handle.read(_ZSTD_PIECE)
            if not data:
                if self._started:
                    raise UserError(f"input {self.path}: damaged zstd file: unexpected end of file")
                return 0
            self._advance(data)
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n

    def _advance(self, data: bytes) -> None:
        try:
            self._ready, self._started = memoryview(self._frame.decompress(data)), True
        except self._error as error:
            raise UserError(f"input {self.path}: damaged zstd file: {error}") from None
        self._waiting = b""
        if self._frame.eof:
            self._waiting, self._frame, self._started = self._frame.unused_data, self._new(), False
