"""An index: a folder of texts that are searched by their vectors, their words, or both.

    INDEX/index.json     how texts are embedded, and by which model
    INDEX/texts.sqlite   the texts (store.py)
    INDEX/vectors-0.f32  their vectors, of length 1 (vectors.py)
    INDEX/graph          finds near vectors without comparing all (graph.py); may be deleted

Sparse vectors (splade) are in texts.sqlite, as postings, and are compared by their dot products.

    create_index(folder, embedding, size)
    with open_index(folder) as index:
        index.add(texts, vectors)
        index.search(vector, "the query", top=10, filter={"lang": "en"}, hybrid=True)

    query ──vector──> every cosine, or those of rows that the graph finds ─┐
          └─words───> BM25 (`hybrid`) ────────────────────────────────────┴─ fused ──> the best

Every vector is compared while an index has fewer than APPROXIMATE_FROM texts, without usearch, and
among few texts that a filter allows. Otherwise the graph finds candidates, more of them the fewer
texts are allowed, and their cosines are computed; if too few are allowed, every one is compared.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.atomic import write_new_folder
from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.common.sparse_vectors import DenseOrSparse, SparseVector, SparseVectors
from palm_ds.common.version import __version__
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.search.filters import Filter
from palm_ds.inference.search.graph import Graph, available, load_graph
from palm_ds.inference.search.ranking import Ranking, best_of, fused
from palm_ds.inference.search.store import (
    Added,
    LiveRows,
    Snapshot,
    Store,
    StoredText,
    create_database,
)
from palm_ds.inference.search.texts import IndexedText, check_unicode
from palm_ds.inference.search.vectors import SparseTable, VectorFile, unit
from palm_ds.model.pooling import SPLADE

log = logging.getLogger(__name__)

APPROXIMATE_FROM = 200_000
"""Texts from which an index has a graph."""
_ABOUT, _DATABASE = "index.json", "texts.sqlite"
_FEW = 20_000  # texts whose vectors are compared sooner than a graph is searched
_MOST_FOUND = 4096  # rows that are asked of a graph
_SPARE = 2  # times as many as should be needed, of rows that a filter or a deletion thins out
_MAX_LEFT_OUT = 0.3  # the share of a graph's rows that were deleted
_GATHERED = 0.25  # the share of rows below which their vectors are copied to be compared
_DEPTH = 100  # of each ranking, at least, that takes part in a fusion
_SAMPLE, _MIN_COSINE = 4, 0.95
"""Texts that show whether a model made an index, and the lowest cosine if it did: int8 loses some
of it."""


@dataclass(frozen=True, kw_only=True)
class IndexEmbedding:
    """Settings with which texts of an index are embedded, and queries must be."""

    model: str
    """The path of the model."""
    fingerprint: str
    """Of the model's files."""
    settings: EmbeddingSettings


@dataclass(frozen=True)
class SearchHit:
    """A text that a search has found."""

    record: StoredText
    score: float
    """The cosine of its vector and the query's, the dot product of sparse ones; of a hybrid search
    the fused score."""


