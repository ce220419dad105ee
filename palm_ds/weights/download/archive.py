"""Unpacks an archive from an untrusted source (tar, tar.gz, tgz, zip) into a new folder.

    names     relative, downward, printable; each file once
    kinds     files and folders only: no links, devices, pipes, sparse files
    sizes     checked against a budget before a member is written, and again afterwards
    modes     files 644, folders 755 under the umask, whatever the archive says
    complete  written next to the folder and renamed; a broken archive leaves nothing

`tarfile` (with its "data" filter) and `zipfile` do the extraction: neither writes more bytes than a
header announces. They rename or skip suspicious members; this module refuses them.
"""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, cast

from palm_ds.common.atomic import move_into_place
from palm_ds.common.errors import UserError, first_line


class BadArchiveError(UserError):
    """The archive itself is bad; another copy may be intact."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the content of an archive."""

    members: int = 20_000
    """Files and folders."""
    total: int = 64 << 30
    """Bytes of all files together."""
    ratio: float = 100
    """Bytes out per byte of the archive: weights hardly shrink, text to a fifth, bombs to a
    thousandth."""
    small: int = 64 << 20
    """Bytes out that are accepted at any ratio."""


LIMITS = Limits()
_CHUNK = 1 << 20
_HEADER = 4 << 20  # no genuine tar has longer headers for one member
_PATH, _NAME = 1024, 255  # bytes
_ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, UserWarning, zlib.error, EOFError, OSError)
_UNEXPECTED_ERRORS = (ValueError, ArithmeticError, LookupError, RuntimeError)  # seen in practice


