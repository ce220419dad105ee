"""An archive from a stranger to a folder: tar, tar.gz, tgz and zip.

    names     relative, downward, printable; each file once
    kinds     files and folders alone: no links, devices, pipes, sparse files
    sizes     what comes out is counted while it comes, not believed from headers
    rights    files 644, folders 755 under the umask, whatever the archive says
    whole     written beside and renamed; a broken archive leaves nothing

Nothing is ever extracted by a library: members are read as streams and written to new files in a
new folder, so that there is no old file to overwrite and no link to follow. `tarfile`'s own data
filter looks at every member as well.
"""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from palm_ds.errors import UserError


class BadArchiveError(UserError):
    """The archive is at fault: another copy of it may do better."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much an archive may become."""

    members: int = 20_000
    """Files and folders."""
    total: int = 64 << 30
    """Bytes out, of all files and headers together."""
    ratio: float = 100
    """Bytes out for a byte of the archive: weights hardly shrink, text to a fifth, bombs to a
    thousandth."""
    small: int = 64 << 20
    """Bytes out that are no bomb whatever their ratio."""


LIMITS = Limits()
_CHUNK = 1 << 20
_HEADER = 4 << 20  # no headers of one member of a genuine tar are longer
_BLOCK = 512  # of a tar
_PATH, _NAME = 1024, 255  # bytes
_STORED, _DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED  # others come out in large pieces
_STRANGE = (  # what reading a broken archive raises, by experience: the libraries promise nothing
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    ArithmeticError,
    LookupError,
    RecursionError,
    NotImplementedError,
    RuntimeError,
)


class _Member(NamedTuple):
    """What an archive holds under a name; `read` opens a file, a folder has none."""

    name: str
    size: int
    read: Callable[[], IO[bytes]] | None


