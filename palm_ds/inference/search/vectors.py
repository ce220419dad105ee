"""Vectors of an index in a file that only grows: row r is at byte r * size * 4, as float32.

What lies behind the rows that the texts' database knows is left over from an adder that was killed,
and the next one writes over it. Rows that it knows never change, so readers map them into memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np

from palm_ds.common.errors import UserError

_ITEM = 4  # bytes of a number


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors (n, size) of length 1, float32; a vector of zeros stays one."""
    vectors = vectors.astype(np.float32, copy=False)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


class Vectors(Protocol):
    """Vectors by row."""

    size: int
    """Numbers of a vector."""

    def first(self, count: int) -> np.ndarray:
        """The first rows (count, size) float32, to be read only. Raises UserError if there are
        fewer."""
        ...


class VectorArray:
    """Vectors in memory."""

    def __init__(self, vectors: np.ndarray) -> None:
        self._vectors, self.size = vectors, vectors.shape[1]

    def first(self, count: int) -> np.ndarray:
        return self._vectors[:count]


class VectorFile:
    """Vectors in a file, which exists."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._map = np.empty((0, size), np.float32)

    def first(self, count: int) -> np.ndarray:
        mapped = self._map  # another thread may exchange it
        if len(mapped) < count:
            mapped = self._map = self._mapped(count)
        return mapped[:count]

    def _mapped(self, count: int) -> np.ndarray:
        try:
            rows = self.path.stat().st_size // (self.size * _ITEM)
            if rows >= count:
                return np.memmap(self.path, np.float32, "r", shape=(rows, self.size))
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}") from None
        raise UserError(f"{self.path}: has {rows:,} vectors of {count:,}: it was truncated")

    def write(self, first: int, vectors: np.ndarray) -> None:
        """Write vectors (n, size) from a row on; they are on disk when this returns. One process at
        a time. Raises OSError."""
        data = memoryview(np.ascontiguousarray(vectors, np.float32).tobytes())
        at = first * self.size * _ITEM
        file = os.open(self.path, os.O_WRONLY)
        try:
            while data:
                written = os.pwrite(file, data, at)
                data, at = data[written:], at + written
            os.fsync(file)
        finally:
            os.close(file)