def unpack(archive: Path, folder: Path, *, limits: Limits = LIMITS, flatten: bool = False) -> Path:
    """Unpack `archive` into the new `folder` and return it; it appears completely or not at all.

    `flatten`: if everything is in one top folder, take the content of that folder. Raises
    BadArchiveError with the member's name if the archive is broken or hostile, UserError if the
    folder already has files or cannot be written.
    """
    archive, folder = Path(archive), Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder}: already exists; {archive} needs a new folder or an empty one")
    part = folder.with_name(f".{folder.name}.unpacking")
    with _writing(part):
        shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
        part.mkdir(parents=True)
    try:
        _extract(archive, _Members(archive, part, limits))
        inside = list(part.iterdir())
        only = flatten and len(inside) == 1 and inside[0].is_dir()
        with _writing(folder):
            move_into_place(inside[0] if only else part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _extract(archive: Path, members: _Members) -> None:
    """Recognize the kind of archive by its first bytes."""
    try:
        with archive.open("rb") as file:
            start = file.read(2)
            file.seek(0)
            if start == b"PK":
                _extract_zip(file, members)
            elif start == b"\x1f\x8b":
                with gzip.open(file) as plain:
                    _extract_tar(plain, members)
            else:
                _extract_tar(file, members)
    except UserError:
        raise
    except (*_ARCHIVE_ERRORS, *_UNEXPECTED_ERRORS) as error:
        why = first_line(error)[:200]
        why = "".join(letter if letter.isprintable() else "?" for letter in why)
        raise BadArchiveError(f"{archive}: cannot be read as tar, tar.gz or zip: {why}") from None
    if not any(path.is_file() for path in members.folder.rglob("*")):
        raise BadArchiveError(f"{archive}: contains no files")


def _extract_tar(file: IO[bytes] | gzip.GzipFile, members: _Members) -> None:
    reader = _TarReader(file)
    with tarfile.open(fileobj=cast("IO[bytes]", reader), mode="r:") as opened:
        # The oldest supported Pythons have no filters; the checks here do not depend on them.
        opened.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
        while (member := opened.next()) is not None:
            reader.may_read = member.size + _HEADER
            links = member.issym() or member.islnk()
            plain = member.isdir() or (member.isreg() and not member.issparse())
            kind = "a link" if links else "a device" if member.isdev() else "not a regular file"
            extract = partial(opened.extract, member, members.folder, set_attrs=False)
            size = None if member.isdir() else member.size
            members.add(member.name, size, "" if plain else kind, extract)
            vars(opened)["members"].clear()  # with their headers, of up to 4 MB each
            reader.may_read = _HEADER
    if reader.last != bytes(tarfile.BLOCKSIZE):  # tarfile mistakes a damaged header for the end
        where = f"byte {reader.tell():,} of the tar"
        raise BadArchiveError(f"{members.archive}: broken or cut off at {where}")
    while chunk := file.read(_CHUNK):  # read to the end, where gzip has its checksum
        members.spend(len(chunk), "(bytes after the last member)")


class _TarReader:
    """A tar's bytes, limited because tarfile reads as many into memory as a header says."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile):
        self.file, self.may_read, self.last = file, _HEADER, b""
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.may_read:
            raise tarfile.ReadError(f"a header says that {size:,} bytes follow")
        self.may_read -= size
        self.last = self.file.read(size)
        return self.last


def _extract_zip(file: IO[bytes], members: _Members) -> None:
    kinds = {0: "", stat.S_IFREG: "", stat.S_IFDIR: "", stat.S_IFLNK: "a link"}
    with zipfile.ZipFile(file) as opened, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Python 3.14's of members that overlap
        for member in opened.infolist():
            kind = kinds.get(stat.S_IFMT(member.external_attr >> 16), "not a regular file")
            if member.flag_bits & 1:
                kind = "encrypted"
            elif member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                kind = "not compressed with deflate"  # other methods may emit pieces of any size
            extract = partial(opened.extract, member, members.folder)
            size = None if member.is_dir() else member.file_size
            members.add(member.orig_filename, size, kind, extract)


class _Members:
    """The members unpacked so far, checked against the limits."""

    def __init__(self, archive: Path, folder: Path, limits: Limits):
        self.archive, self.folder, self.count, self.limits = archive, folder, 0, limits
        try:
            self.packed = archive.stat().st_size
        except OSError as error:
            raise UserError(f"{archive}: cannot be read: {error.strerror}") from None
        self.most = min(limits.total, max(limits.small, int(self.packed * limits.ratio)))
        self.left = self.most

    def add(self, name: str, size: int | None, kind: str, extract: Callable[[], object]) -> None:
        """Check a member, then write it. A folder has no `size`; `kind` is a refused kind."""
        target = self.folder.joinpath(name)
        if why := _refused_name(name) or (kind and f"it is {kind}") or self._taken(target, size):
            raise self.refused(name, why)
        self.count += 1
        if self.count > self.limits.members:
            raise BadArchiveError(f"{self.archive}: more than {self.limits.members:,} members")
        self.spend(size or 0, name)
        with _writing(target):
            if size is None:
                target.mkdir(parents=True, exist_ok=True)
            else:
                extract()
                if (size_on_disk := target.stat().st_size) != size:
                    what = f"{name!r} is cut off: {size_on_disk} of {size} bytes"
                    raise BadArchiveError(f"{self.archive}: {what}")

    def _taken(self, target: Path, size: int | None) -> str:
        for above in target.relative_to(self.folder).parents:
            if (self.folder / above).is_file():
                return f"{str(above)!r} is a file"
        new = not target.exists() or (size is None and target.is_dir())
        return "" if new else "it appears twice"

    def spend(self, size: int, name: str) -> None:
        if not 0 <= size <= self.left:
            may = f"an archive of {self.packed:,} may unpack to {self.most:,}"
            raise self.refused(name, f"{size:,} bytes, {self.left:,} are left; {may}")
        self.left -= size

    def refused(self, name: str, why: str) -> BadArchiveError:
        shown = name if len(name) <= 120 else name[:120] + "..."
        return BadArchiveError(f"{self.archive}: member {shown!r} is refused: {why}")


def _refused_name(name: str) -> str:
    """Reason why a name is refused: on some system it may lead out of the folder, or it is not
    printable."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    sizes = [len(part.encode(errors="replace")) for part in parts]
    reasons = {
        "its path is absolute": name.startswith("/"),
        "a backslash is a separator on some systems": "\\" in name,
        "its name has unprintable characters or a 0 byte": not name.isprintable(),
        "its path leads out of the folder": ".." in parts,
        "its path names a drive": bool(parts) and parts[0][1:2] == ":",
        "its name is too long": sum(sizes) + len(sizes) > _PATH or max(sizes, default=0) > _NAME,
    }
    return next((why for why, holds in reasons.items() if holds), "")


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Turn a full disk or a folder without write access into a UserError, which is not the
    archive's fault."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by gzip
            raise
        raise UserError(f"{target}: cannot be written: {error.strerror}") from None
