"""Reads TensorFlow's version 2 checkpoints without TensorFlow.

    NAME.index                   a LevelDB table: name -> dtype, shape, file number, offset
    NAME.data-00000-of-00001     the raw values

The table consists of blocks. Each block, like each tensor, has a checksum (a masked crc32c):

    entry: bytes shared with the previous key, new bytes, value bytes; the new bytes; the value
    block: entries, restart points, their count   then 1 byte of compression and 4 of checksum
    file:  blocks, ..., the index of the blocks, 48 bytes of footer with the index's position
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial, reduce
from pathlib import Path

import numpy as np
import torch

from palm_ds.common.errors import UserError
from palm_ds.weights.formats.contents import TensorEntry
from palm_ds.weights.formats.torch_files import check_total

_FOOTER, _MAGIC = 48, 0xDB4775248B80FB57
_LARGEST_INDEX = 1 << 28  # bytes; a table of a million tensors has fewer
_MAX_DIMENSIONS = 32
_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}
_LANES = 1 << 12  # stretches whose checksums are computed in parallel


@dataclass(frozen=True, kw_only=True)
class BundleEntry:
    """Location of a tensor. `dtype` is None if it is not numeric, such as text."""

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int
    checksum: int | None


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The readable tensors of a checkpoint, and why the others are not."""

    entries: Mapping[str, TensorEntry]
    skipped: Mapping[str, str]


def is_index(path: Path) -> bool:
    """Whether the file ends like the index of a checkpoint."""
    if path.stat().st_size < _FOOTER:
        return False
    with path.open("rb") as file:
        file.seek(-8, 2)
        return int.from_bytes(file.read(8), "little") == _MAGIC


def open_bundle(index: Path) -> Bundle:
    """Open a checkpoint by its index file. Raises UserError if it is damaged."""
    stored = [_stored(name, value, index) for name, value in _table(index)]
    for tensor in stored:
        _check_place(tensor, index)
    files = {x.file for x in stored}
    there = sum(file.stat().st_size for file in files if file.is_file())
    check_total(index, sum(x.size for x in stored), there)
    readable = [tensor for tensor in stored if tensor.dtype is not None]
    return Bundle(
        entries={
            tensor.name: TensorEntry(
                source_names=(tensor.name,), shape=tensor.shape, read=partial(read_tensor, tensor)
            )
            for tensor in readable
        },
        skipped={x.name: "not a numeric tensor" for x in stored if x.dtype is None},
    )


def read_tensor(tensor: BundleEntry) -> torch.Tensor:
    """Read the values and verify their checksum."""
    assert tensor.dtype is not None
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        data = bytearray(file.read(tensor.size))
    if len(data) != tensor.size:
        raise UserError(f"{tensor.file}: ends inside {tensor.name}")
    if tensor.checksum is not None and masked_crc(data) != tensor.checksum:
        raise UserError(f"{tensor.file}: {tensor.name} is damaged: its checksum does not match")
    if not data:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape)


# ---- the table ----


def _table(path: Path) -> Iterator[tuple[str, bytes]]:
    """{name: its entry}; also checks the header."""
    data = _whole(path)
    if len(data) < _FOOTER or int.from_bytes(data[-8:], "little") != _MAGIC:
        raise UserError(f"{path}: not the index of a TensorFlow checkpoint, or truncated")
    footer = data[-_FOOTER:]
    _, at = _handle(footer, 0, path)  # a block of names, always empty in checkpoints
    (start, size), _ = _handle(footer, at, path)
    seen = False
    done = 0  # bytes of blocks: of a sound file each is listed once
    for _, value in _entries(_block(data, start, size, path), path):
        (start, size), _ = _handle(value, 0, path)
        done += size
        if done > len(data):
            raise UserError(f"{path}: lists the same blocks again and again; refused")
        for key, entry in _entries(_block(data, start, size, path), path):
            if key:
                yield _text(key, path), entry
            else:
                seen = True
                _check_header(entry, path)
    if not seen:
        raise UserError(f"{path}: has no header")


def _whole(path: Path) -> bytes:
    try:
        if path.stat().st_size > _LARGEST_INDEX:
            raise UserError(f"{path}: too large for an index")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _block(data: bytes, start: int, size: int, path: Path) -> bytes:
    end = start + size
    if end + 5 > len(data) - _FOOTER:
        raise UserError(f"{path}: a block is outside the file")
    checksum = int.from_bytes(data[end + 1 : end + 5], "little")
    if masked_crc(data[start : end + 1]) != checksum:
        raise UserError(f"{path}: a block is damaged: its checksum does not match")
    if data[end]:
        kind = "with snappy" if data[end] == 1 else f"with method {data[end]}"
        raise UserError(f"{path}: its blocks are compressed {kind}, which is not supported")
    return data[start:end]


