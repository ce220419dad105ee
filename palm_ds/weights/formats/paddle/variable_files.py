"""Reads and writes Paddle's binary tensor files: one variable per file, or several back to back.

    u32 0 | u64 levels | levels x (u64 size, size bytes)         sequence offsets; weights have none
    u32 0 | i32 size | TensorDesc: 08 type, 10 dimension, 10 ... | the values, row-major

All integers are little endian. Opening a file reads only these headers and checks them against the
file's length; `StoredVariable.read` reads the values of one tensor.
"""

from __future__ import annotations

import math
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import torch

from palm_ds.common.errors import UserError

TYPES = {  # VarType.Type of Paddle's framework.proto
    0: torch.bool,
    1: torch.int16,
    2: torch.int32,
    3: torch.int64,
    4: torch.float16,
    5: torch.float32,
    6: torch.float64,
    20: torch.uint8,
    21: torch.int8,
    22: torch.bfloat16,
    23: torch.complex64,
    24: torch.complex128,
}
PALM_ARCHIVE = "__palmmodel__"
MOST_DIMENSIONS = 16
_BEGINNING = bytes(16)  # of a variable without sequence offsets; weights have none
_MAX_LEVELS, _MAX_DESCRIPTION_BYTES = 8, 1024
_NO_VARIABLES = (".json", ".log", ".md", ".py", ".txt", ".yaml")


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """Bytes of a file. `text`: stored as UTF-8 text, one character per byte."""

    start: int
    length: int
    text: bool = False


