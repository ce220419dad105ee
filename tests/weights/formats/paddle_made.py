"""Paddle files for tests, in Paddle's exact bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

CODES = {
    "bool": 0,
    "int16": 1,
    "int32": 2,
    "int64": 3,
    "float16": 4,
    "float32": 5,
    "float64": 6,
    "uint8": 20,
    "int8": 21,
    "complex64": 23,
    "complex128": 24,
}
BFLOAT16 = 22  # the values are given as uint16


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def description(code: int, shape: Sequence[int]) -> bytes:
    return b"\x08" + varint(code) + b"".join(b"\x10" + varint(size) for size in shape)


def record(desc: bytes, data: bytes, *, levels: Sequence[bytes] = ()) -> bytes:
    """A variable, whatever its description and values claim."""
    head = struct.pack("<IQ", 0, len(levels))
    head += b"".join(struct.pack("<Q", len(level)) + level for level in levels)
    return head + struct.pack("<Ii", 0, len(desc)) + desc + data


def variable(array: np.ndarray, code: int | None = None) -> bytes:
    code = CODES[array.dtype.name] if code is None else code
    return record(description(code, array.shape), array.tobytes())


def write_folder(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """One file per variable."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        (folder / name).write_bytes(variable(array))
    return folder
