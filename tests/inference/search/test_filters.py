"""Filters choose what a few lines of Python do, and their mistakes have one line each."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.search.filters import clause_of
from palm_ds.inference.search.store import Store
from palm_ds.inference.search.texts import IndexedText
from palm_ds.inference.search.vectors import VectorArray

RNG = np.random.default_rng(5)
SCALARS: list[Any] = [None, True, False, 0, 1, 2.5, -3, "a", "b", "é", "ab", "1", 'x" OR 1 --', ""]
VALUES = [*SCALARS, [], ["a", 1], ["b", None, True], [2.5, "é"], {"a": 1}]
KEYS = ["k", "a.b", 'q"', "$", "é"]
COMPARE = {
    "==": operator.eq, ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip


def draw(values: list[Any]) -> Any:
    return values[int(RNG.integers(len(values)))]


def holds(metadata: dict[str, Any], filter: dict[str, Any]) -> bool:
    return all(condition(metadata.get(key), wanted) for key, wanted in filter.items())


def condition(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(compared(value, "==", each) for each in wanted)
    if isinstance(wanted, dict):
        return all(compared(value, sign, each) for sign, each in wanted.items())
    return compared(value, "==", wanted)


def compared(value: Any, sign: str, wanted: Any) -> bool:
    if sign == "!=":
        return not compared(value, "==", wanted)
    if wanted is None:
        return value is None
    each = value if isinstance(value, list) else [value]
    return any(kind(x) == kind(wanted) and COMPARE[sign](x, wanted) for x in each)


def kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    return "number" if isinstance(value, int | float) else type(value).__name__


def drawn_filter() -> dict[str, Any]:
    ordered = [x for x in SCALARS if isinstance(x, str | int | float) and not isinstance(x, bool)]
    wanted = [
        lambda: draw(SCALARS),
        lambda: [draw(SCALARS) for _ in range(RNG.integers(3))],
        lambda: {draw(list(COMPARE)): draw(ordered), "!=": draw(SCALARS)},
        lambda: {"<=": draw(ordered)},
    ]
    return {draw(KEYS): draw(wanted)() for _ in range(RNG.integers(1, 3))}


def test_a_filter_chooses_what_python_does() -> None:
    rows = [{key: draw(VALUES) for key in KEYS if RNG.random() < 0.6} for _ in range(80)]
    texts = [IndexedText(text="x", id=str(n), metadata=row) for n, row in enumerate(rows)]
    store = Store.in_memory(VectorArray(np.zeros((len(rows), 1), np.float32)), texts)
    chosen = 0
    for _ in range(200):
        filter = drawn_filter()
        with store.reading() as now:
            found = now.allowed(filter).tolist()
        assert found == [n for n, row in enumerate(rows) if holds(row, filter)], filter
        chosen += len(found)
    assert 200 < chosen < 200 * 70
    store.close()


@pytest.mark.parametrize(
    ("filter", "line"),
    [
        ({"langg": "en"}, """no text has 'langg'; did you mean "lang"\\?"""),
        ({"lang": "en", "x": {">": 3}}, "no text has 'x'; known: lang, year"),
        ({"x": [1, 2]}, "no text has 'x'; known: lang, year"),
        ({"lang": "fr"}, ""),
        ({"year": None, "x": {"!=": 1}, "y": [None, 2]}, ""),
    ],
)
def test_a_filter_that_allows_nothing_names_a_key_that_no_text_has(
    filter: dict[str, Any], line: str
) -> None:
    """Those that texts without the key pass may name any."""
    texts = [IndexedText(text="x", id=str(n), metadata={"lang": "en", "year": n}) for n in range(2)]
    store = Store.in_memory(VectorArray(np.zeros((2, 1), np.float32)), texts)
    with store.reading() as now:
        if line:
            with pytest.raises(UserError, match=f"^filter: {line}$"):
                now.allowed(filter)
        else:
            assert not len(now.allowed(filter))
    store.close()
    empty = Store.in_memory(VectorArray(np.zeros((0, 1), np.float32)), [])
    with empty.reading() as now:
        assert not len(now.allowed(filter))
    empty.close()


def test_no_part_of_a_filter_is_sql() -> None:
    sql, parameters = clause_of({"'; DROP TABLE texts; --": {">=": "' OR 1"}})
    assert "DROP" not in sql and "OR 1" not in sql
    assert parameters == ["'; DROP TABLE texts; --", "' OR 1", "' OR 1"]


@pytest.mark.parametrize(
    ("filter", "line"),
    [
        ([], "filter: expected an object"),
        ({"a": {"=>": 1}}, "filter: a: '=>' is not an operator"),
        ({"a": {}}, "filter: a: no operator; expected one of"),
        ({"a": {">": True}}, "filter: a: > compares numbers or texts, got True"),
        ({"a": {"==": [1]}}, r"filter: a: expected a text, a number, true, false or null, got \["),
        ({"a": [{"b": 1}]}, "filter: a: expected a text, a number"),
        ({"a": 1 << 63}, "filter: a: an integer of more than 64 bits"),
        ({"a": float("nan")}, "filter: a: nan is not a number in JSON"),
        ({"a": ["x"] * 99}, "filter: more than 64 values"),
        ({f"a{n}": [] for n in range(999)}, "filter: more than 64 values"),
        ({"a": "\ud800"}, "filter: a: half a character"),
    ],
)
def test_mistakes_in_one_line(filter: Any, line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}") as raised:
        clause_of(filter)
    assert "\n" not in str(raised.value)
