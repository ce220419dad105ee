"""Files: SHA-256 hashes, locks that end with their process, folders for output, sizes as text, the
user's cache folder, and files that are something else (Git LFS pointers, web pages, Keras files).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from palm_ds.common.errors import UserError

log = logging.getLogger(__name__)
_BLOCK = 1 << 20


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's contents, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def hash_of_text(text: str) -> str:
    """SHA-256 of a text as UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def fingerprint(value: object, default: Callable[[object], object] | None = None) -> str:
    """16 digits of the hash of a value as JSON, whatever the order of its keys. `default` makes
    JSON of what is none. Stored in run folders: it must not change."""
    return hash_of_text(json.dumps(value, sort_keys=True, default=default))[:16]


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process alone; False if another one has it. Raises OSError if the
    file system has no locks, as Lustre's mounted without `flock`."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(
    path: Path, *, busy: str = "", on_wait: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Admit one process at a time; `path` is created if absent, and stays.

    `on_wait` is called before waiting for another process. Raises UserError with the message `busy`
    instead, if there is one, and if a file is missing because the folder was removed meanwhile.
    Where the file system has no locks, nobody waits."""
    with path.open("ab") as file:
        try:
            free = try_lock(file.fileno())
        except OSError as error:
            free = True
            if busy:
                why = error.strerror
                log.warning("%s: cannot be locked (%s); start no second command on it", path, why)
        if not free:
            if busy:
                raise UserError(busy)
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        except FileNotFoundError as error:
            if path.exists():
                raise
            raise UserError(f"{path.parent}: was removed while a command wrote there") from error


def check_locks(file: Path, where: str) -> None:
    """Raises UserError, with `where` in front, if the file system has no locks. `file`: one that
    can be read."""
    with file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError as error:
            raise UserError(
                f"{where}: {file.parent}: this file system has no locks ({error.strerror}); name "
                "a folder on a local disk"
            ) from None


def make_folder(folder: Path) -> None:
    """Create a folder for output and those above it, unless they are there. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # some file systems, as /proc, say that the new folder is not there
        why = error.strerror or error
        raise UserError(f"{folder}: cannot be created: {why}") from None


def check_not_input(output: Path, inputs: Iterable[str | Path]) -> None:
    """Raises UserError if an output is a file that is read, which would be lost."""
    if output.resolve() in [Path(name).resolve() for name in inputs]:
        raise UserError(f"{output}: is also an input; name another file")


def check_rows_file(output: Path, inputs: Iterable[str | Path]) -> None:
    """Raises UserError if rows cannot be written to an output as JSON lines."""
    if output.suffix != ".jsonl" or output.is_dir():
        raise UserError(f"--output: {output}: rows are JSON lines; name a .jsonl file")
    check_not_input(output, inputs)


def home_folder() -> Path:
    """The user's; of users without one, as in containers, `/`, as Docker gives them."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def cache_folder() -> Path:
    """The user's folder for what can be fetched or computed again."""
    above = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    return Path(os.environ.get("PALM_DS_CACHE") or Path(above) / "palm_ds")


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(size: str, key: str) -> int:
    """2GB -> 2000000000. `key` names the setting in messages. Raises UserError."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) *([KMGT]B)?", size.strip().upper())
    if match is None:
        raise UserError(f"{key}: {size!r} is not a size; give one such as 2GB or 500MB")
    if (count := int(float(match[1]) * _UNITS[match[2] or ""])) < 1:
        raise UserError(f"{key}: {size!r} is less than a byte; give one such as 2GB or 500MB")
    return count


def check_is_no_pipe(path: Path, shown: str, instead: str = "") -> None:
    """Raises UserError for a pipe or a device, which would be empty when it is read again."""
    if not path.is_file() and not path.is_dir():
        raise UserError(
            f"{shown}: is a pipe or a device, and is read more than once; write it to a file"
            f"{instead}"
        )


_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE = (b"<!doctype html", b"<html")
_KERAS = b"\x89HDF\r\n\x1a\n"


def check_right_file(path: Path) -> None:
    """Raises UserError if the file is a Git LFS pointer, an HTML page or a Keras (HDF5) file."""
    try:
        if not path.is_file():  # a pipe would wait for somebody to write
            return
        with path.open("rb") as file:
            head = file.read(256)
    except OSError:
        return  # its reader reports this
    if head.startswith(_POINTER):
        raise UserError(
            f"{path}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        )
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGE):
        raise UserError(f"{path}: is an HTML page, not the file itself; download it again")
    if head.startswith(_KERAS):
        raise UserError(
            f"{path}: is a Keras file (HDF5), which is not read; save the model for PyTorch"
        )