def _entries(block: bytes, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of each entry; a key is stored as the prefix shared with the last one, and the
    rest."""
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise UserError(f"{path}: a block is cut short")
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at, path)
        new, at = _varint(block, at, path)
        length, at = _varint(block, at, path)
        if shared > len(key) or at + new + length > end:
            raise UserError(f"{path}: an entry is outside its block")
        key = key[:shared] + block[at : at + new]
        at += new + length
        yield key, block[at - length : at]


def _handle(data: bytes, at: int, path: Path) -> tuple[tuple[int, int], int]:
    start, at = _varint(data, at, path)
    size, at = _varint(data, at, path)
    return (start, size), at


def _varint(data: bytes, at: int, path: Path) -> tuple[int, int]:
    """(value, its end) of a varint: seven bits per byte, lowest first."""
    value = 0
    for i, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value & (1 << 64) - 1, at + i + 1
    raise UserError(f"{path}: a varint has no end")


# ---- entries ----


def _fields(message: bytes, path: Path) -> Iterator[tuple[int, int | bytes]]:
    """(field, value) of each field of a protocol buffer."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at, path)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at, path)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, at = _varint(message, at, path)
        else:
            length = {1: 8, 5: 4}.get(kind, len(message) + 1)
        if at + length > len(message):
            raise UserError(f"{path}: the entry of a tensor cannot be read")
        piece = message[at : at + length]
        yield tag >> 3, piece if kind == 2 else int.from_bytes(piece, "little")
        at += length


def _check_header(message: bytes, path: Path) -> None:
    """Field 1: number of files; field 2: 1 if big-endian."""
    said = dict(_fields(message, path))
    if said.get(2):
        raise UserError(f"{path}: written on a big-endian machine, which is not supported")


def _stored(name: str, message: bytes, index: Path) -> BundleEntry:
    """Fields: 1 dtype, 2 shape, 3 file number, 4 offset, 5 bytes, 6 checksum, 7 slices."""
    fields = list(_fields(message, index))
    said = {number: value for number, value in fields if isinstance(value, int)}
    if any(number == 7 for number, _ in fields):
        raise UserError(f"{index}: {name} is stored in slices, which is not supported")
    shape = next((_shape(v, name, index) for n, v in fields if n == 2 and isinstance(v, bytes)), ())
    return BundleEntry(
        name=name,
        dtype=_DTYPES.get(said.get(1, 0)),
        shape=shape,
        file=_data_file(index, said.get(3, 0), name),
        offset=said.get(4, 0),
        size=said.get(5, 0),
        checksum=said.get(6),
    )


def _shape(message: bytes, name: str, index: Path) -> tuple[int, ...]:
    shape = []
    for number, value in _fields(message, index):
        if number == 2 and isinstance(value, bytes):
            size = dict(_fields(value, index)).get(1, 0)
            shape.append(size if isinstance(size, int) else -1)
    if len(shape) > _MAX_DIMENSIONS or any(size < 0 or size >= 1 << 62 for size in shape):
        raise UserError(f"{index}: {name} has an impossible shape: {shape[:_MAX_DIMENSIONS]}")
    return tuple(shape)


def _data_file(index: Path, number: int, name: str) -> Path:
    stem = index.name.removesuffix(".index")
    pattern = re.compile(re.escape(f"{stem}.data-{number:05d}-of-") + r"\d{5}")
    files = [path for path in index.parent.iterdir() if pattern.fullmatch(path.name)]
    if len(files) != 1:
        what = "no" if not files else "more than one"
        raise UserError(f"{index}: {what} {stem}.data-{number:05d}-of-*, where {name} is")
    return files[0]


def _check_place(tensor: BundleEntry, index: Path) -> None:
    """Raises UserError unless it is inside its file and has the size of its shape; nothing has been
    allocated yet."""
    if tensor.offset + tensor.size > tensor.file.stat().st_size:
        raise UserError(f"{tensor.file}: cut short: {tensor.name} ends beyond it")
    if tensor.dtype is None:
        return
    size = reduce(lambda a, b: a * b, tensor.shape, tensor.dtype.itemsize)
    if size != tensor.size:
        raise UserError(
            f"{index}: {tensor.name} {tensor.shape} has {tensor.size} bytes, not {size}"
        )


def _text(key: bytes, path: Path) -> str:
    try:
        return key.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: a tensor's name is not text: {key[:40]!r}") from None


# ---- crc32c ----


def masked_crc(data: bytes | bytearray) -> int:
    """LevelDB's checksum: crc32c rotated by 15 bits plus a constant, so that it is also sound for
    data that contains checksums."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes | bytearray) -> int:
    """Castagnoli's checksum.

    The data is cut into stretches whose checksums numpy computes in parallel. Two neighbors are
    combined by advancing the first over as many zeros as the second is long.
    """
    length = len(data) // _LANES
    crc = 0xFFFFFFFF
    if length:
        lanes = np.frombuffer(data, np.uint8, length * _LANES).reshape(_LANES, length)
        crc = _side_by_side(lanes, crc)
    table = _byte_table().tolist()
    for byte in memoryview(data)[length * _LANES :]:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _side_by_side(lanes: np.ndarray, start: int) -> int:
    """The final state of each row of (lanes, length) bytes."""
    table = _byte_table()
    crc = np.zeros(len(lanes), np.uint32)
    crc[0] = start
    for column in np.ascontiguousarray(lanes.T):  # one byte of each row
        crc = table[(crc ^ column) & 255] ^ crc >> 8
    zeros = _after_zeros(lanes.shape[1])
    while len(crc) > 1:
        crc = _times(zeros, crc[::2]) ^ crc[1::2]
        zeros = _times(zeros, zeros)
    return int(crc[0])


@cache
def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(0x82F63B78), table >> 1)
    return table.astype(np.uint32)


def _after_zeros(count: int) -> np.ndarray:
    """(32,) the effect of `count` zero bytes on each bit of the state."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power = _byte_table()[bits & 255] ^ bits >> 8  # one zero byte
    result = bits
    while count:
        if count & 1:
            result = _times(power, result)
        power = _times(power, power)
        count >>= 1
    return result


def _times(matrix: np.ndarray, states: np.ndarray) -> np.ndarray:
    """(n,) states multiplied by a 32-column matrix over GF(2)."""
    result = np.zeros_like(states)
    for bit in range(32):
        result ^= np.where(states >> np.uint32(bit) & np.uint32(1), matrix[bit], np.uint32(0))
    return result
