"""What an index finds, compared with NumPy, while it changes, and with a graph."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.search import graph as graphs
from palm_ds.inference.search.index import SearchIndex, create_index, open_index
from palm_ds.inference.search.ranking import fused
from tests.helpers.small_index import (
    EMBEDDING,
    SIZE,
    add,
    check_whole,
    names,
    small_index,
    texts_of,
    vectors_of,
)


def nearest(ids: list[str], query: np.ndarray, top: int) -> list[tuple[str, float]]:
    cosines = vectors_of(ids) @ query / np.linalg.norm(query)
    best = np.argsort(-cosines, kind="stable")[:top]
    return [(ids[n], float(cosines[n])) for n in best]


def found(index: SearchIndex, query: np.ndarray, **options: object) -> list[tuple[str, float]]:
    return [(each.record.id, each.score) for each in index.search(query, "", **options)]  # type: ignore[arg-type]


def same(one: list[tuple[str, float]], other: list[tuple[str, float]]) -> bool:
    return [x for x, _ in one] == [x for x, _ in other] and bool(
        np.allclose([x for _, x in one], [x for _, x in other], atol=1e-6)
    )


def test_a_search_finds_what_numpy_does(tmp_path: Path) -> None:
    index, ids = small_index(tmp_path / "i", names(0, 90)), names(0, 90)
    query = vectors_of(["query"])[0] * 3
    assert same(found(index, query, top=7), nearest(ids, query, 7))
    assert len(found(index, query, top=999)) == 90
    few, many = ["n3", "n50", "n9"], names(0, 60)
    for chosen in (few, many, []):
        wanted = sorted(chosen, key=lambda each: int(each[1:]))
        assert same(found(index, query, filter={"of": chosen}), nearest(wanted, query, 10))
    index.delete(names(10, 70))
    index.add(texts_of(names(0, 5), " again"), vectors_of(names(100, 105)))  # replaces
    left = [*names(5, 10), *names(70, 90)]
    vectors = {**dict(zip(left, vectors_of(left), strict=True))}
    vectors |= dict(zip(names(0, 5), vectors_of(names(100, 105)), strict=True))
    cosines = {each: float(vector @ query) / 3 for each, vector in vectors.items()}
    assert dict(found(index, query, top=99)) == pytest.approx(cosines, abs=1e-6)
    assert index.total == 30
    assert index.delete(filter={"of": {">=": "n8"}}) == 12
    assert index.total == 18
    index.close()
    with open_index(tmp_path / "i") as again:
        assert again.total == 18


def test_equal_vectors_are_in_the_order_of_the_texts(tmp_path: Path) -> None:
    index = small_index(tmp_path / "i", [])
    index.add(texts_of(names(0, 29)), np.repeat(vectors_of(["x"]), 29, 0))
    query = vectors_of(["x"])[0]
    assert [each for each, _ in found(index, query, top=99)] == names(0, 29)
    assert [each for each, _ in found(index, query, top=7)] == names(0, 7)
    index.close()


def test_hybrid_is_the_fusion_of_two_rankings(tmp_path: Path) -> None:
    ranked = fused([[(4, 0.9), (2, 0.8)], [(2, 7.0), (9, 1.0), (4, 0.5)]])
    assert ranked == [(2, 1 / 62 + 1 / 61), (4, 1 / 61 + 1 / 63), (9, 1 / 62)]
    index = small_index(tmp_path / "i", names(0, 30))
    query = vectors_of(["query"])[0]
    both = [each.record.id for each in index.search(query, "n17 n4", top=5, hybrid=True)]
    first = [name for name, _ in nearest(names(0, 30), query, 30)]
    assert {"n17", "n4"} <= set(both[:3]) and first[0] in both
    assert index.search(query, "?", top=3, hybrid=True)[0].record.id == first[0]
    only = index.search(query, "n17 n4", filter={"of": ["n4", "n5"]}, hybrid=True)
    assert [each.record.id for each in only] == ["n4", "n5"]
    index.close()


# ---- while it changes ----


@pytest.mark.parametrize("approximate", [False, True])
def test_a_thousand_texts_come_and_a_thousand_go_while_others_search(
    approximate: bool, tmp_path: Path
) -> None:
    """Every text that was added is found, none that was deleted is, and those that stay are there
    in every search, also while the index is compacted."""
    if approximate:
        pytest.importorskip("usearch", reason="pip install 'palm_ds[search]'")
    stay, old, new = names(0, 100), names(1000, 2000), names(2000, 3000)
    folder = tmp_path / "i"
    index = small_index(folder, [*stay, *old], approximate_from=1 if approximate else 1 << 40)
    steps = [slice(at, at + 50) for at in range(0, 1000, 50)]
    problems: list[str] = []
    searches, compacted = 0, 0
    ended = threading.Event()

    def there(each: str) -> bool:
        return found(index, vectors_of([each])[0], top=1)[0][0] == each

    def come() -> None:
        for step in steps:
            add(index, new[step])
            index.grow_in_background(least=100)
            problems.extend(f"{each} was added" for each in new[step][::25] if not there(each))

    def go() -> None:
        for step in steps:
            assert index.delete(old[step]) == 50
            problems.extend(f"{each} was deleted" for each in old[step][::25] if there(each))

    def search() -> None:
        nonlocal searches
        while not ended.wait(0.005):
            each = stay[searches % len(stay)]
            if not there(each) or len(found(index, vectors_of(["q"])[0], top=100)) < 100:
                problems.append(f"{each} stays")
            searches += 1

    def compact() -> None:
        nonlocal compacted
        with open_index(folder) as other:
            while not ended.wait(0.05):
                compacted += other.compact()

    changes = [threading.Thread(target=each) for each in (come, go)]
    others = [threading.Thread(target=each) for each in (search, compact)]
    for each in (*others, *changes):
        each.start()
    for each in changes:
        each.join()
    ended.set()
    for each in others:
        each.join()
    index.grow_graph()
    assert (index.graph is not None and index.graph.covered >= 1100) == approximate
    index.close()
    assert problems == []
    assert searches > 10 and compacted > 100
    check_whole(folder, [*stay, *new])


def test_a_compacted_index_finds_the_same(few: None, tmp_path: Path) -> None:
    """By vectors, by words, by a graph, in an index that was open; ids and metadata are as before,
    and its files are smaller."""
    folder = tmp_path / "i"
    index, query = small_index(folder, names(0, 900), approximate_from=100), vectors_of(["q"])[0]
    index.grow_graph()
    index.delete(names(0, 500))

    hows: list[dict[str, Any]] = [
        {"exact": True},
        {"query": "text n600 n700", "hybrid": True, "exact": True},
        {"filter": {"of": names(480, 530)}, "top": 99},
    ]

    def answers() -> list[list[tuple[str, float, object]]]:
        return [
            [
                (x.record.id, round(x.score, 6), x.record.metadata)
                for x in index.search(query, **how)
            ]
            for how in hows
        ]

    before, size = answers(), (folder / "vectors-0.f32").stat().st_size
    with open_index(folder) as other:
        assert other.compact() == 500 and other.compact() == 0
    assert answers() == before
    assert (folder / "vectors-1.f32").stat().st_size == size // 9 * 4
    assert not (folder / "vectors-0.f32").exists()
    assert recall(index) == 1  # its graph is of the old rows
    assert index.grow_graph() and index.graph is not None and index.graph.covered == 400
    assert recall(index) > 0.97 and answers() == before
    index.close()
    with open_index(folder, approximate_from=100) as again:
        again.open_graph()
        assert again.graph is not None and again.graph.covered == 400


# ---- approximate ----


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are searched for few texts, too."""
    pytest.importorskip("usearch", reason="pip install 'palm_ds[search]'")
    monkeypatch.setattr("palm_ds.inference.search.index._FEW", 20)