@dataclass(frozen=True, kw_only=True)
class StoredVariable:
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    spans: tuple[ByteRange, ...]
    """Where its values are, row-major unless `by_column`."""
    by_column: bool = False

    @property
    def size(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Read the values. Raises UserError if the file has changed since it was opened."""
        data = bytearray(self.size)
        filled = 0
        try:
            with self.path.open("rb") as file:
                for span in self.spans:
                    filled += _read_span(file, span, memoryview(data)[filled:])
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        except ValueError:  # from bytes stored as text: the file has changed
            filled = 0
        if filled != self.size:
            raise UserError(f"{self.path}: has changed since it was opened")
        if not data:
            return torch.empty(self.shape, dtype=self.dtype)
        shape = self.shape[::-1] if self.by_column else self.shape
        tensor = torch.frombuffer(data, dtype=self.dtype).reshape(shape)
        return tensor.permute(*reversed(range(len(shape)))) if self.by_column else tensor


def _read_span(file: BufferedReader, span: ByteRange, into: memoryview) -> int:
    """Read a span; returns its number of bytes in the tensor."""
    file.seek(span.start)
    if not span.text:
        return file.readinto(into[: span.length])
    data = file.read(span.length).decode("utf-8", "surrogatepass").encode("latin1")
    into[: len(data)] = data
    return len(data)


def is_variables(path: Path) -> bool:
    """Whether a file starts like one with variables. Never raises."""
    try:
        with path.open("rb") as file:
            head = file.read(21)
    except OSError:
        return False
    return len(head) == 21 and head[:16] == _BEGINNING and head[20] == 0x08


def read_variable(path: Path) -> StoredVariable:
    """Read a file that must contain exactly one variable. Raises UserError otherwise."""
    with _open(path) as file:
        cursor = _Cursor(file, path, str(path), 0, _length(file))
        return _whole(cursor)


def read_folder(folder: Path) -> dict[str, StoredVariable]:
    """The variables of a folder by file name. Text files, hidden files, `__model__` and the like
    are ignored. Raises UserError for any other file that is not a variable."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from None
    return {path.name: read_variable(path) for path in files if not _no_variable(path.name)}


def read_combined(path: Path) -> list[StoredVariable]:
    """The variables of a combined file, in its order; it does not contain their names."""
    with _open(path) as file:
        cursor = _Cursor(file, path, str(path), 0, _length(file))
        variables: list[StoredVariable] = []
        while cursor.left or not variables:
            cursor.name = f"{path}: variable {len(variables) + 1}"
            variables.append(_record(cursor))
        return variables


def read_archive(path: Path) -> dict[str, StoredVariable]:
    """The variables in a `__palmmodel__`, an uncompressed tar; nothing is unpacked.

    Raises UserError for members that are not regular files, or whose names lead out of the archive.
    """
    variables: dict[str, StoredVariable] = {}
    with _open(path) as file:
        end = _length(file)
        for member in _members(file, path):
            name = PurePosixPath(member.name).name
            if _no_variable(name):
                continue
            where = f"{path}: {member.name}"
            if name in variables:
                raise UserError(f"{where}: duplicate member {name}")
            if member.offset_data + member.size > end:
                raise UserError(f"{where}: the archive ends inside it")
            start = member.offset_data
            variables[name] = _whole(_Cursor(file, path, where, start, start + member.size))
    return variables


def _members(file: BinaryIO, path: Path) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar, checked."""
    try:
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  the caller closes the file
        members = archive.getmembers()
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as an uncompressed tar: {error}") from None
    for member in members:
        parts = PurePosixPath(member.name).parts
        if not member.name.isprintable():  # messages would contain it
            raise UserError(f"{path}: a member's name is not printable, {member.name!r}; refused")
        if ".." in parts or PurePosixPath(member.name).is_absolute():
            raise UserError(f"{path}: the member {member.name!r} leads out of the archive; refused")
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise UserError(f"{path}: the member {member.name!r} is not a regular file; refused")
        yield member


def _no_variable(name: str) -> bool:
    framed = name.startswith("__") and name.endswith("__")
    return framed or name.startswith(".") or name.endswith(_NO_VARIABLES)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _length(file: BinaryIO) -> int:
    length = file.seek(0, 2)
    file.seek(0)
    return length


def write_variable(path: Path, tensor: torch.Tensor) -> None:
    """Write a file with one variable."""
    kinds = {dtype: kind for kind, dtype in TYPES.items()}
    description = b"\x08" + _as_varint(kinds[tensor.dtype])
    description += b"".join(b"\x10" + _as_varint(size) for size in tensor.shape)
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    with path.open("wb") as file:
        file.write(_BEGINNING + struct.pack("<i", len(description)) + description)
        file.write(values.data)


def _as_varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


# ---- one record ----


class _Cursor:
    """A position in a file, and where the readable part ends. `name` is the prefix of messages."""

    def __init__(self, file: BinaryIO, path: Path, name: str, at: int, end: int):
        self.file, self.path, self.name, self.at, self.end = file, path, name, at, end

    @property
    def left(self) -> int:
        return self.end - self.at

    def span(self, size: int, what: str) -> ByteRange:
        """Skip the next `size` bytes and return their range."""
        if size > self.left:
            raise self.error(f"ends inside {what}: expected {size} bytes, got {self.left}")
        span = ByteRange(start=self.at, length=size)
        self.at += size
        return span

    def take(self, size: int, what: str) -> bytes:
        span = self.span(size, what)
        self.file.seek(span.start)
        return self.file.read(size)

    def number(self, form: str, what: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def error(self, what: str) -> UserError:
        return UserError(f"{self.name}: {what}")


def _whole(cursor: _Cursor) -> StoredVariable:
    stored = _record(cursor)
    if cursor.left:
        raise cursor.error(f"{cursor.left} bytes more than its shape {stored.shape} needs")
    return stored


def _record(cursor: _Cursor) -> StoredVariable:
    """Read a variable's header and skip its values."""
    if version := cursor.number("<I", "its header"):
        raise cursor.error(f"not a Paddle variable: begins with version {version}, not 0")
    levels = cursor.number("<Q", "its header")
    if levels > _MAX_LEVELS:
        raise cursor.error(f"not a Paddle variable: {levels} levels of sequence offsets")
    for _ in range(levels):
        cursor.span(cursor.number("<Q", "its sequence offsets"), "its sequence offsets")
    if version := cursor.number("<I", "its header"):
        raise cursor.error(f"not a Paddle variable: its tensor has version {version}, not 0")
    size = cursor.number("<i", "its header")
    if not 0 < size <= _MAX_DESCRIPTION_BYTES:
        raise cursor.error(f"not a Paddle variable: a description of {size} bytes")
    dtype, shape = _description(cursor, cursor.take(size, "its description"))
    span = cursor.span(math.prod(shape) * dtype.itemsize, f"the values of its shape {shape}")
    return StoredVariable(path=cursor.path, dtype=dtype, shape=shape, spans=(span,))


def _description(cursor: _Cursor, data: bytes) -> tuple[torch.dtype, tuple[int, ...]]:
    """The type and the shape in a TensorDesc."""
    kind, shape = None, []
    try:
        for tag, value in _fields(data):
            if tag == 0x08:
                kind = value
            else:
                shape.append(value - (1 << 64) if value >> 63 else value)
    except (IndexError, ValueError) as error:
        raise cursor.error(f"not a Paddle variable: a garbled description ({error})") from None
    if kind not in TYPES:
        raise cursor.error(f"Paddle's type {kind} is not numeric")
    if any(size < 0 for size in shape):
        raise cursor.error(f"a negative dimension in its shape {tuple(shape)}")
    if len(shape) > MOST_DIMENSIONS:
        raise cursor.error(f"a shape of {len(shape)} dimensions")
    return TYPES[kind], tuple(shape)


def _fields(data: bytes) -> Iterator[tuple[int, int]]:
    """(tag, number) of each field of a protobuf message of integers, packed ones unpacked."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag not in (0x08, 0x10, 0x12):
            raise ValueError(f"field {tag:#x}")
        value, at = _varint(data, at)
        if tag != 0x12:
            yield tag, value
            continue
        end = at + value
        while at < end:
            dimension, at = _varint(data, at)
            yield 0x10, dimension


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number of more than 64 bits")
