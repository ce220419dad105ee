"""Files and folders that are either complete or absent, also after a crash or a power failure.

    write_file_atomically(path, data)       the old file or the new one, never a mixture
    write_folder_atomically(folder, fill)   fill(part) writes beside the folder, then it is renamed
    move_into_place(part, target)           the rename alone, for something written elsewhere

Contents are flushed to disk before the rename.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_file_atomically(path: str | Path, data: str | bytes) -> None:
    """Replaces a file with `data` (text as UTF-8). Several processes may write the same file."""
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        part.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
        move_into_place(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_folder_atomically(folder: str | Path, fill: Callable[[Path], None]) -> None:
    """Calls `fill` with an empty folder beside `folder`, then renames that folder to `folder`.

    An existing folder is replaced once the new one is complete. If `fill` raises, its output is
    removed and the existing folder is unchanged.
    """
    folder = Path(folder)
    part, old = (folder.with_name(f".{folder.name}.{end}") for end in ("part", "old"))
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        fill(part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    move_into_place(part, folder, aside=old)
    shutil.rmtree(old, ignore_errors=True)


def move_into_place(part: Path, target: Path, *, aside: Path | None = None) -> None:
    """Renames a finished file or folder; the rename is on disk when this returns.

    A file replaces an existing one. An existing folder is first renamed to `aside`, for the caller
    to delete; without `aside` it must be absent or empty.
    """
    sync(part)
    if aside is not None and target.exists():
        os.replace(target, aside)
    os.replace(part, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flushes the contents of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