def recall(index: SearchIndex, **options: object) -> float:
    hits = []
    for number in range(20):
        query = vectors_of([f"query {number}"])[0]
        exact = {each for each, _ in found(index, query, exact=True, **options)}
        hits.append(len(exact & {each for each, _ in found(index, query, **options)}) / len(exact))
    return float(np.mean(hits))


def test_a_graph_finds_nearly_all(few: None, tmp_path: Path) -> None:
    index = small_index(tmp_path / "i", names(0, 1500), approximate_from=1000)
    assert recall(index) == 1  # without a graph all are compared
    assert index.grow_graph() and not index.grow_graph()
    assert index.graph is not None and index.graph.covered == 1500
    assert recall(index) > 0.97
    wide = {"of": [f"n{n}" for n in range(0, 1500, 30)]}
    assert recall(index, filter=wide) > 0.97
    add(index, names(1500, 1540))  # not in the graph yet
    index.delete(names(0, 300))
    assert found(index, vectors_of(["n1520"])[0])[0][0] == "n1520"
    assert found(index, vectors_of(["n7"])[0])[0][0] != "n7"
    assert recall(index) > 0.97
    assert not index.grow_graph(least=41) and index.grow_graph(least=40)
    index.close()


def test_a_graph_is_read_again_and_made_again(few: None, tmp_path: Path) -> None:
    folder = tmp_path / "i"
    with small_index(folder, names(0, 300), approximate_from=100) as index:
        index.grow_graph()
    file = folder / graphs.FILE
    whole = file.read_bytes()
    with open_index(folder, approximate_from=100) as index:
        index.open_graph()
        assert index.graph is not None and index.graph.covered == 300 and not index.grow_graph()
        index.delete(names(0, 200))  # too many for the old one
        add(index, names(300, 310))
        assert index.grow_graph() and index.graph.left_out == 200
        assert recall(index) > 0.97
    for damaged in (whole[:-9], whole[:90], b"", whole[:-1] + b"\0" + whole[-1:]):
        file.write_bytes(damaged)
        with open_index(folder, approximate_from=100) as index:
            index.open_graph()
            assert index.graph is not None and index.graph.covered == 0
            assert index.grow_graph() and recall(index) > 0.97
    other = tmp_path / "other"
    with small_index(other, names(0, 300), approximate_from=100) as index:
        (other / graphs.FILE).write_bytes(whole)  # of another index
        index.open_graph()
        assert index.graph is not None and index.graph.covered == 0


