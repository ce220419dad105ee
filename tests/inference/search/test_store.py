"""The texts of an index: BM25, and what is left when a process is killed at any moment."""

from __future__ import annotations

import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.search.index import open_index
from palm_ds.inference.search.store import StoreBusyError
from palm_ds.inference.search.texts import IndexedText
from palm_ds.inference.search.vectors import StoreError
from palm_ds.inference.search.words import query_words, words_of
from tests.helpers.small_index import (
    add,
    check_whole,
    names,
    no_room_for_pages,
    small_index,
    texts_of,
    vectors_of,
    writing,
)
from tests.helpers.warm_python import run

RNG = np.random.default_rng(8)
VOCABULARY = ["the", "The", "tower", "Paris", "北京", "naïve", "12", "of", "river", "old"]


class Fts5:
    """SQLite's full-text search of the same rows, whose BM25 has the same k1, b and logarithm."""

    def __init__(self, texts: dict[int, str]) -> None:
        self.connection = sqlite3.connect(":memory:")
        try:
            self.connection.execute("CREATE VIRTUAL TABLE t USING fts5(x, tokenize = 'ascii')")
        except sqlite3.OperationalError:
            pytest.skip("the SQLite of this Python lacks FTS5")
        rows = ((row, " ".join(words_of(text))) for row, text in texts.items())
        self.connection.executemany("INSERT INTO t(rowid, x) VALUES (?, ?)", rows)

    def ranking(self, query: str, top: int, allowed: np.ndarray | None) -> list[tuple[int, float]]:
        match = " OR ".join(f'"{word}"' for word in query_words(query))
        among = "" if allowed is None else f"AND rowid IN ({','.join(map(str, allowed))})"
        return self.connection.execute(
            f"SELECT rowid, -bm25(t) FROM t WHERE t MATCH ? {among} "
            f"ORDER BY bm25(t), rowid LIMIT {top}",
            [match],
        ).fetchall()


def test_bm25_is_what_fts5_gives_also_after_changes(tmp_path: Path) -> None:
    """The same rows in the same order, with the same scores to the last bit. Words fill several
    blocks; some are in most texts, in none, or in deleted ones only."""
    weights = 1 / np.arange(1, 11)
    drawn = [
        " ".join(RNG.choice(VOCABULARY, n % 9 + 1, p=weights / weights.sum())) for n in range(1200)
    ]
    index = small_index(tmp_path / "i", [])
    texts = [IndexedText(id=str(n), title="old" * (n % 2), text=x) for n, x in enumerate(drawn)]
    for part in (texts[:700], texts[700:701], texts[701:]):
        index.add(part, vectors_of([each.id for each in part]))
    alive = {n: text.passage for n, text in enumerate(texts)}
    queries = (
        "the tower",
        "PARIS 北京 naïve the the",
        "river",
        "the of old The",
        "?",
        "oldold the",
    )
    for gone in ([], ["0"], [str(n) for n in range(0, 1200, 7)], None):
        if gone is None:
            assert index.compact() == 1200 - len(alive)
            alive = dict(enumerate(alive.values()))
        else:
            index.delete(gone)
            alive = {row: text for row, text in alive.items() if str(row) not in gone}
        peer = Fts5(alive)
        for query, top in zip(queries, (9999, 10, 50, 9999, 9, 100), strict=True):
            for allowed in (None, np.array(sorted(alive))[::3]):
                with index.store.reading() as now:
                    found = now.by_words(query, top, allowed)
                assert found == (peer.ranking(query, top, allowed) if query != "?" else [])
        peer.connection.close()
    index.close()


# ---- crashes ----

KILLED = """
import os, signal, sys
from pathlib import Path
from palm_ds.inference.search import store, vectors
from palm_ds.inference.search.index import open_index
from tests.helpers.small_index import add, names

folder, change, point = sys.argv[1:]
connect, pwrite, fsync = store._connect, os.pwrite, os.fsync
seen = []

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def traced(path):
    # ends at the second statement of its kind, or at the only one
    made = connect(path)
    made.set_trace_callback(noticed)
    return made

def noticed(sql):
    seen.append(sql.startswith(point))
    if sum(seen) == (1 if point in ("COMMIT", "UPDATE state", "VACUUM") else 2):
        die()

def half(file, data, at):
    pwrite(file, data[: len(data) // 2], at)
    die()

def unflushed(file):
    die()

store._connect = traced
if point == "pwrite":
    vectors.os.pwrite = half
if point == "fsync":
    vectors.os.fsync = unflushed
with open_index(Path(folder)) as index:
    if change == "compact":
        index.compact()
    elif point == "DELETE FROM texts":
        index.delete(names(0, 9))
    else:
        add(index, names(5, 15), " new")
    if point == "acknowledged":
        die()
"""
POINTS = ["pwrite", "fsync", "INSERT INTO texts", "INSERT INTO postings", "UPDATE state", "COMMIT"]


