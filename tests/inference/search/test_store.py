"""The texts of an index: BM25, and what is left when a process is killed at any moment."""

from __future__ import annotations

import signal
import sqlite3
from collections import Counter
from math import log
from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.search.index import open_index
from palm_ds.inference.search.store import create_database
from palm_ds.inference.search.texts import IndexedText
from palm_ds.inference.search.words import words_of
from tests.helpers.small_index import add, check_whole, names, small_index, texts_of, vectors_of
from tests.helpers.warm_python import run

RNG = np.random.default_rng(8)
VOCABULARY = ["the", "The", "tower", "Paris", "北京", "naïve", "12", "of", "river", "old"]


def bm25(texts: dict[int, str], query: str) -> list[tuple[int, float]]:
    """Robertson's BM25 as FTS5 has it, restated."""
    bags = {row: Counter(words_of(text)) for row, text in texts.items()}
    mean = sum(bag.total() for bag in bags.values()) / len(bags)
    scores: dict[int, float] = {}
    for word in set(words_of(query)):
        having = [row for row, bag in bags.items() if word in bag]
        weight = log((len(bags) - len(having) + 0.5) / (len(having) + 0.5))
        weight = weight if weight > 0 else 1e-6
        for row in having:
            f, length = bags[row][word], bags[row].total()
            part = weight * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * length / mean))
            scores[row] = scores.get(row, 0.0) + part
    return sorted(scores.items(), key=lambda each: (-each[1], each[0]))


def test_bm25_is_what_its_formula_says_also_after_deletions(tmp_path: Path) -> None:
    weights = 1 / np.arange(1, 11)
    drawn = [
        " ".join(RNG.choice(VOCABULARY, n % 9 + 1, p=weights / weights.sum())) for n in range(60)
    ]
    index = small_index(tmp_path / "i", [])
    texts = [IndexedText(id=str(n), title="old" * (n % 2), text=x) for n, x in enumerate(drawn)]
    index.add(texts, vectors_of([each.id for each in texts]))
    alive = {n: text.passage for n, text in enumerate(texts)}
    for gone in ([], names(0, 1), [str(n) for n in range(0, 60, 7)]):
        index.delete(gone)
        alive = {row: text for row, text in alive.items() if str(row) not in gone}
        for query in ("the tower", "PARIS 北京 naïve the the", "river", "nowhere"):
            with index.store.reading() as now:
                found = now.by_words(query, 99, {})
            wanted = bm25(alive, query)
            np.testing.assert_allclose([x for _, x in found], [x for _, x in wanted], rtol=1e-9)
            assert {row for row, _ in found} == {row for row, _ in wanted}
    index.close()


# ---- crashes ----

KILLED = """
import os, signal, sys
from pathlib import Path
from palm_ds.inference.search import store, vectors
from palm_ds.inference.search.index import open_index
from tests.helpers.small_index import add, names

folder, point = sys.argv[1:]
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
    if sum(seen) == (1 if point in ("COMMIT", "UPDATE") else 2):
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
    if point == "DELETE FROM texts":
        index.delete(names(0, 9))
    else:
        add(index, names(5, 15), " new")
    if point == "acknowledged":
        die()
"""
POINTS = ["pwrite", "fsync", "DELETE FROM words", "INSERT INTO texts", "UPDATE", "COMMIT"]


@pytest.mark.parametrize("point", [*POINTS, "DELETE FROM texts", "acknowledged"])
def test_a_killed_process_loses_nothing_and_leaves_a_good_index(point: str, tmp_path: Path) -> None:
    folder = tmp_path / "i"
    small_index(folder, names(0, 10)).close()
    done = run(["-c", KILLED, folder, point])
    assert done.returncode == -signal.SIGKILL, done.stderr
    whole = names(0, 15) if point == "acknowledged" else names(0, 10)
    check_whole(folder, whole)
    with open_index(folder) as index:  # and goes on
        add(index, more := names(12, 20))
        index.delete(["n1"])
    check_whole(folder, [each for each in names(0, 20) if each in {*whole, *more} - {"n1"}])


def test_an_addition_that_fails_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = small_index(tmp_path / "i", names(0, 4))
    texts = [*texts_of(names(2, 6)), IndexedText(id="bad", text="\ud800")]
    with pytest.raises(UnicodeEncodeError):
        index.add(texts, vectors_of([each.id for each in texts]))
    monkeypatch.setattr("palm_ds.inference.search.vectors.os.pwrite", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        add(index, names(4, 6))
    index.close()
    check_whole(tmp_path / "i", names(0, 4))


def full_disk(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_a_search_reads_one_state(tmp_path: Path) -> None:
    index = small_index(tmp_path / "i", names(0, 5))
    with index.store.reading() as before, open_index(tmp_path / "i") as other:
        add(other, names(5, 9))
        other.delete(["n0", "n1"])
        assert before.allowed({}).tolist() == [0, 1, 2, 3, 4]
        assert len(before.by_words("text", 99, {})) == 5
        assert [each.id for each in before.records([0, 4])] == ["n0", "n4"]
    with index.store.reading() as after:
        assert after.allowed({}).tolist() == np.flatnonzero(after.rows.alive).tolist()
        assert after.rows.total == 7
    index.close()


def test_mistakes_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "i"
    small_index(folder, names(0, 3)).close()
    vectors = folder / "vectors.f32"
    whole = vectors.read_bytes()
    vectors.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="vectors.f32: has 2 vectors of 3: it was truncated"):
        open_index(folder)
    vectors.unlink()
    with pytest.raises(UserError, match="damaged: vectors.f32 is missing"):
        open_index(folder)
    vectors.write_bytes(whole)
    (folder / "texts.sqlite").write_bytes(b"no database" * 99)
    with pytest.raises(UserError, match="texts.sqlite: file is not a database"):
        open_index(folder)


def test_a_python_without_fts5_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "palm_ds.inference.search.store._WORDS", "CREATE VIRTUAL TABLE {name} USING fts9(x)"
    )
    with pytest.raises(
        UserError, match=f"SQLite {sqlite3.sqlite_version} of this Python lacks FTS5"
    ):
        create_database(tmp_path / "x.sqlite")
