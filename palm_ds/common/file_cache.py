"""A folder of fetched files, bounded in size and shared by the processes of a host.

    held = cache.hold("a1b2/data-0.arrow", entry, fetch)    # fetched if it is not there
    held.path                                               # not evicted while `held` exists

A file in use is locked (flock, shared), so that no process evicts it; the locks of a killed process
end with it. A file is fetched by one process under a temporary name that states its size, checked
and renamed; the others wait for it. What a killed process fetched of a file is continued.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from palm_ds.common.atomic import move_into_place
from palm_ds.common.errors import UserError
from palm_ds.common.files import locked, sha256_of_file, try_lock
from palm_ds.common.messages import byte_size

log = logging.getLogger(__name__)

Fetch = Callable[[BinaryIO], None]
"""Appends what a file lacks."""

_POLL_SECONDS = 0.05
_PART = ".part"


class HeldFile:
    """A file that stays in the cache while this object exists (or one outside of any cache)."""

    def __init__(self, path: Path, descriptor: int = -1) -> None:
        self.path, self._descriptor = path, descriptor

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class FileCache:
    """Files by relative names, `limit` bytes in all."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._warned = False
        self._admission = threading.Lock()
        """Threads that fetch ahead ask for room in turn: the parts of two that ask together would
        leave no room for either."""

    def hold(
        self,
        name: str,
        entry: Mapping[str, Any],
        fetch: Fetch,
        release: Callable[[], bool] = lambda: False,
    ) -> HeldFile:
        """A file of `entry` (bytes, sha256), fetched if it is not there.

        `release` is called while there is no room, to let go of another file; it returns False if
        there is none. The cache then exceeds its limit."""
        path = self.folder / name
        while (held := _held(path, entry["bytes"])) is None:
            with self._part_of(path, entry["bytes"]) as part:
                if part is None:
                    continue
                while not self._make_room():
                    if not release():
                        self._warn()
                        break
                _complete(part, path, entry, fetch)
        return held

    def prefetch(
        self, name: str, entry: Mapping[str, Any], fetch: Fetch, keep: Collection[str]
    ) -> bool:
        """Fetches a file unless only files in use and those of `keep` could make room for it."""
        path = self.folder / name
        if path.exists():
            os.utime(path)
            return True
        with ExitStack() as stack:
            with self._admission:
                part = stack.enter_context(self._part_of(path, entry["bytes"], wait=False))
                if part is None:
                    return True
                if not self._make_room({self.folder / other for other in keep}):
                    Path(part.name).unlink()
                    return False
            _complete(part, path, entry, fetch)
        return True

    def _warn(self) -> None:
        """Says once that the limit is exceeded."""
        if not self._warned:
            size = byte_size(self.limit)
            log.warning("%s: the files in use exceed the cache's %s", self.folder, size)
        self._warned = True

    @contextmanager
    def _part_of(self, path: Path, size: int, wait: bool = True) -> Iterator[BinaryIO | None]:
        """The file's part, locked and open at its end; None if another process has it (and, with
        `wait`, has made the file)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{size}{_PART}")
        while True:
            with part.open("ab") as handle:
                if try_lock(handle.fileno()) and _is_at(handle.fileno(), part):
                    if path.exists():
                        part.unlink()
                        yield None
                    else:
                        yield handle
                    return
            if path.exists() or not wait:
                yield None
                return
            time.sleep(_POLL_SECONDS)

    def _make_room(self, keep: Collection[Path] = ()) -> bool:
        """Evicts files that no process uses, the longest unused first, until all fit."""
        with locked(self.folder / ".lock"):
            files = sorted(self._files())
            excess = sum(size for _, size, _ in files) - self.limit
            for _, size, path in files:
                if excess <= 0:
                    return True
                if path not in keep and _evict(path):
                    excess -= size
            return excess <= 0

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(time of last use, size, path) of every file; a part counts as complete."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = Path(folder, name)
                try:
                    about = path.stat()
                except FileNotFoundError:
                    continue
                stated = name.removesuffix(_PART).rpartition(".")[2]
                size = int(stated) if name.endswith(_PART) else about.st_size
                yield about.st_mtime_ns, size, path


def _held(path: Path, size: int) -> HeldFile | None:
    """The file, locked; None if there is none or it is damaged."""
    try:
        held = HeldFile(path, os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        return None
    fcntl.flock(held._descriptor, fcntl.LOCK_SH)
    if not _is_at(held._descriptor, path):
        return None
    if os.fstat(held._descriptor).st_size != size:
        path.unlink(missing_ok=True)
        return None
    os.utime(path)
    return held


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file has not been renamed or removed."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _evict(path: Path) -> bool:
    """Removes a file that no process uses; returns whether it did."""
    if path.name == ".lock":
        return False
    try:
        descriptor = os.open(path, os.O_RDWR)  # NFS locks for one process only what it may write
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    try:
        if not try_lock(descriptor):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def _complete(part: BinaryIO, path: Path, entry: Mapping[str, Any], fetch: Fetch) -> None:
    """Fetches the rest of a file, compares its hash and renames it. A file that is not as it should
    be is fetched once more from its beginning."""
    temporary = Path(part.name)
    for _ in range(2):
        try:
            fetch(part)
            part.flush()
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
        if sha256_of_file(temporary) == entry["sha256"]:
            move_into_place(temporary, path)
            return
        part.seek(0)
        part.truncate()
    raise UserError(f"{path.name}: what was fetched is not what the manifest says (its sha256)")