@pytest.mark.parametrize("point", [*POINTS, "DELETE FROM texts", "acknowledged"])
def test_a_killed_process_loses_nothing_and_leaves_a_good_index(point: str, tmp_path: Path) -> None:
    folder = tmp_path / "i"
    small_index(folder, names(0, 10)).close()
    killed(folder, "add", point)
    whole = names(0, 15) if point == "acknowledged" else names(0, 10)
    check_whole(folder, whole)
    with open_index(folder) as index:  # and goes on
        add(index, more := names(12, 20))
        index.delete(["n1"])
    check_whole(folder, [each for each in names(0, 20) if each in {*whole, *more} - {"n1"}])


@pytest.mark.parametrize(
    "point", ["pwrite", "UPDATE texts", "INSERT INTO postings", "COMMIT", "VACUUM"]
)
def test_a_compaction_that_is_killed_loses_nothing(point: str, tmp_path: Path) -> None:
    """Before it is committed the index is the old one, after that the new one, and either can be
    compacted."""
    folder = tmp_path / "i"
    with small_index(folder, names(0, 30)) as index:
        index.delete(names(0, 20))
        index.delete(["n25"])
    left = [each for each in names(20, 30) if each != "n25"]
    killed(folder, "compact", point)
    check_whole(folder, left)
    with open_index(folder) as index:
        assert index.compact() == (0 if point == "VACUUM" else 21)
        with index.store.reading() as now:
            assert (now.rows.count, now.rows.total, now.rows.generation) == (9, 9, 1)
        add(index, names(40, 42))
    assert [file.name for file in folder.glob("vectors-*")] == ["vectors-1.f32"]
    check_whole(folder, [*left, *names(40, 42)])


def killed(folder: Path, change: str, point: str) -> None:
    done = run(["-c", KILLED, folder, change, point])
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_an_addition_that_fails_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = small_index(tmp_path / "i", names(0, 4))
    texts = [*texts_of(names(2, 6)), IndexedText(id="bad", text="\ud800")]
    with pytest.raises(UnicodeEncodeError):
        index.add(texts, vectors_of([each.id for each in texts]))
    monkeypatch.setattr("palm_ds.inference.search.vectors.os.pwrite", full_disk)
    with pytest.raises(StoreError, match="No space left on device"):
        add(index, names(4, 6))
    index.close()
    check_whole(tmp_path / "i", names(0, 4))


def full_disk(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_database_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch) -> None:
    def fail(path: Path | None) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("palm_ds.inference.search.store._connect", fail)
    with pytest.raises(StoreError, match="texts.sqlite: disk I/O error; an index needs a local"):
        small_index(tmp_path / "i", names(0, 4))
    assert not (tmp_path / "i").exists()


