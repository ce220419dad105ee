"""A graph of an index's vectors (HNSW, Malkov & Yashunin 2016, arXiv 1603.09320) that finds most of
the nearest ones without comparing all. usearch makes it: `pip install 'palm_ds[search]'`.

    INDEX/graph    a line of JSON (of which index, how many rows, the hash of the rest), usearch's

It is a cache: replaced atomically, checked when it is opened, and built again when it is lost or
damaged, or when many of its rows were deleted. It has the rows below `covered`; later ones are few
and are compared one by one.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.atomic import move_into_place

FILE = "graph"
_NEIGHBORS, _WIDTH_BUILT, _WIDTH_SEARCHED = 16, 128, 256
"""HNSW's M, efConstruction and ef."""
_AT_ONCE = 64  # rows that are added while searches wait
_PAUSE = 0.001  # seconds in which they go on


def available() -> bool:
    """Whether usearch is installed."""
    try:
        import usearch.index  # noqa: F401
    except ImportError:
        return False
    return True


class Graph:
    """A graph over rows of vectors, which threads search while one adds to it."""

    def __init__(self, name: str, size: int) -> None:
        """`name`: of the index; `size`: numbers of a vector."""
        self.name, self.size = name, size
        self.covered = self.left_out = 0
        """Rows below `covered` are in it, but for those that were deleted before they were
        added."""
        self._index = _new(size)
        self._use = threading.Lock()

    def search(self, query: np.ndarray, count: int) -> np.ndarray:
        """About the `count` nearest rows to a query (size,) of length 1, the best first; also
        deleted ones."""
        with self._use:
            self._index.expansion_search = max(_WIDTH_SEARCHED, count)
            return np.asarray(self._index.search(query, count, threads=1).keys, np.int64)

    def extend(
        self,
        vectors: np.ndarray,
        alive: np.ndarray,
        threads: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Add the rows of vectors (rows, size) from `covered` on that are there, until `stopped`.
        One thread at a time calls it; searches go on meanwhile."""
        for first in range(self.covered, len(vectors), _AT_ONCE * threads):
            if stopped():
                return
            last = min(first + _AT_ONCE * threads, len(vectors))
            rows = first + np.flatnonzero(alive[first:last])
            with self._use:
                if len(rows):
                    self._index.add(rows.astype(np.uint64), vectors[rows], threads=threads)
                self.left_out += last - first - len(rows)
                self.covered = last
            time.sleep(_PAUSE)

    def save(self, folder: Path) -> None:
        """Replace the file of the graph. Raises OSError."""
        with self._use:
            data, about = self._index.save(), self._about()
        header = json.dumps({**about, "sha256": hashlib.sha256(data).hexdigest()})
        part = folder / f".{FILE}.{secrets.token_hex(4)}.tmp"
        try:
            with part.open("wb") as file:
                file.write(f"{header}\n".encode())
                file.write(data)
            move_into_place(part, folder / FILE)
        finally:
            part.unlink(missing_ok=True)

    def _about(self) -> dict[str, Any]:
        return {
            "index": self.name,
            "size": self.size,
            "covered": self.covered,
            "left_out": self.left_out,
            "usearch": _version(),
        }


def load_graph(folder: Path, name: str, size: int, rows: int) -> Graph:
    """The graph of an index with this many rows; an empty one if its file is absent, damaged, or
    that of something else."""
    graph = Graph(name, size)
    try:
        with (folder / FILE).open("rb") as file:
            about, data = json.loads(file.readline()), file.read()
        intact = hashlib.sha256(data).hexdigest() == about["sha256"]
        wanted = {"index": name, "size": size, "usearch": _version()}
        if not intact or any(about[key] != value for key, value in wanted.items()):
            return graph
        if not 0 <= about["covered"] <= rows:
            return graph
        graph._index.load(data)
        graph.covered, graph.left_out = about["covered"], about["left_out"]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return Graph(name, size)
    return graph


def _new(size: int) -> Any:
    from usearch.index import Index

    return Index(
        ndim=size,
        metric="ip",
        dtype="f16",  # what it finds is compared again in float32
        connectivity=_NEIGHBORS,
        expansion_add=_WIDTH_BUILT,
        expansion_search=_WIDTH_SEARCHED,
        enable_key_lookups=False,
    )


def _version() -> str:
    import usearch

    return usearch.__version__
