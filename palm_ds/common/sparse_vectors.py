"""Vectors that are mostly zeros, row by row as their non-zero entries.

vectors = SparseVectors.of(dense)                       # (rows, size)
scipy.sparse.csr_array((vectors.data, vectors.indices, vectors.indptr), shape=vectors.shape)
scipy.sparse.load_npz("vectors.npz")                    # what `save` wrote
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 24  # numbers of the queries that are written out at a time


class SparseVector(NamedTuple):
    """The non-zero entries of a vector, by ascending index."""

    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]


NO_ENTRIES = SparseVector(np.empty(0, np.int32), np.empty(0, np.float32))


@dataclass(frozen=True, eq=False)
class SparseVectors:
    """Vectors (rows, size) of float32, in the arrays of SciPy's CSR format."""

    data: npt.NDArray[np.float32]
    indices: npt.NDArray[np.int32]
    indptr: npt.NDArray[np.int64]
    """(rows + 1,) where the entries of each row begin."""
    size: int

    @classmethod
    def of(cls, dense: npt.NDArray[np.float32]) -> SparseVectors:
        """From vectors (rows, size)."""
        rows, indices = dense.nonzero()
        starts = np.searchsorted(rows, np.arange(len(dense) + 1))
        data = dense[rows, indices].astype(np.float32, copy=False)
        return cls(data, indices.astype(np.int32), starts.astype(np.int64), dense.shape[1])

    @classmethod
    def stack(cls, vectors: Sequence[SparseVector], size: int) -> SparseVectors:
        """From single ones."""
        starts = np.cumsum([0, *(len(vector.indices) for vector in vectors)], dtype=np.int64)
        data = [NO_ENTRIES.values, *(vector.values for vector in vectors)]
        indices = [NO_ENTRIES.indices, *(vector.indices for vector in vectors)]
        return cls(np.concatenate(data), np.concatenate(indices), starts, size)

    @classmethod
    def join(cls, parts: Sequence[SparseVectors]) -> SparseVectors:
        """The rows of several, one after the other."""
        starts = np.cumsum([0, *np.concatenate([part.active for part in parts])], dtype=np.int64)
        data = np.concatenate([part.data for part in parts])
        indices = np.concatenate([part.indices for part in parts])
        return cls(data, indices, starts, parts[0].size)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.size

    @property
    def active(self) -> npt.NDArray[np.int64]:
        """(rows,) the number of non-zero entries of each."""
        return np.diff(self.indptr)

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, row: int) -> SparseVector:
        own = slice(self.indptr[row], self.indptr[row + 1])
        return SparseVector(self.indices[own], self.data[own])

    def __iter__(self) -> Iterator[SparseVector]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<SparseVectors {self.shape}, {len(self.data):,} non-zero>"

    def take(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> SparseVectors:
        """Some rows, in this order."""
        return SparseVectors.stack([self[int(row)] for row in rows], self.size)

    def toarray(self) -> npt.NDArray[np.float32]:
        """(rows, size)"""
        dense = np.zeros(self.shape, np.float32)
        dense[np.arange(len(self)).repeat(self.active), self.indices] = self.data
        return dense

    def save(self, path: Path) -> None:
        """Write the file that scipy.sparse.load_npz reads. Raises OSError."""
        arrays = {"data": self.data, "indices": self.indices, "indptr": self.indptr}
        np.savez(path, **arrays, shape=np.array(self.shape), format=np.array(b"csr"))


def load_sparse(path: Path) -> SparseVectors:
    """Read what `save` wrote. Raises OSError, ValueError or KeyError for another file."""
    with np.load(path, allow_pickle=False) as file:
        names = ("data", "indices", "indptr")
        return SparseVectors(*(file[name] for name in names), size=int(file["shape"][1]))


DenseOrSparse: TypeAlias = npt.NDArray[np.float32] | SparseVectors


def part_of(vectors: DenseOrSparse, first: int, last: int) -> Any:
    """The rows from `first` on, before `last`, of vectors of either kind."""
    if isinstance(vectors, np.ndarray):
        return vectors[first:last]
    return vectors.take(range(first, min(last, len(vectors))))


def products(queries: DenseOrSparse, texts: DenseOrSparse) -> npt.NDArray[np.float32]:
    """(queries, texts) dot products of two sets of vectors of the same kind."""
    if isinstance(texts, np.ndarray):
        assert isinstance(queries, np.ndarray)
        return queries @ texts.T
    assert isinstance(queries, SparseVectors)
    scores = np.empty((len(queries), len(texts)), np.float32)
    rows = max(_BLOCK // texts.size, 1)
    for first in range(0, len(queries), rows):
        part = part_of(queries, first, first + rows)
        columns = np.ascontiguousarray(part.toarray().T)  # (size, rows)
        for n, text in enumerate(texts):
            scores[first : first + rows, n] = text.values @ columns[text.indices]
    return scores