def test_a_full_database_is_said_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite ends the transaction itself, so there is none to roll back."""
    folder = tmp_path / "i"
    small_index(folder, names(0, 4)).close()
    with monkeypatch.context() as full:
        no_room_for_pages(full)
        with open_index(folder) as index:
            with pytest.raises(StoreError, match="texts.sqlite: database or disk is full"):
                add(index, names(4, 999))
            assert index.delete(["n3"]) == 1
    check_whole(folder, names(0, 3))


def test_another_process_that_changes_it_too_long_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "i"
    small_index(folder, names(0, 4)).close()
    monkeypatch.setattr("palm_ds.inference.search.store._PATIENCE", 0.01)
    with open_index(folder) as index, writing(folder):
        with pytest.raises(StoreBusyError, match="texts.sqlite: another process is changing it"):
            add(index, names(4, 6))
        assert index.total == 4
    check_whole(folder, names(0, 4))


def test_a_change_is_not_made_after_its_deadline(tmp_path: Path) -> None:
    folder, now = tmp_path / "i", time.monotonic()
    with small_index(folder, names(0, 4)) as index:
        with pytest.raises(StoreBusyError):
            index.add(texts_of(["n9"]), vectors_of(["n9"]), deadline=now)
        with pytest.raises(StoreBusyError):
            index.delete(["n0"], deadline=now)
        with pytest.raises(StoreBusyError):
            index.delete(filter={"of": "n0"}, deadline=now)
        assert index.delete(["n3"], deadline=now + 600) == 1
    check_whole(folder, names(0, 3))


def test_a_search_reads_one_state(tmp_path: Path) -> None:
    index = small_index(tmp_path / "i", names(0, 5))
    with index.store.reading() as before, open_index(tmp_path / "i") as other:
        add(other, names(5, 9))
        other.delete(["n0", "n1"])
        assert before.allowed({}).tolist() == [0, 1, 2, 3, 4]
        assert len(before.by_words("text", 99)) == 5
        assert [each.id for each in before.records([0, 4])] == ["n0", "n4"]
    with index.store.reading() as after:
        assert after.allowed({}).tolist() == np.flatnonzero(after.rows.alive).tolist()
        assert after.rows.total == 7
    index.close()


def test_mistakes_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "i"
    small_index(folder, names(0, 3)).close()
    vectors = folder / "vectors-0.f32"
    whole = vectors.read_bytes()
    vectors.write_bytes(whole[:-1])
    with pytest.raises(
        StoreError, match="vectors-0.f32: has only 2 of 3 vectors: it was truncated"
    ):
        open_index(folder)
    vectors.unlink()
    with pytest.raises(StoreError, match="vectors-0.f32: is missing: the index is damaged"):
        open_index(folder)
    vectors.write_bytes(whole)
    with closing(sqlite3.connect(folder / "texts.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 9")
    with pytest.raises(
        UserError, match="texts.sqlite: was made by another version of palm_ds; build"
    ):
        open_index(folder)
    (folder / "texts.sqlite").write_bytes(b"no database" * 99)
    with pytest.raises(StoreError, match="texts.sqlite: file is not a database"):
        open_index(folder)


@pytest.mark.parametrize(
    "edit",
    [
        "DELETE FROM texts WHERE row = 1",
        "UPDATE texts SET row = row + 9",
        "UPDATE texts SET metadata = '{'",
        "DELETE FROM state",
        "UPDATE state SET next_row = 2",
        "INSERT INTO deleted(row) VALUES (9)",
        "UPDATE lengths SET words = x'01'",
        "UPDATE postings SET block = x'01'",
        "UPDATE postings SET block = x'ffffffff01000000'",
    ],
)
def test_a_database_that_was_edited_by_hand(edit: str, tmp_path: Path) -> None:
    folder = tmp_path / "i"
    small_index(folder, names(0, 3)).close()
    with closing(sqlite3.connect(folder / "texts.sqlite")) as connection, connection:
        connection.execute(edit)

    def use() -> None:
        with open_index(folder) as index:
            index.search(vectors_of(["query"])[0], "text n1", hybrid=True)
            index.search(vectors_of(["query"])[0], filter={"of": "n1"})

    with pytest.raises(StoreError, match="texts.sqlite: the index is damaged .*; build it again"):
        use()


def test_a_database_whose_bytes_were_changed(tmp_path: Path) -> None:
    """Either nothing of it is read, or one line says what is wrong."""
    folder = tmp_path / "i"
    small_index(folder, names(0, 40)).close()
    file, rng = folder / "texts.sqlite", np.random.default_rng(0)
    whole, said = np.frombuffer(file.read_bytes(), np.uint8), set[str]()
    for _ in range(40):
        changed = whole.copy()
        changed[rng.integers(0, len(changed), 40)] = rng.integers(0, 256, 40)
        file.write_bytes(changed[: rng.choice([len(changed), rng.integers(len(changed))])])
        try:
            with open_index(folder) as index:
                index.search(vectors_of(["query"])[0], "text n1", hybrid=True)
                add(index, names(39, 42))
                index.compact()
        except UserError as error:
            said.add(str(error))
    assert len(said) > 5 and all(str(folder) in line for line in said)
