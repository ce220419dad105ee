"""The words of an index's texts: for each word the rows that have it, and how often (an inverted
index), as tables of the texts' database. Sparse vectors are kept likewise: for each token the rows
whose vector has it, and its weight there.

    vocabulary(number, word)
    postings(place, block)   place: number << 32 | the first row of the block
                             block: (row, times) as uint32, by row, at most _PAIRS of them
    lengths(first, words)    words: those of each text from row `first` on, as uint32
    weights(place, block)    the same for token ids, with the bits of a weight as float32

A row that is deleted stays in its blocks until the index is compacted; readers leave it out.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from palm_ds.common.sparse_vectors import SparseVectors

SCHEMA = """
CREATE TABLE vocabulary (number INTEGER PRIMARY KEY, word TEXT NOT NULL UNIQUE);
CREATE TABLE postings (place INTEGER PRIMARY KEY, block BLOB NOT NULL);
CREATE TABLE lengths (first INTEGER PRIMARY KEY, words BLOB NOT NULL);
"""
SPARSE_SCHEMA = "CREATE TABLE weights (place INTEGER PRIMARY KEY, block BLOB NOT NULL);"
_WORDS, _WEIGHTS = "postings", "weights"
_PAIRS = 500  # of a block: with them a row of the table fits on a page of 4 KB
_SHIFT = 32
_BLOCKS = "FROM {} WHERE place BETWEEN ? AND ? ORDER BY place"


def append_words(
    connection: sqlite3.Connection, first: int, texts: Sequence[Sequence[str]]
) -> None:
    """Add the words of texts, whose rows are those from `first` on, the next that are free."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for row, words in enumerate(texts, first):
        for word, times in Counter(words).items():
            pairs.setdefault(word, []).append((row, times))
    for word, added in pairs.items():
        _append(connection, _WORDS, _added_word(connection, word), np.array(added, np.uint32))
    write_lengths(connection, first, np.array([len(words) for words in texts], np.uint32))


def postings_of(connection: sqlite3.Connection, word: str) -> np.ndarray:
    """(texts, 2) uint32: the rows that have a word, ascending, also deleted ones; how often."""
    number = _number(connection, word)
    return np.empty((0, 2), np.uint32) if number is None else _read(connection, _WORDS, number)


def write_lengths(connection: sqlite3.Connection, first: int, words: np.ndarray) -> None:
    """The number of words of each text from a row on."""
    if len(words):
        block = words.astype("<u4").tobytes()
        connection.execute("INSERT INTO lengths VALUES (?, ?)", [first, block])


def lengths_from(connection: sqlite3.Connection, row: int) -> Iterator[tuple[int, np.ndarray]]:
    """The blocks that `write_lengths` wrote, from this row on."""
    found = connection.execute("SELECT first, words FROM lengths WHERE first >= ?", [row])
    yield from ((first, np.frombuffer(block, "<u4")) for first, block in found)


def renumber(connection: sqlite3.Connection, places: np.ndarray, words: np.ndarray) -> None:
    """Give each row its new number, `places` (rows,), in the same order; -1: it is left out.
    `words` (rows left,) are the lengths of those that stay."""
    for (number,) in connection.execute("SELECT number FROM vocabulary").fetchall():
        if not _renumber(connection, _WORDS, number, places):
            connection.execute("DELETE FROM vocabulary WHERE number = ?", [number])
    connection.execute("DELETE FROM lengths")
    write_lengths(connection, 0, words)


# ---- sparse vectors ----


def append_vectors(connection: sqlite3.Connection, first: int, vectors: SparseVectors) -> None:
    """Add sparse vectors, whose rows are those from `first` on, the next that are free."""
    rows = np.arange(first, first + len(vectors), dtype=np.uint32).repeat(vectors.active)
    order = np.argsort(vectors.indices, kind="stable")
    pairs = np.stack([rows, vectors.data.astype("<f4").view("<u4")], 1)[order]
    tokens, starts = np.unique(vectors.indices[order], return_index=True)
    for token, added in zip(tokens.tolist(), np.split(pairs, starts[1:]), strict=False):
        _append(connection, _WEIGHTS, token, added)


