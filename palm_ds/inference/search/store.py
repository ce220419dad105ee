"""The texts of an index: an SQLite database, which alone says which rows there are.

    texts(row, id, title, text, metadata)   those that are there
    deleted(number, row)                    those that were; a row is never used again
    vocabulary, postings, lengths           the words of each passage, for BM25 (postings.py)
    weights                                 sparse vectors, if these are what it has
    state(next_row, generation)             rows that were ever used; which file has the vectors

    add:     begin ─ vectors behind the last row, flushed ─ texts, words, next_row ─ commit
    delete:  begin ─ texts, deleted ─ commit
    compact: begin ─ vectors of the rows that are there to a file of the next generation, flushed
             ─ their new numbers, generation ─ commit ─ the old file is removed

A process that is killed before the commit has changed nothing; after it everything is on disk (WAL,
`synchronous = FULL`). One adds or deletes at a time, in whatever process. Each search reads one
state of the database (`reading`), whatever is added or deleted meanwhile.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from palm_ds.common.errors import UserError, named_line
from palm_ds.common.sparse_vectors import DenseOrSparse, SparseVector, SparseVectors
from palm_ds.inference.search.filters import Filter, check_keys, clause_of
from palm_ds.inference.search.postings import SCHEMA as _WORDS
from palm_ds.inference.search.postings import (
    SPARSE_SCHEMA,
    append_vectors,
    append_words,
    lengths_from,
    postings_of,
    renumber,
    renumber_vectors,
    vectors_of,
    weights_of,
)
from palm_ds.inference.search.ranking import Ranking, best_of, bm25, dot_products
from palm_ds.inference.search.texts import IndexedText
from palm_ds.inference.search.vectors import SparseTable, StoreError, VectorFile, Vectors
from palm_ds.inference.search.words import query_words, words_of

_FORMAT = 1
_MAX_LOG = 64 << 20  # bytes that the log of a large change keeps on disk
_PATIENCE = 60  # seconds to wait for another process that adds or deletes
_SCHEMA = f"""
PRAGMA user_version = {_FORMAT};{_WORDS}CREATE TABLE texts (
    row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL, text TEXT NOT NULL,
    metadata TEXT NOT NULL
);
CREATE TABLE deleted (number INTEGER PRIMARY KEY, row INTEGER NOT NULL);
CREATE TABLE state (next_row INTEGER NOT NULL, generation INTEGER NOT NULL);
INSERT INTO state VALUES (0, 0);
"""
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_INSERT = "INSERT INTO texts VALUES (?, ?, ?, ?, ?)"


@contextmanager
def _decoding() -> Iterator[None]:
    """Turns what the contents of a database that was edited by hand lead to into an error of the
    database."""
    try:
        yield
    except UserError:
        raise
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise sqlite3.DatabaseError(
            f"the index is damaged ({named_line(error)}); build it again with `palm-ds index build`"
        ) from error


class StoreBusyError(StoreError):
    """Another process is changing the index; a later try may succeed."""


class StoredText(NamedTuple):
    """A row of the table `texts`."""

    row: int
    id: str
    title: str
    text: str
    metadata: dict[str, Any]

    @property
    def passage(self) -> str:
        return IndexedText(text=self.text, title=self.title).passage


class Added(NamedTuple):
    """Result of an addition."""

    added: int
    replaced: int
    """Texts of the same ids, which are deleted."""


@dataclass(frozen=True)
class LiveRows:
    """The rows that are there in one state of the database."""

    generation: int
    """The number of compactions, each of which renumbers the rows."""
    count: int
    """Rows that were ever used: all are below this."""
    deletions: int
    alive: np.ndarray  # (count,) bool
    total: int
    """Those that are there."""
    lengths: np.ndarray  # (count,) uint32
    """The words of each text, also of deleted ones."""


_NO_ROWS = LiveRows(0, 0, 0, np.ones(0, bool), 0, np.zeros(0, np.uint32))


@dataclass(frozen=True)
class Snapshot:
    """One state of an index, for as long as it is read."""

    connection: sqlite3.Connection
    rows: LiveRows
    vectors: np.ndarray
    """(rows.count, size) float32 of length 1, also of rows that were deleted; no numbers of sparse
    ones."""

    def allowed(self, filter: Filter) -> np.ndarray:
        """The rows that a filter allows, ascending. Raises UserError, also for a filter that allows
        none because it names a key that no text has."""
        sql, parameters = clause_of(filter)
        select = f"SELECT row FROM texts WHERE {sql} ORDER BY row"
        with _decoding():
            found = self.connection.execute(select, parameters)
            rows = np.fromiter((row for (row,) in found), np.int64)
            rows = rows[self.rows.alive[rows]]
        if self.rows.total and not len(rows):
            check_keys(self.connection, filter)
        return rows

    @_decoding()
    def by_words(self, query: str, top: int, allowed: np.ndarray | None = None) -> Ranking:
        """The texts with any word of a query by BM25, of the rows `allowed` (None: all)."""
        rows = self.rows
        postings = (postings_of(self.connection, word) for word in query_words(query))
        scores = bm25(postings, rows.lengths, rows.alive, rows.total)
        having = np.flatnonzero(scores) if allowed is None else allowed[scores[allowed] > 0]
        return best_of(scores[having], top, having)

    @_decoding()
    def by_weights(
        self, query: SparseVector, top: int, allowed: np.ndarray | None = None
    ) -> Ranking:
        """The texts with any token of a sparse query, by the dot product of their vectors, of the
        rows `allowed` (None: all)."""
        rows = self.rows
        postings = (weights_of(self.connection, token) for token in query.indices.tolist())
        scores = dot_products(query, postings, rows.count)
        having = np.flatnonzero(rows.alive) if allowed is None else allowed
        having = having[scores[having] > 0]
        return best_of(scores[having], top, having)

    @_decoding()
    def sparse_vectors(self, rows: np.ndarray, size: int) -> np.ndarray:
        """The vectors (rows, size) of some rows of a sparse index, ascending."""
        return vectors_of(self.connection, rows, size)

    @_decoding()
    def records(self, rows: Sequence[int]) -> list[StoredText]:
        """The texts of rows that are there, in this order."""
        found = self.connection.execute(
            "SELECT * FROM texts WHERE row IN (SELECT value FROM json_each(?))",
            [json.dumps([int(row) for row in rows])],
        )
        by_row = {
            row: StoredText(row, identity, title, text, json.loads(metadata))
            for row, identity, title, text, metadata in found
        }
        return [by_row[int(row)] for row in rows]


class Store:
    """Texts and vectors that are read by several threads and processes. Raises StoreError for a
    damaged file and for failures of the disk or the database, and StoreBusyError for a change that
    could not start before its `deadline` (on the monotonic clock), or within a minute, because
    another process was changing the index."""

    def __init__(self, database: Path | None, vectors: Vectors) -> None:
        """`database` None: in memory, to be read only once it is filled."""
        self.path, self.vectors = database, vectors
        self._own, self._opened = threading.local(), list[sqlite3.Connection]()
        self.close = weakref.finalize(self, _close, self._opened)
        """Close all connections; also done when nothing uses the store any more."""
        self._one = threading.RLock()
        """Held while the one connection to a database in memory is used."""
        self._rows = _NO_ROWS
        self.has_words = database is not None
        if self.has_words:
            self._check_format()

    @classmethod
    def in_memory(cls, vectors: Vectors, texts: Sequence[IndexedText]) -> Store:
        """A store that only vectors search; the rows are the places of the texts."""
        store = cls(None, vectors)
        connection = store._connection()
        connection.executescript(_SCHEMA)
        with connection:
            connection.executemany(_INSERT, (_values(n, text) for n, text in enumerate(texts)))
            connection.execute("UPDATE state SET next_row = ?", [len(texts)])
        return store

    @property
    def sparse(self) -> bool:
        """Whether its vectors are sparse."""
        return isinstance(self.vectors, SparseTable)

    @property
    def _file(self) -> VectorFile:
        assert isinstance(self.vectors, VectorFile), "an index in memory is read only"
        return self.vectors

    # ---- reading ----

    def _check_format(self) -> None:
        with self._said():
            (version,) = self._connection().execute("PRAGMA user_version").fetchone()
        if version != _FORMAT:
            raise UserError(
                f"{self.path}: was made by another version of palm_ds; build it again with "
                "`palm-ds index build`"
            )
        with self.reading():
            pass

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """One state of the index."""
        with self._one if self.path is None else nullcontext(), self._said():
            connection = self._connection()
            try:
                yield self._snapshot(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _snapshot(self, connection: sqlite3.Connection) -> Snapshot:
        """A state whose vectors are there: those of an older one may be removed before they are
        opened."""
        generation = -1
        while True:
            connection.execute("BEGIN")
            rows = self._rows_of(connection)
            try:
                return Snapshot(connection, rows, self.vectors.first(rows.count, rows.generation))
            except FileNotFoundError as error:
                if rows.generation == generation:
                    line = f"{error.filename}: is missing: the index is damaged"
                    raise StoreError(line) from None
                generation = rows.generation
                connection.execute("ROLLBACK")

    @_decoding()
    def _rows_of(self, connection: sqlite3.Connection) -> LiveRows:
        """The rows of this state, from those of an earlier one that another search has left."""
        state = "SELECT generation, next_row FROM state"
        generation, count = connection.execute(state).fetchone()
        (deletions,) = connection.execute("SELECT max(number) FROM deleted").fetchone()
        known, deletions = self._rows, deletions or 0
        if (known.generation, known.count, known.deletions) == (generation, count, deletions):
            return known
        later = known.count > count or known.deletions > deletions
        if later or known.generation != generation:
            known = _NO_ROWS
        alive, lengths = np.ones(count, bool), np.zeros(count, np.uint32)
        alive[: known.count], lengths[: known.count] = known.alive, known.lengths
        gone = connection.execute("SELECT row FROM deleted WHERE number > ?", [known.deletions])
        alive[np.fromiter((row for (row,) in gone), np.int64)] = False
        for first, words in lengths_from(connection, known.count):
            lengths[first : first + len(words)] = words
        self._rows = LiveRows(generation, count, deletions, alive, int(alive.sum()), lengths)
        return self._rows

    def unchanged(self, texts: Sequence[IndexedText]) -> list[bool]:
        """Whether each text is there as it is, under its id; of several with one id the last counts
        for all, as it is the one that stays."""
        last = {text.id: _values(0, text)[2:] for text in texts}
        with self.reading() as now:
            select = "SELECT title, text, metadata FROM texts WHERE id = ?"
            same = {
                identity: now.connection.execute(select, [identity]).fetchone() == values
                for identity, values in last.items()
            }
        return [same[text.id] for text in texts]

    # ---- writing ----

    def add(
        self, texts: Sequence[IndexedText], vectors: DenseOrSparse, *, deadline: float = math.inf
    ) -> Added:
        """Add texts with their vectors (texts, size), dense ones of length 1, all or none of them;
        they replace texts of the same ids. They are on disk when this returns."""
        assert vectors.shape == (len(texts), self.vectors.size)
        with self._writing(deadline) as connection:
            state = "SELECT generation, next_row FROM state"
            generation, first = connection.execute(state).fetchone()
            if isinstance(vectors, SparseVectors):
                append_vectors(connection, first, vectors)
            else:
                self._file.write(first, vectors, generation)
            replaced = self._remove(connection, [text.id for text in texts])
            for row, text in enumerate(texts, first):
                # the last of several texts with one id stays
                replaced += self._remove(connection, [text.id])
                connection.execute(_INSERT, _values(row, text))
            with _decoding():
                append_words(connection, first, [words_of(text.passage) for text in texts])
            connection.execute("UPDATE state SET next_row = ?", [first + len(texts)])
        return Added(len(texts), replaced)

    def delete(self, ids: Sequence[str], *, deadline: float = math.inf) -> int:
        """Delete the texts of these ids; returns how many were there."""
        with self._writing(deadline) as connection:
            return self._remove(connection, ids)

    def delete_where(self, filter: Filter, *, deadline: float = math.inf) -> int:
        """Delete the texts that a filter allows; returns how many. Raises UserError, also for an
        empty filter, and for one with a key that no text has: mistyped, `{"lang": {"!=": "en"}}`
        would delete every text."""
        sql, parameters = clause_of(filter)
        if not filter:
            raise UserError("filter: empty: it would delete every text")
        with self._writing(deadline) as connection:
            if connection.execute("SELECT 1 FROM texts LIMIT 1").fetchone():
                check_keys(connection, filter, all_known=True)
            found = connection.execute(f"SELECT id FROM texts WHERE {sql}", parameters)
            return self._remove(connection, [identity for (identity,) in found.fetchall()])

    def _remove(self, connection: sqlite3.Connection, ids: Sequence[str]) -> int:
        removed = 0
        for identity in ids:
            select = "SELECT row FROM texts WHERE id = ?"
            for (row,) in connection.execute(select, [identity]).fetchall():
                connection.execute("DELETE FROM texts WHERE row = ?", [row])
                connection.execute("INSERT INTO deleted(row) VALUES (?)", [row])
                removed += 1
        return removed

    def compact(self) -> int:
        """Leave deleted texts out of the files and renumber the others; returns how many were left
        out. Until it is committed nothing has changed."""
        with self._writing() as connection:
            rows = self._rows_of(connection)
            left_out = rows.count - rows.total
            if left_out:
                self._renumber(connection, rows)
        with self._said():
            if not self.sparse:
                self._file.remove_before(rows.generation + bool(left_out))
            connection.execute("VACUUM")  # the database has not changed; its file becomes smaller
        return left_out

    @_decoding()
    def _renumber(self, connection: sqlite3.Connection, rows: LiveRows) -> None:
        stay = np.flatnonzero(rows.alive)
        places = np.full(rows.count, -1)
        places[stay] = np.arange(len(stay))
        if self.sparse:
            renumber_vectors(connection, places)
        else:
            self._file.copy(stay, rows.count, rows.generation)
        moved = ((new, row) for new, row in enumerate(stay.tolist()) if new < row)
        # ascending: a row in whose place another comes has moved before, or is deleted
        connection.executemany("UPDATE texts SET row = ? WHERE row = ?", moved)
        renumber(connection, places, rows.lengths[stay])
        connection.execute("DELETE FROM deleted")
        connection.execute(
            "UPDATE state SET next_row = ?, generation = generation + 1", [len(stay)]
        )

    @contextmanager
    def _writing(self, deadline: float = math.inf) -> Iterator[sqlite3.Connection]:
        """A transaction that all of its changes are in, or none."""
        with self._said():
            connection = self._connection()
            patience = min(max(deadline - time.monotonic(), 0), _PATIENCE)
            connection.execute(f"PRAGMA busy_timeout = {round(1000 * patience)}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                if time.monotonic() > deadline:  # SQLite may wait longer than it was asked to
                    raise self._busy()
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # a full disk ends it
                    connection.execute("ROLLBACK")
                raise

    # ---- connections ----

    def _connection(self) -> sqlite3.Connection:
        """This thread's own; of a database in memory the only one."""
        if self.path is None and self._opened:
            return self._opened[0]
        if (mine := getattr(self._own, "connection", None)) is None:
            mine = self._own.connection = _connect(self.path)
            self._opened.append(mine)
        return mine

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Turns errors of the disk and the database into StoreError."""
        try:
            yield
        except sqlite3.Error as error:
            # the low byte is the kind of error, the others its reason
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY:
                raise self._busy() from None
            raise StoreError(f"{self.path}: {error}") from None
        except OSError as error:
            raise StoreError(f"{error.filename or self.path}: {error.strerror}") from None

    def _busy(self) -> StoreBusyError:
        return StoreBusyError(f"{self.path}: another process is changing it")


def _close(connections: list[sqlite3.Connection]) -> None:
    while connections:
        connections.pop().close()


def create_database(path: Path, *, sparse: bool = False) -> None:
    """A database without texts; `sparse`: with a table of their vectors. Raises StoreError."""
    try:
        with closing(_connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA + SPARSE_SCHEMA if sparse else _SCHEMA)
    except sqlite3.Error as error:
        raise StoreError(f"{path}: {error}; an index needs a local disk with space") from None


def _connect(path: Path | None) -> sqlite3.Connection:
    if path is not None and not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder")
    connection = sqlite3.connect(
        path or ":memory:", timeout=_PATIENCE, isolation_level=None, check_same_thread=False
    )
    try:
        with _decoding():
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG}")
    except sqlite3.Error:  # no database
        connection.close()
        raise
    return connection


def _values(row: int, text: IndexedText) -> tuple[int, str, str, str, str]:
    metadata: Mapping[str, Any] = text.metadata
    return row, text.id, text.title, text.text, json.dumps(metadata)