class SearchIndex:
    """An opened index, which threads search, add to and delete from."""

    def __init__(
        self,
        store: Store,
        embedding: IndexEmbedding,
        *,
        name: str = "",
        folder: Path | None = None,
        approximate_from: int = APPROXIMATE_FROM,
    ) -> None:
        """`folder` None: it is read only."""
        self.store, self.embedding, self.folder = store, embedding, folder
        self.name, self.approximate_from = name, approximate_from
        self.graph: Graph | None = None
        self._growing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def __enter__(self) -> SearchIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Numbers of a vector."""
        return self.store.vectors.size

    @property
    def total(self) -> int:
        """Texts that are there now."""
        with self.store.reading() as now:
            return now.rows.total

    # ---- search ----

    def search(
        self,
        vector: np.ndarray | SparseVector,
        query: str = "",
        *,
        top: int = 10,
        filter: Filter | None = None,
        hybrid: bool = False,
        exact: bool = False,
    ) -> list[SearchHit]:
        """The best texts for a query with this vector (size,). `hybrid`: by vectors and by the
        words of `query`, fused; `exact`: every vector is compared, as sparse ones always are.
        Raises UserError."""
        if hybrid and not self.store.has_words:
            raise UserError(
                "hybrid: these are vectors of `palm-ds embed`, without words; "
                "`palm-ds index build` makes an index with both"
            )
        with self.store.reading() as now:
            allowed = now.allowed(filter) if filter else None
            depth = max(top, _DEPTH) if hybrid else top
            if isinstance(vector, SparseVector):
                ranking = now.by_weights(vector, depth, allowed)
            else:
                ranking = self._near(now, vector, depth, allowed, exact)
            if hybrid:
                ranking = fused([ranking, now.by_words(query, depth, allowed)])[:top]
            records = now.records([row for row, _ in ranking])
        if self.graph is not None and self._graph_of(now.rows) is None:
            self.grow_in_background()  # the index was compacted
        return [SearchHit(each, score) for each, (_, score) in zip(records, ranking, strict=True)]

    def _near(
        self, now: Snapshot, vector: np.ndarray, top: int, allowed: np.ndarray | None, exact: bool
    ) -> Ranking:
        """The nearest rows of those allowed (None: all), by cosine."""
        query = vector / max(float(np.linalg.norm(vector)), 1e-12)
        query = np.ascontiguousarray(query, np.float32)
        found = None if exact else self._candidates(now, query, top, allowed)
        return _ranked(now, query, top, allowed if found is None else found)

    def _candidates(
        self, now: Snapshot, query: np.ndarray, top: int, allowed: np.ndarray | None
    ) -> np.ndarray | None:
        """Rows that have the nearest ones, ascending, found by the graph; None: compare all."""
        total = now.rows.total if allowed is None else len(allowed)
        if now.rows.total < self.approximate_from or total <= _FEW:
            return None
        if (graph := self._graph_of(now.rows)) is None:
            return None
        mask = now.rows.alive if allowed is None else _mask(allowed, now.rows.count)
        covered = min(graph.covered, now.rows.count)
        thinned = total < now.rows.count
        wanted = math.ceil(top * now.rows.count / total) * (_SPARE if thinned else 1)
        if not covered or wanted > _MOST_FOUND:
            return None
        rows = graph.search(query, wanted)
        rows = rows[rows < covered]
        rows = np.sort(rows[mask[rows]])
        if len(rows) < top:
            return None
        return np.concatenate([rows, covered + np.flatnonzero(mask[covered:])])

    # ---- changes ----

    def add(
        self, texts: Sequence[IndexedText], vectors: DenseOrSparse, *, deadline: float = math.inf
    ) -> Added:
        """Add texts with their vectors (texts, size); they replace texts of the same ids. They are
        on disk, and are found, when this returns. `deadline`: as of the store. Raises UserError."""
        self._check_writable()
        if vectors.shape != (len(texts), self.size):
            raise UserError(f"vectors of {vectors.shape[1]} numbers; the index has {self.size}")
        numbers = vectors.data if isinstance(vectors, SparseVectors) else vectors
        if not np.isfinite(numbers).all():
            raise UserError("vectors: some numbers are not finite")
        dense = not isinstance(vectors, SparseVectors)
        return self.store.add(texts, unit(vectors) if dense else vectors, deadline=deadline)

    def delete(
        self, ids: Sequence[str] = (), filter: Filter | None = None, *, deadline: float = math.inf
    ) -> int:
        """Delete texts by id, or those that a filter allows; returns how many. `deadline`: as of
        the store. Raises UserError."""
        self._check_writable()
        for identity in ids:
            check_unicode(identity, "ids")
        if filter is not None:
            return self.store.delete_where(filter, deadline=deadline)
        return self.store.delete(ids, deadline=deadline)

    def compact(self) -> int:
        """Leave deleted texts out of the files; returns how many. The others have new rows and the
        same ids, searches go on, additions and deletions wait. Raises UserError."""
        self._check_writable()
        return self.store.compact()

    def _check_writable(self) -> None:
        if self.folder is None:
            raise UserError(
                "vectors of `palm-ds embed` are only searched; `palm-ds index build` makes an "
                "index that adds and deletes"
            )

    # ---- the graph ----

    @property
    def wants_graph(self) -> bool:
        """Whether a graph would make searches faster."""
        large = self.folder is not None and self.total >= self.approximate_from
        return large and not self.store.sparse

    def _graph_name(self, rows: LiveRows) -> str:
        """Of the graph of an index with these rows."""
        return f"{self.name}-{rows.generation}"

    def _graph_of(self, rows: LiveRows) -> Graph | None:
        """The graph, unless its rows were renumbered since."""
        graph = self.graph
        return graph if graph and graph.name == self._graph_name(rows) else None

    def open_graph(self) -> None:
        """Read the graph from its file, if the index is large enough for one and usearch is
        installed."""
        if not self.wants_graph or not available():
            return
        assert self.folder is not None
        with self.store.reading() as now:
            rows = now.rows
        if self._graph_of(rows) is None:
            self.graph = load_graph(self.folder, self._graph_name(rows), self.size, rows.count)

    def grow_graph(self, *, least: int = 1, threads: int = 0) -> bool:
        """Bring the graph up to date, if there should be one and it lacks `least` rows or more, and
        write it; searches go on. False if there was nothing to do. Raises UserError if it cannot be
        written."""
        if not self.wants_graph or not available():
            return False
        self._growing.acquire()
        try:
            self.open_graph()
            with self.store.reading() as now:
                rows, vectors = now.rows, now.vectors
            graph = self._graph_to_grow(rows)
            if rows.count - graph.covered < least:
                return False
            several = threads or os.cpu_count() or 1
            graph.extend(vectors, rows.alive, several, self._closing.is_set)
            self.graph = graph
            assert self.folder is not None
            graph.save(self.folder)
            return True
        except OSError as error:
            raise UserError(f"{self.folder}: the graph: {error.strerror or error}") from None
        finally:
            self._growing.release()

    def _graph_to_grow(self, rows: LiveRows) -> Graph:
        """The graph, or an empty one if many of its rows were deleted since."""
        if graph := self._graph_of(rows):
            dead = graph.covered - int(rows.alive[: graph.covered].sum()) - graph.left_out
            if dead <= _MAX_LEFT_OUT * max(graph.covered, 1):
                return graph
        return Graph(self._graph_name(rows), self.size)

    def grow_in_background(self, *, least: int = _FEW) -> None:
        """The same in a thread of its own, on half of the processors; an error is logged."""
        if not self.wants_graph or not available() or self._growing.locked():
            return
        with self.store.reading() as now:
            graph = self._graph_of(now.rows)
            if now.rows.count - (graph.covered if graph else 0) < least:
                return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        threads = max((os.cpu_count() or 1) // 2, 1)

        def grow() -> None:
            try:
                self.grow_graph(least=least, threads=threads)
            except UserError as error:
                log.warning("%s", error)

        self._threads.append(threading.Thread(target=grow, name="graph", daemon=True))
        self._threads[-1].start()

    # ---- the model ----

    def samples(self) -> tuple[list[str], np.ndarray]:
        """Some passages and their vectors of length 1, which show whether a model made them."""
        with self.store.reading() as now:
            rows = np.flatnonzero(now.rows.alive)
            if len(rows):
                rows = rows[np.unique(np.linspace(0, len(rows) - 1, _SAMPLE).astype(int))]
            passages = [each.passage for each in now.records(rows.tolist())]
            if self.store.sparse:
                return passages, unit(now.sparse_vectors(rows, self.size))
            return passages, now.vectors[rows]

    def stop(self) -> None:
        """Let the graph grow no more in the background; searches go on."""
        self._closing.set()

    def close(self) -> None:
        """End the background work and close the files."""
        self.stop()
        for thread in self._threads:
            thread.join()
        self.store.close()


def likeness(vectors: np.ndarray, of: np.ndarray) -> float:
    """The lowest cosine between vectors of samples, as a model gives them, and those of an index
    (of length 1); a model that made the index has at least `_MIN_COSINE`."""
    return float((unit(vectors) * of).sum(1).min()) if len(of) else 1.0


def made_by(cosine: float) -> bool:
    """Whether such a likeness is of the model that made an index."""
    return cosine > _MIN_COSINE


def _mask(rows: np.ndarray, count: int) -> np.ndarray:
    mask = np.zeros(count, bool)
    mask[rows] = True
    return mask


def _ranked(now: Snapshot, query: np.ndarray, top: int, rows: np.ndarray | None) -> Ranking:
    """The rows (None: all that are there; else some of these, ascending) with the highest cosine
    to a query of length 1, equal ones in their order."""
    if rows is None and now.rows.total < now.rows.count:
        rows = np.flatnonzero(now.rows.alive)
    if rows is None or len(rows) > _GATHERED * now.rows.count:
        cosines = now.vectors @ query
        cosines = cosines if rows is None else cosines[rows]
    else:
        cosines = now.vectors[rows] @ query
    return best_of(cosines, top, rows)


# ---- folders ----


def create_index(folder: Path, embedding: IndexEmbedding, size: int) -> None:
    """An index without texts, in a new folder. Raises UserError."""
    about = {
        "made_by": f"palm_ds {__version__}",
        "name": secrets.token_hex(8),
        "model": embedding.model,
        "fingerprint": embedding.fingerprint,
        "size": size,
        "settings": asdict(embedding.settings),
    }

    def fill(part: Path) -> None:
        sparse = embedding.settings.pooling == SPLADE
        create_database(part / _DATABASE, sparse=sparse)
        if not sparse:
            VectorFile(part, size).path(0).touch()
        write_json(part / _ABOUT, about)

    write_new_folder(folder, fill)


def is_index(path: Path) -> bool:
    """Whether a path is a folder that `create_index` made."""
    return (path / _ABOUT).is_file()


def open_index(folder: Path, *, approximate_from: int = APPROXIMATE_FROM) -> SearchIndex:
    """An index that `create_index` made, without its graph yet. Raises UserError."""
    about = _about(folder)
    if not (folder / _DATABASE).is_file():
        raise UserError(f"{folder}: damaged: {_DATABASE} is missing")
    settings, size = EmbeddingSettings(**about["settings"]), about["size"]
    sparse = settings.pooling == SPLADE
    return SearchIndex(
        Store(folder / _DATABASE, SparseTable(size) if sparse else VectorFile(folder, size)),
        IndexEmbedding(model=about["model"], fingerprint=about["fingerprint"], settings=settings),
        name=about["name"],
        folder=folder,
        approximate_from=approximate_from,
    )


def _about(folder: Path) -> Mapping[str, Any]:
    if not is_index(folder):
        raise UserError(f"{folder}: not an index; `palm-ds index build` makes one")
    file = folder / _ABOUT
    try:
        about = json.loads(file.read_text("utf-8"))
        kinds = {"name": str, "model": str, "fingerprint": str, "size": int, "settings": dict}
        wrong = [key for key, kind in kinds.items() if not isinstance(about[key], kind)]
        if wrong or about["size"] < 1:
            raise ValueError(wrong)
        layers = tuple(about["settings"].get("layers", (-1,)))
        about["settings"] = {**about["settings"], "layers": layers}
        EmbeddingSettings(**about["settings"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: damaged: {type(error).__name__} {error}") from None
    return about