def weights_of(connection: sqlite3.Connection, token: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows (texts,) uint32 whose vectors have a token, ascending, also deleted ones, and its
    weights there (texts,) float32."""
    pairs = _read(connection, _WEIGHTS, token)
    return pairs[:, 0], np.ascontiguousarray(pairs[:, 1]).view("<f4")


def vectors_of(connection: sqlite3.Connection, rows: np.ndarray, size: int) -> np.ndarray:
    """The vectors (rows, size) of some rows, ascending. Reads the whole table."""
    vectors = np.zeros((len(rows), size), np.float32)
    for place, block in connection.execute("SELECT place, block FROM weights"):
        pairs = _pairs(block)
        at = np.searchsorted(rows, pairs[:, 0]).clip(max=max(len(rows) - 1, 0))
        known = rows[at] == pairs[:, 0] if len(rows) else np.zeros(len(at), bool)
        weights = np.ascontiguousarray(pairs[:, 1]).view("<f4")
        vectors[at[known], place >> _SHIFT] = weights[known]
    return vectors


def renumber_vectors(connection: sqlite3.Connection, places: np.ndarray) -> None:
    """As `renumber`, of sparse vectors."""
    numbers = connection.execute(f"SELECT DISTINCT place >> {_SHIFT} FROM weights").fetchall()
    for (token,) in numbers:
        _renumber(connection, _WEIGHTS, token, places)


# ---- blocks ----


def _number(connection: sqlite3.Connection, word: str) -> int | None:
    select = "SELECT number FROM vocabulary WHERE word = ?"
    found = connection.execute(select, [word]).fetchone()
    return found[0] if found else None


def _added_word(connection: sqlite3.Connection, word: str) -> int:
    """The number of a word, which is added if it is new."""
    number = _number(connection, word)
    if number is None:
        number = connection.execute("INSERT INTO vocabulary(word) VALUES (?)", [word]).lastrowid
        assert number is not None
    return number


def _append(connection: sqlite3.Connection, table: str, number: int, pairs: np.ndarray) -> None:
    """The first ones fill up the last block."""
    select = f"SELECT place, block {_BLOCKS.format(table)} DESC LIMIT 1"
    last = connection.execute(select, _span(number)).fetchone()
    if last is not None:
        connection.execute(f"DELETE FROM {table} WHERE place = ?", [last[0]])
        pairs = np.concatenate([_pairs(last[1]), pairs])
    _insert(connection, table, number, pairs)


def _renumber(connection: sqlite3.Connection, table: str, number: int, places: np.ndarray) -> bool:
    """Give the rows of a word or token their new numbers; returns whether any are left."""
    pairs = _read(connection, table, number)
    new = places[pairs[:, 0]]
    pairs = np.stack([new, pairs[:, 1]], 1)[new >= 0].astype(np.uint32)
    connection.execute(f"DELETE FROM {table} WHERE place BETWEEN ? AND ?", _span(number))
    _insert(connection, table, number, pairs)
    return len(pairs) > 0


def _insert(connection: sqlite3.Connection, table: str, number: int, pairs: np.ndarray) -> None:
    blocks = (pairs[at : at + _PAIRS] for at in range(0, len(pairs), _PAIRS))
    connection.executemany(
        f"INSERT INTO {table} VALUES (?, ?)",
        ((number << _SHIFT | int(block[0, 0]), block.astype("<u4").tobytes()) for block in blocks),
    )


def _read(connection: sqlite3.Connection, table: str, number: int) -> np.ndarray:
    found = connection.execute(f"SELECT block {_BLOCKS.format(table)}", _span(number))
    return _pairs(b"".join(block for (block,) in found))


def _pairs(block: bytes) -> np.ndarray:
    return np.frombuffer(block, "<u4").reshape(-1, 2)


def _span(number: int) -> tuple[int, int]:
    """The first and the last place of a word's blocks."""
    return number << _SHIFT, (number + 1 << _SHIFT) - 1
