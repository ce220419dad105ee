"""Small indexes whose vectors follow from the ids of their texts."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.search import store
from palm_ds.inference.search.index import IndexEmbedding, SearchIndex, create_index, open_index
from palm_ds.inference.search.postings import postings_of
from palm_ds.inference.search.store import Snapshot
from palm_ds.inference.search.texts import IndexedText
from palm_ds.inference.search.words import words_of

SIZE = 16
EMBEDDING = IndexEmbedding(model="none", fingerprint="", settings=EmbeddingSettings())


def vectors_of(ids: Sequence[str]) -> np.ndarray:
    """(ids, SIZE) float32 of length 1."""
    drawn = [np.random.default_rng(crc32(each.encode())).normal(size=SIZE) for each in ids]
    vectors = np.array(drawn, np.float32).reshape(-1, SIZE)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def texts_of(ids: Sequence[str], note: str = "") -> list[IndexedText]:
    return [IndexedText(id=each, text=f"text {each}{note}", metadata={"of": each}) for each in ids]


def add(index: SearchIndex, ids: Sequence[str], note: str = "") -> None:
    index.add(texts_of(ids, note), vectors_of(ids))


def names(first: int, last: int) -> list[str]:
    return [f"n{number}" for number in range(first, last)]


def small_index(
    folder: Path, ids: Sequence[str], *, approximate_from: int = 1 << 40
) -> SearchIndex:
    """An opened index of texts."""
    create_index(folder, EMBEDDING, SIZE)
    index = open_index(folder, approximate_from=approximate_from)
    if ids:
        add(index, ids)
    return index


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Another program holds the lock of writers, as a compaction does."""
    with closing(sqlite3.connect(folder / "texts.sqlite", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def no_room_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Databases that are opened from now on cannot grow, as on a full disk."""
    connect = store._connect

    def full(path: Path | None) -> sqlite3.Connection:
        connection = connect(path)
        connection.execute("PRAGMA max_page_count = 1")  # or as many as there are
        return connection

    monkeypatch.setattr(store, "_connect", full)


def vocabulary(now: Snapshot) -> list[str]:
    return [word for (word,) in now.connection.execute("SELECT word FROM vocabulary")]


def check_whole(folder: Path, ids: Sequence[str], note: str = "") -> None:
    """An index has these texts, with their vectors and words, and no others."""
    with open_index(folder) as index:
        with index.store.reading() as now:
            rows = np.flatnonzero(now.rows.alive)
            records = now.records(rows.tolist())
            assert [now.connection.execute("PRAGMA integrity_check").fetchone()[0]] == ["ok"]
            found = {each: postings_of(now.connection, each) for each in vocabulary(now)}
        assert sorted(each.id for each in records) == sorted(ids)
        words = {each.row: Counter(words_of(each.passage)) for each in records}
        read: dict[int, Counter[str]] = {row: Counter() for row in words}
        for word, pairs in found.items():
            assert (np.diff(pairs[:, 0].astype(int)) > 0).all()
            for row, times in pairs.tolist():
                if now.rows.alive[row]:
                    read[row][word] = times
        assert read == words
        assert [now.rows.lengths[row] for row in words] == [x.total() for x in words.values()]
        wanted = vectors_of([each.id for each in records])
        np.testing.assert_allclose(now.vectors[rows], wanted, atol=1e-6)
        for each in records:
            assert each.text.startswith(f"text {each.id}") and each.metadata == {"of": each.id}
        assert sum(each.text.endswith(note) for each in records) == len(records)
