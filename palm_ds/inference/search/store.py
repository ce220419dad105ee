"""The texts of an index: an SQLite database, which alone says which rows there are.

    texts(row, id, title, text, metadata)   those that are there
    deleted(number, row)                    those that were; a row is never used again
    words(passage)                          FTS5: the words of each passage, for BM25
    state(next_row)                         rows that were ever used

    add:     begin ─ vectors behind the last row, flushed ─ texts, words, next_row ─ commit
    delete:  begin ─ texts, words, deleted ─ commit

A process that is killed before the commit has changed nothing; after it everything is on disk (WAL,
`synchronous = FULL`). One adds or deletes at a time, in whatever process. Each search reads one
state of the database (`reading`), whatever is added or deleted meanwhile.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.inference.search.filters import Filter, clause_of
from palm_ds.inference.search.texts import IndexedText
from palm_ds.inference.search.vectors import VectorFile, Vectors
from palm_ds.inference.search.words import query_of, words_of

_PATIENCE = 60  # seconds to wait for another process that adds or deletes
_SCHEMA = """
CREATE TABLE texts (
    row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL, text TEXT NOT NULL,
    metadata TEXT NOT NULL
);
CREATE TABLE deleted (number INTEGER PRIMARY KEY, row INTEGER NOT NULL);
CREATE TABLE state (next_row INTEGER NOT NULL);
INSERT INTO state VALUES (0);
"""
# All characters beyond ASCII are parts of words for this tokenizer; words.py has split the rest.
_WORDS = "CREATE VIRTUAL TABLE {name} USING fts5(passage, tokenize = 'ascii')"
_INSERT = "INSERT INTO texts VALUES (?, ?, ?, ?, ?)"
Ranking = list[tuple[int, float]]
"""(row, score), the best first."""


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

    count: int
    """LiveRows that were ever used: all are below this."""
    deletions: int
    alive: np.ndarray  # (count,) bool
    total: int
    """Those that are there."""


_NO_ROWS = LiveRows(0, 0, np.ones(0, bool), 0)


@dataclass(frozen=True)
class Snapshot:
    """One state of an index, for as long as it is read."""

    connection: sqlite3.Connection
    rows: LiveRows
    vectors: np.ndarray
    """(rows.count, size) float32 of length 1, also of rows that were deleted."""

    def allowed(self, filter: Filter) -> np.ndarray:
        """The rows that a filter allows, ascending. Raises UserError."""
        sql, parameters = clause_of(filter)
        found = self.connection.execute(
            f"SELECT row FROM texts WHERE {sql} ORDER BY row", parameters
        )
        return np.fromiter((row for (row,) in found), np.int64)

    def by_words(self, query: str, top: int, filter: Filter) -> Ranking:
        """The texts with any word of a query by FTS5's BM25, equal ones in the order of their
        rows: the sum over the query's words of

            log((N - n + 0.5) / (n + 0.5)) * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean))

        with k1 = 1.2 and b = 0.75, where a word is f times in the text and in n of N texts; the
        logarithm is 1e-6 instead for a word of at least half of the texts. Raises UserError."""
        if not (words := query_of(query)):
            return []
        sql, parameters = clause_of(filter)
        among = f"AND rowid IN (SELECT row FROM texts WHERE {sql})" if filter else ""
        found = self.connection.execute(
            f"SELECT rowid, -bm25(words) FROM words WHERE words MATCH ? {among} "
            "ORDER BY bm25(words), rowid LIMIT ?",
            [words, *parameters, top],
        )
        return [(row, score) for row, score in found]

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
    """Texts and vectors that are read by several threads and processes. Raises UserError for a
    damaged database."""

    def __init__(self, database: Path | None, vectors: Vectors) -> None:
        """`database` None: in memory, to be read only once it is filled."""
        self.path, self.vectors = database, vectors
        self._own, self._opened = threading.local(), list[sqlite3.Connection]()
        self.close = weakref.finalize(self, _close, self._opened)
        """Close all connections; also done when nothing uses the store any more."""
        self._one = threading.RLock()
        """Held while the one connection to a database in memory is used."""
        self._rows = _NO_ROWS
        self.has_words = False
        if database is not None:
            with self._said(), self.reading() as now:
                self.has_words = bool(_find(now.connection, "name = 'words'"))

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

    # ---- reading ----

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """One state of the index."""
        with self._one if self.path is None else _nothing(), self._said():
            connection = self._connection()
            connection.execute("BEGIN")
            try:
                rows = self._rows_of(connection)
                yield Snapshot(connection, rows, self.vectors.first(rows.count))
            finally:
                connection.execute("ROLLBACK")

    def _rows_of(self, connection: sqlite3.Connection) -> LiveRows:
        """The rows of this state, from those of an earlier one that another search has left."""
        (count,) = connection.execute("SELECT next_row FROM state").fetchone()
        (deletions,) = connection.execute("SELECT max(number) FROM deleted").fetchone()
        known, deletions = self._rows, deletions or 0
        if (known.count, known.deletions) == (count, deletions):
            return known
        if known.count > count or known.deletions > deletions:
            known = _NO_ROWS  # of a later state than this one
        alive = np.ones(count, bool)
        alive[: known.count] = known.alive
        gone = connection.execute("SELECT row FROM deleted WHERE number > ?", [known.deletions])
        alive[np.fromiter((row for (row,) in gone), np.int64)] = False
        self._rows = LiveRows(count, deletions, alive, int(alive.sum()))
        return self._rows

    def unchanged(self, texts: Sequence[IndexedText]) -> list[bool]:
        """Whether each text is there as it is, under its id."""
        with self.reading() as now:
            select = "SELECT title, text, metadata FROM texts WHERE id = ?"
            found = [now.connection.execute(select, [text.id]).fetchone() for text in texts]
        return [values == _values(0, text)[2:] for values, text in zip(found, texts, strict=True)]

    # ---- writing ----

    def add(self, texts: Sequence[IndexedText], vectors: np.ndarray) -> Added:
        """Add texts with their vectors (texts, size) of length 1, all or none of them; they replace
        texts of the same ids. They are on disk when this returns. Raises UserError."""
        assert isinstance(self.vectors, VectorFile), "an index in memory is read only"
        assert vectors.shape == (len(texts), self.vectors.size)
        with self._writing() as connection:
            (first,) = connection.execute("SELECT next_row FROM state").fetchone()
            self.vectors.write(first, vectors)
            replaced = self._remove(connection, [text.id for text in texts])
            for row, text in enumerate(texts, first):
                # the last of several texts with one id stays
                replaced += self._remove(connection, [text.id])
                connection.execute(_INSERT, _values(row, text))
                words = " ".join(words_of(text.passage))
                connection.execute("INSERT INTO words(rowid, passage) VALUES (?, ?)", [row, words])
            connection.execute("UPDATE state SET next_row = ?", [first + len(texts)])
        return Added(len(texts), replaced)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete the texts of these ids; returns how many were there. Raises UserError."""
        with self._writing() as connection:
            return self._remove(connection, ids)

    def delete_where(self, filter: Filter) -> int:
        """Delete the texts that a filter allows; returns how many. Raises UserError, also for an
        empty filter."""
        sql, parameters = clause_of(filter)
        if not filter:
            raise UserError("filter: empty: it would delete every text")
        with self._writing() as connection:
            found = connection.execute(f"SELECT id FROM texts WHERE {sql}", parameters)
            return self._remove(connection, [identity for (identity,) in found.fetchall()])

    def _remove(self, connection: sqlite3.Connection, ids: Sequence[str]) -> int:
        removed = 0
        for identity in ids:
            select = "SELECT row FROM texts WHERE id = ?"
            for (row,) in connection.execute(select, [identity]).fetchall():
                connection.execute("DELETE FROM words WHERE rowid = ?", [row])
                connection.execute("DELETE FROM texts WHERE row = ?", [row])
                connection.execute("INSERT INTO deleted(row) VALUES (?)", [row])
                removed += 1
        return removed

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that all of its changes are in, or none."""
        with self._said():
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
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
        """Turns errors of the disk and the database into UserError."""
        try:
            yield
        except sqlite3.Error as error:
            raise UserError(f"{self.path}: {error}") from None
        except OSError as error:
            raise UserError(f"{error.filename or self.path}: {error.strerror}") from None


def _close(connections: list[sqlite3.Connection]) -> None:
    while connections:
        connections.pop().close()


def create_database(path: Path) -> None:
    """A database without texts. Raises UserError if this Python's SQLite lacks FTS5."""
    with closing(_connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        try:
            connection.execute(_WORDS.format(name="words"))
        except sqlite3.OperationalError as error:
            if "no such module" not in str(error):
                raise
            raise UserError(
                f"the SQLite {sqlite3.sqlite_version} of this Python lacks FTS5, which an index "
                "needs for words; use a Python whose SQLite has it"
            ) from None
        connection.executescript(_SCHEMA)


def _connect(path: Path | None) -> sqlite3.Connection:
    if path is not None and not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder")
    connection = sqlite3.connect(
        path or ":memory:", timeout=_PATIENCE, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _find(connection: sqlite3.Connection, where: str) -> list[Any]:
    return connection.execute(f"SELECT name FROM sqlite_master WHERE {where}").fetchall()


def _values(row: int, text: IndexedText) -> tuple[int, str, str, str, str]:
    metadata: Mapping[str, Any] = text.metadata
    return row, text.id, text.title, text.text, json.dumps(metadata)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