def unpack(archive: Path, folder: Path, *, limits: Limits = LIMITS, flatten: bool = False) -> Path:
    """The archive's files as a new `folder`, which is returned; it is there whole or not at all.

    `flatten`: where all lies in one folder, that folder's content becomes the new folder's. Raises
    BadArchiveError, naming the member, where the archive is broken or hostile; UserError where the
    folder is taken or cannot be written.
    """
    archive, folder = Path(archive), Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; {archive} is unpacked to a new folder alone")
    part = folder.with_name(f".{folder.name}.unpacking")
    with _writing(part):
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir(parents=True)
    try:
        _fill(archive, part, limits)
        whole = _only_folder(part) if flatten else part
        with _writing(folder):
            os.replace(whole, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _fill(archive: Path, part: Path, limits: Limits) -> None:
    seen: dict[str, bool] = {}  # name -> whether it is a folder
    budget = _Budget(archive, limits)
    with _open(archive, budget) as members:
        for member in members:
            name = _safe_name(member.name, archive)
            _claim(name, member.read is None, seen, archive)
            budget.one_more(member)
            target = part.joinpath(*name.split("/"))
            with _writing(target):
                (target if member.read is None else target.parent).mkdir(
                    parents=True, exist_ok=True
                )
            if member.read is not None:
                _write(member, target, archive, budget)
    if not any(is_folder is False for is_folder in seen.values()):
        raise BadArchiveError(f"{archive}: holds no file")


def _write(member: _Member, target: Path, archive: Path, budget: _Budget) -> None:
    assert member.read is not None
    written = 0
    with _writing(target):
        file = target.open("xb")
    with file:
        source = member.read()
        while chunk := source.read(_CHUNK):
            written += len(chunk)
            budget.spend(len(chunk), member.name)
            with _writing(target):
                file.write(chunk)
        with _writing(target):
            file.flush()
    if written != member.size:
        raise BadArchiveError(
            f"{archive}: {member.name!r} is cut off: {written} of {member.size} bytes"
        )


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """A disk that is full, a folder that cannot be written: not the archive's fault."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from None


def _only_folder(part: Path) -> Path:
    inside = list(part.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else part


# ---- names ----


def _safe_name(name: str, archive: Path) -> str:
    """The name without `./` and a last `/`; refused where it could lead out of the folder on any
    system, or could not be shown to a person."""

    def refuse(why: str) -> BadArchiveError:
        shown = name if len(name) <= 120 else name[:120] + "..."
        return BadArchiveError(f"{archive}: member {shown!r} is refused: {why}")

    if name.startswith("/"):
        raise refuse("its path is absolute")
    if "\\" in name:
        raise refuse("a backslash leads elsewhere on some systems")
    if not name.isprintable():  # control characters, lone surrogates of what is not UTF-8
        raise refuse("its name has characters that cannot be shown")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise refuse("its path leads out of the folder")
    if parts and parts[0][1:2] == ":":
        raise refuse("its path names a drive")
    encoded = [len(part.encode()) for part in parts]
    if sum(encoded) + len(encoded) > _PATH or max(encoded, default=0) > _NAME:
        raise refuse("its name is too long")
    return "/".join(parts)


def _claim(name: str, is_folder: bool, seen: dict[str, bool], archive: Path) -> None:
    """Nothing is written twice, and nothing lies inside a file."""
    parts = name.split("/")
    for end in range(1, len(parts)):
        above = "/".join(parts[:end])
        if seen.setdefault(above, True) is False:
            raise BadArchiveError(f"{archive}: member {name!r} is refused: {above!r} is a file")
    if name in seen and not (is_folder and seen[name]):
        raise BadArchiveError(f"{archive}: member {name!r} is refused: it is there twice")
    if not name and not is_folder:
        raise BadArchiveError(f"{archive}: a member without a name is refused")
    seen[name] = is_folder


# ---- sizes ----


class _Budget:
    """What may still come out of an archive."""

    def __init__(self, archive: Path, limits: Limits):
        self.archive, self.limits = archive, limits
        try:
            packed = archive.stat().st_size
        except OSError as error:
            raise UserError(f"{archive}: cannot be read: {error.strerror}") from None
        self.bytes = min(limits.total, max(limits.small, int(packed * limits.ratio)))
        self.packed, self.members, self.spent = packed, 0, 0

    def one_more(self, member: _Member) -> None:
        self.members += 1
        if self.members > self.limits.members:
            raise BadArchiveError(f"{self.archive}: more than {self.limits.members:,} members")
        if not 0 <= member.size <= self.bytes - self.spent:
            self.refuse(member.name, member.size)

    def spend(self, size: int, name: str) -> None:
        self.spent += size
        if self.spent > self.bytes:
            self.refuse(name, self.spent)

    def refuse(self, name: str, size: int) -> None:
        raise BadArchiveError(
            f"{self.archive}: member {name!r} is refused: {size:,} bytes; {self.packed:,} packed "
            f"bytes may become {self.bytes:,}"
        )


class _Guarded:
    """A tar's bytes, for tarfile: it reads as much, and goes as far, as headers say, and some of
    them nest. `may_read` is what it may read until it is set again."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, budget: _Budget):
        self.file, self.may_read = file, _HEADER
        self.most = budget.bytes + budget.limits.members * 8 * _BLOCK

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.may_read:
            raise tarfile.ReadError(f"a header says that {size:,} bytes follow")
        self.may_read -= size
        return self.file.read(size)

    def seek(self, position: int) -> int:
        if not 0 <= position <= self.most:
            raise tarfile.ReadError(f"a header says that the tar goes on at byte {position:,}")
        return self.file.seek(position)

    def tell(self) -> int:
        return self.file.tell()


# ---- kinds of archive ----


@contextmanager
def _open(archive: Path, budget: _Budget) -> Iterator[Iterator[_Member]]:
    """The members of an archive, whose kind its first bytes say."""
    try:
        with archive.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            if start[:2] == b"PK":
                with zipfile.ZipFile(file) as opened:
                    yield _zip_members(opened, archive)
            elif start[:2] == b"\x1f\x8b":
                with gzip.open(file) as plain:
                    yield _tar_members(plain, archive, budget)
            else:
                yield _tar_members(file, archive, budget)
    except UserError:
        raise
    except _STRANGE as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        why = "".join(letter if letter.isprintable() else "?" for letter in why)
        raise BadArchiveError(
            f"{archive}: cannot be read as tar, tar.gz, tgz or zip: {why}"
        ) from None


def _tar_members(
    file: IO[bytes] | gzip.GzipFile, archive: Path, budget: _Budget
) -> Iterator[_Member]:
    guarded = _Guarded(file, budget)
    with tarfile.open(fileobj=guarded, mode="r:") as opened:  # type: ignore[call-overload]
        while (member := opened.next()) is not None:
            _check_tar_member(member, archive)
            guarded.may_read = member.size + _HEADER
            read = None if member.isdir() else _tar_reader(opened, member)
            yield _Member(member.name, 0 if member.isdir() else member.size, read)
            opened.members = []  # they are not needed again
            guarded.may_read = _HEADER
        end = opened.offset  # tarfile takes a damaged header for the end: the end is a block of 0
    guarded.seek(end)
    if guarded.read(_BLOCK) != bytes(_BLOCK):
        raise BadArchiveError(f"{archive}: broken or cut off at byte {end:,} of the tar")
    while chunk := file.read(_CHUNK):  # to the end: there a gzip has its checksum
        budget.spend(len(chunk), "what follows the last")


def _tar_reader(opened: tarfile.TarFile, member: tarfile.TarInfo) -> Callable[[], IO[bytes]]:
    def read() -> IO[bytes]:
        file = opened.extractfile(member)
        assert file is not None, "a regular file"
        return file

    return read


def _check_tar_member(member: tarfile.TarInfo, archive: Path) -> None:
    kinds = {"a link": member.issym() or member.islnk(), "a device": member.isdev()}
    kinds["no plain file"] = member.issparse() or not (member.isreg() or member.isdir())
    for kind, found in kinds.items():
        if found:
            raise BadArchiveError(f"{archive}: member {member.name!r} is refused: it is {kind}")
    _safe_name(member.name, archive)  # first, for its own words
    filtered = getattr(tarfile, "data_filter", None)  # not in the oldest Pythons we run on
    if filtered is not None:
        try:
            filtered(member, os.path.join(os.sep, "nowhere"))
        except tarfile.TarError as error:
            raise BadArchiveError(
                f"{archive}: member {member.name!r} is refused: {error}"
            ) from None


def _zip_members(opened: zipfile.ZipFile, archive: Path) -> Iterator[_Member]:
    for member in opened.infolist():
        if member.orig_filename.partition("\0")[1]:
            raise BadArchiveError(
                f"{archive}: member {member.orig_filename!r} is refused: a 0 byte"
            )
        unread = "encrypted" if member.flag_bits & 1 else "packed in a rare way"
        if member.flag_bits & 1 or member.compress_type not in (_STORED, _DEFLATED):
            raise BadArchiveError(
                f"{archive}: member {member.filename!r} is refused: it is {unread}"
            )
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            what = "a link" if kind == stat.S_IFLNK else "no plain file"
            raise BadArchiveError(f"{archive}: member {member.filename!r} is refused: it is {what}")
        read = None if member.is_dir() else _zip_reader(opened, member)
        yield _Member(member.filename, 0 if member.is_dir() else member.file_size, read)


def _zip_reader(opened: zipfile.ZipFile, member: zipfile.ZipInfo) -> Callable[[], IO[bytes]]:
    return lambda: opened.open(member)
