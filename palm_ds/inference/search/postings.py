"""The words of an index's texts: for each word the rows that have it, and how often (an inverted
index), as tables of the texts' database.

    vocabulary(number, word)
    postings(place, block)   place: number << 32 | the first row of the block
                             block: (row, times) as uint32, by row, at most _PAIRS of them
    lengths(first, words)    words: those of each text from row `first` on, as uint32

A row that is deleted stays in its blocks until the index is compacted; who reads them leaves it
out.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

SCHEMA = """
CREATE TABLE vocabulary (number INTEGER PRIMARY KEY, word TEXT NOT NULL UNIQUE);
CREATE TABLE postings (place INTEGER PRIMARY KEY, block BLOB NOT NULL);
CREATE TABLE lengths (first INTEGER PRIMARY KEY, words BLOB NOT NULL);
"""
_PAIRS = 500  # of a block: with them a row of the table fits on a page of 4 KB
_SHIFT = 32
_BLOCKS = "FROM postings WHERE place BETWEEN ? AND ? ORDER BY place"


def append_words(
    connection: sqlite3.Connection, first: int, texts: Sequence[Sequence[str]]
) -> None:
    """Add the words of texts, whose rows are those from `first` on, the next that are free."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for row, words in enumerate(texts, first):
        for word, times in Counter(words).items():
            pairs.setdefault(word, []).append((row, times))
    for word, added in pairs.items():
        _append(connection, word, np.array(added, np.uint32))
    write_lengths(connection, first, np.array([len(words) for words in texts], np.uint32))


def postings_of(connection: sqlite3.Connection, word: str) -> np.ndarray:
    """(texts, 2) uint32: the rows that have a word, ascending, also deleted ones; how often."""
    number = _number(connection, word)
    return np.empty((0, 2), np.uint32) if number is None else _read(connection, number)


def write_lengths(connection: sqlite3.Connection, first: int, words: np.ndarray) -> None:
    """The number of words of each text from a row on."""
    if len(words):
        block = words.astype("<u4").tobytes()
        connection.execute("INSERT INTO lengths VALUES (?, ?)", [first, block])


def lengths_from(connection: sqlite3.Connection, row: int) -> Iterator[tuple[int, np.ndarray]]:
    """What `write_lengths` wrote from this row on."""
    found = connection.execute("SELECT first, words FROM lengths WHERE first >= ?", [row])
    yield from ((first, np.frombuffer(block, "<u4")) for first, block in found)


def renumber(connection: sqlite3.Connection, places: np.ndarray, words: np.ndarray) -> None:
    """Give each row its new number, `places` (rows,), in the same order; -1: it is left out.
    `words` (rows left,) are the lengths of those that stay."""
    for (number,) in connection.execute("SELECT number FROM vocabulary").fetchall():
        pairs = _read(connection, number)
        new = places[pairs[:, 0]]
        pairs = np.stack([new, pairs[:, 1]], 1)[new >= 0].astype(np.uint32)
        connection.execute("DELETE FROM postings WHERE place BETWEEN ? AND ?", _span(number))
        _insert(connection, number, pairs)
        if not len(pairs):
            connection.execute("DELETE FROM vocabulary WHERE number = ?", [number])
    connection.execute("DELETE FROM lengths")
    write_lengths(connection, 0, words)


def _number(connection: sqlite3.Connection, word: str) -> int | None:
    select = "SELECT number FROM vocabulary WHERE word = ?"
    found = connection.execute(select, [word]).fetchone()
    return found[0] if found else None


def _append(connection: sqlite3.Connection, word: str, pairs: np.ndarray) -> None:
    """The first ones fill up the last block."""
    number = _number(connection, word)
    if number is None:
        number = connection.execute("INSERT INTO vocabulary(word) VALUES (?)", [word]).lastrowid
        assert number is not None
    else:
        select = f"SELECT place, block {_BLOCKS} DESC LIMIT 1"
        last = connection.execute(select, _span(number)).fetchone()
        if last is not None:
            connection.execute("DELETE FROM postings WHERE place = ?", [last[0]])
            pairs = np.concatenate([_pairs(last[1]), pairs])
    _insert(connection, number, pairs)


def _insert(connection: sqlite3.Connection, number: int, pairs: np.ndarray) -> None:
    blocks = (pairs[at : at + _PAIRS] for at in range(0, len(pairs), _PAIRS))
    connection.executemany(
        "INSERT INTO postings VALUES (?, ?)",
        ((number << _SHIFT | int(block[0, 0]), block.astype("<u4").tobytes()) for block in blocks),
    )


def _read(connection: sqlite3.Connection, number: int) -> np.ndarray:
    found = connection.execute(f"SELECT block {_BLOCKS}", _span(number))
    return _pairs(b"".join(block for (block,) in found))


def _pairs(block: bytes) -> np.ndarray:
    return np.frombuffer(block, "<u4").reshape(-1, 2)


def _span(number: int) -> tuple[int, int]:
    """The first and the last place of a word's blocks."""
    return number << _SHIFT, (number + 1 << _SHIFT) - 1
