"""Files and folders that are either complete or absent, also after a crash or a power failure.

    write_file_atomically(path, data)       the old file or the new one, never a mixture
    write_folder_atomically(folder, fill)   fill(part) writes next to the folder, then it is renamed
    write_new_folder(folder, fill)          the same for a folder that must not exist yet
    move_into_place(part, target)           the rename alone, for something written elsewhere
    naming(output)                          an error of a full disk names the output

Contents are flushed to disk before the rename. Several processes may write the same folder: each
has its own part, `.NAME.XXXXXXXX.part`, which is locked while the process runs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from palm_ds.common.errors import FULL_DISK, UserError

_STEM_LENGTH = 40  # characters of a folder's name in its part's name, whose length is limited too


def write_file_atomically(path: str | Path, data: str | bytes | Iterable[bytes]) -> None:
    """Replaces a file with `data` (text as UTF-8; or its parts, one after another). Several
    processes may write the same file. An OSError names it; a place where no file can be made is a
    UserError."""
    path = Path(path)
    # no process number: containers that share a folder may have the same ones
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with part.open("wb") as file:
            whole = data.encode("utf-8") if isinstance(data, str) else data
            file.writelines([whole] if isinstance(whole, bytes) else whole)
        move_into_place(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:
            if error.errno == errno.ENOENT and path.parent.is_dir():
                raise UserError(f"{path}: cannot be written: {error.strerror}") from None
            error.filename, error.filename2 = str(path), None  # nobody knows of the part
        raise


def write_folder_atomically(
    folder: str | Path, fill: Callable[[Path], None], *, replace: bool = True
) -> None:
    """Calls `fill` with an empty folder next to `folder`, then renames that folder to `folder`.

    An existing folder is replaced once the new one is complete; without `replace` it must be absent
    or empty. If anything fails, the output is removed and the existing folder is unchanged.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    with _part_of(folder) as part:
        fill(part)
        old = _sibling(folder, "old") if replace else None
        move_into_place(part, folder, aside=old)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def write_new_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Writes a folder that is absent or empty. Raises UserError if it is neither, or cannot be
    written, and an OSError that names it if the disk is full; nothing remains then."""
    check_new_folder(folder)
    try:
        write_folder_atomically(folder.resolve(), fill, replace=False)
    except OSError as error:
        check_new_folder(folder)  # another process may have written it
        if error.errno in FULL_DISK:
            error.filename, error.filename2 = str(folder), None
            raise
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None


@contextmanager
def naming(output: Path) -> Iterator[None]:
    """Names an output in the error of a full disk: if a write fails, it names no file."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK and error.filename is None:
            error.filename = str(output)
        raise


def check_new_folder(folder: Path) -> None:
    """Raises UserError if the folder is neither absent nor empty, is the current one, or is below a
    file."""
    try:
        if folder.is_symlink() and not folder.exists():
            raise UserError(f"{folder}: is a broken link; choose another folder")
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder}: already exists and is not empty; choose another folder")
        for parent in folder.absolute().parents:
            if parent.exists() and not parent.is_dir():
                raise UserError(f"{folder}: {parent} is not a folder")
        check_not_current(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None


def check_not_current(folder: Path) -> None:
    """Raises UserError if a folder to be replaced is the current one, or holds it: the programs
    that are in it, such as a shell, would stay in the old one."""
    if folder.is_dir() and Path.cwd().is_relative_to(folder.resolve()):
        raise UserError(f"{folder}: is or contains the current folder; name a new folder")


def _sibling(folder: Path, end: str) -> Path:
    """A unique name next to `folder`."""
    return folder.with_name(f".{folder.name[:_STEM_LENGTH]}.{secrets.token_hex(4)}.{end}")


@contextmanager
def _part_of(folder: Path) -> Iterator[Path]:
    """A new folder next to `folder`, locked, and removed at the end if it still exists."""
    part, lock = _new_part(folder)
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _new_part(folder: Path) -> tuple[Path, int | None]:
    """An empty folder and its lock; None if the file system has no locks."""
    while True:
        part = _sibling(folder, "part")
        part.mkdir()
        try:
            lock = _lock(part)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process took it for a leftover
        except OSError:
            return part, None
        if part.exists():
            return part, lock
        os.close(lock)


def _lock(path: Path) -> int:
    """A descriptor that locks a folder. Raises BlockingIOError if another process has it."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_leftovers(folder: Path) -> None:
    """Removes the leftovers of killed processes."""
    stem = re.escape(folder.name[:_STEM_LENGTH])
    names = re.compile(rf"\.{stem}(\.[0-9a-f]{{8}})?\.(part|old)")
    for path in [x for x in folder.parent.iterdir() if names.fullmatch(x.name)]:
        try:
            lock = _lock(path)
        except OSError:  # of a running process, or its state is unknown
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def move_into_place(part: Path, target: Path, *, aside: Path | None = None) -> None:
    """Renames a finished file or folder; the rename is on disk when this returns.

    A file replaces an existing one. An existing folder is first renamed to `aside`, for the caller
    to delete; without `aside` it must be absent or empty.
    """
    sync(part)
    moved = aside is not None and target.exists()
    if aside is not None and moved:
        os.replace(target, aside)
    try:
        os.replace(part, target)
    except OSError:
        if aside is not None and moved:
            os.replace(aside, target)
        raise
    sync(target.parent)


def follow_umask(path: Path) -> None:
    """Gives a new file the mode that the umask allows: some libraries (safetensors) make files
    readable only by the owner."""
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}.mode")
    probe.touch(exist_ok=False)
    try:
        with suppress(OSError):  # a file system without modes, such as some mounted object stores
            shutil.copymode(probe, path)
    finally:
        probe.unlink()


def sync(path: Path) -> None:
    """Flushes the contents of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_opened(descriptor)
    finally:
        os.close(descriptor)


def sync_opened(descriptor: int) -> None:
    """Likewise, as far as the file system can: some have no way to, at least for folders."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
