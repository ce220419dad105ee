"""Vectors of an index in a file that only grows: row r is at byte r * size * 4, as float32. Sparse
ones are in the texts' database instead (postings.py).

    vectors-0.f32     of a new index; compacting it writes vectors-1.f32, and removes this one

Bytes after the rows that the texts' database knows were left by a process that was killed; the next
addition overwrites them. Rows that it knows never change, so readers map them into memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np

from palm_ds.common.atomic import sync, sync_opened
from palm_ds.common.errors import UserError

_ITEM = 4  # bytes of a number
_AT_ONCE = 65_536  # vectors that are copied


class StoreError(UserError):
    """The disk is full or fails, or a file of an index is damaged: no mistake in a request."""


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors (n, size) of length 1, float32; a vector of zeros stays one."""
    vectors = vectors.astype(np.float32, copy=False)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


class Vectors(Protocol):
    """Vectors by row."""

    size: int
    """Numbers of a vector."""

    def first(self, count: int, generation: int) -> np.ndarray:
        """The first rows (count, size) float32, to be read only. Raises StoreError if there are
        fewer, and FileNotFoundError."""
        ...


class VectorArray:
    """Vectors in memory."""

    def __init__(self, vectors: np.ndarray) -> None:
        self._vectors, self.size = vectors, vectors.shape[1]

    def first(self, count: int, generation: int) -> np.ndarray:
        assert not generation, "vectors in memory are never compacted"
        return self._vectors[:count]


class SparseTable:
    """Sparse vectors, in the texts' database."""

    def __init__(self, size: int) -> None:
        self.size = size

    def first(self, count: int, generation: int) -> np.ndarray:
        return np.empty((count, 0), np.float32)


class VectorFile:
    """Vectors in the files of a folder, one for each generation."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self._map = (-1, np.empty((0, size), np.float32))

    def first(self, count: int, generation: int) -> np.ndarray:
        known, mapped = self._map  # another thread may exchange it
        if known != generation or len(mapped) < count:
            mapped = self._mapped(count, generation)
            self._map = generation, mapped
        return mapped[:count]

    def _mapped(self, count: int, generation: int) -> np.ndarray:
        path = self.path(generation)
        rows = path.stat().st_size // (self.size * _ITEM)
        if rows < count:
            raise StoreError(f"{path}: has only {rows:,} of {count:,} vectors: it was truncated")
        if not rows:
            return np.empty((0, self.size), np.float32)
        return np.memmap(path, np.float32, "r", shape=(rows, self.size))

    def path(self, generation: int) -> Path:
        return self.folder / f"vectors-{generation}.f32"

    def write(self, first: int, vectors: np.ndarray, generation: int) -> None:
        """Write vectors (n, size) from a row on; they are on disk when this returns. One process at
        a time. Raises OSError."""
        file = os.open(self.path(generation), os.O_WRONLY)
        try:
            self._write(file, first, vectors)
            sync_opened(file)
        finally:
            os.close(file)

    def _write(self, file: int, first: int, vectors: np.ndarray) -> None:
        data = memoryview(np.ascontiguousarray(vectors, np.float32).tobytes())
        at = first * self.size * _ITEM
        while data:
            written = os.pwrite(file, data, at)
            data, at = data[written:], at + written

    def copy(self, rows: np.ndarray, count: int, generation: int) -> None:
        """Write these of the first `count` rows to the file of the next generation; it is on disk
        when this returns. Raises OSError."""
        vectors = self.first(count, generation)
        file = os.open(self.path(generation + 1), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            for first in range(0, len(rows), _AT_ONCE):
                self._write(file, first, vectors[rows[first : first + _AT_ONCE]])
            sync_opened(file)
        finally:
            os.close(file)
        sync(self.folder)

    def remove_before(self, generation: int) -> None:
        """Remove the files of earlier generations; processes that have opened one keep it."""
        for path in self.folder.glob("vectors-*.f32"):
            number = path.stem.removeprefix("vectors-")
            if number.isdecimal() and int(number) < generation:
                path.unlink(missing_ok=True)