def test_without_usearch_every_vector_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "usearch.index", None)
    index = small_index(tmp_path / "i", names(0, 50), approximate_from=10)
    assert not index.grow_graph() and index.graph is None and index.wants_graph
    query = vectors_of(["query"])[0]
    assert same(found(index, query), nearest(names(0, 50), query, 10))
    index.close()


# ---- mistakes ----


def test_mistakes_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="i: not an index; `palm-ds index build` makes one"):
        open_index(tmp_path / "i")
    index = small_index(tmp_path / "i", names(0, 2))
    with pytest.raises(UserError, match="vectors of 5 numbers; the index has 16"):
        index.add(texts_of(["a"]), np.ones((1, 5), np.float32))
    with pytest.raises(UserError, match="vectors: some numbers are not finite"):
        index.add(texts_of(["a"]), np.full((1, SIZE), np.nan, np.float32))
    with pytest.raises(UserError, match="filter: empty: it would delete every text"):
        index.delete(filter={})
    for wanted in ("x", None, {"!=": "x"}):
        with pytest.raises(UserError, match="filter: no text has ' off'; did you mean \"of\""):
            index.delete(filter={" off": wanted})
    assert index.total == 2
    index.close()
    with pytest.raises(UserError, match="i: already exists and is not empty"):
        create_index(tmp_path / "i", EMBEDDING, SIZE)
    for wrong in ("[", "{}", '{"size": "3"}'):
        (tmp_path / "i" / "index.json").write_text(wrong)
        with pytest.raises(UserError, match="index.json: damaged: "):
            open_index(tmp_path / "i")
