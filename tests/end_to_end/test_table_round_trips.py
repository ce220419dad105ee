"""Tables written by other programs are read as they were."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from palm_ds.data.reader import Table, open_table

LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r\t\x02"))
LABEL = st.text(st.characters(categories=["L", "N", "P"]), min_size=1).filter(str.strip)
TOKEN = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r\t "), min_size=1
).filter(lambda token: not token.startswith(("-DOCSTART-", "\ufeff")))


def read_back(name: str, write: Callable[[Path], object]) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        return open_table(str(path))


def columns(table: Table, *names: str) -> list[tuple[object, ...]]:
    assert table.columns == names
    return list(zip(*(table.column(name) for name in names), strict=True))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(LINE, LABEL), min_size=1))
def test_tsv(rows: list[tuple[str, str]]) -> None:
    text = "text_a\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows)
    table = read_back("t.tsv", lambda path: path.write_bytes(text.encode()))
    assert columns(table, "text_a", "label") == rows
    assert table.where(len(rows) - 1).endswith(f":{len(rows) + 1}")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.text(LETTERS).filter(lambda x: "\r" not in x), LABEL), min_size=1))
def test_csv(rows: list[tuple[str, str]]) -> None:
    rows = [(text.replace("\x02", ""), label) for text, label in rows]

    def write(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as handle:
            csv.writer(handle).writerows([("text_a", "label"), *rows])

    assert columns(read_back("t.csv", write), "text_a", "label") == rows


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.text(LETTERS), LABEL, st.integers()), min_size=1), st.booleans())
def test_jsonl(rows: list[tuple[str, str, int]], ascii_only: bool) -> None:
    rows = [(text.replace("\x02", ""), *rest) for text, *rest in rows]  # type: ignore[misc]
    named = [dict(zip(("text_a", "label", "id"), row, strict=True)) for row in rows]
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in named)
    table = read_back("t.jsonl", lambda path: path.write_bytes(text.encode()))
    assert [table[i] for i in range(len(table))] == named


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.tuples(TOKEN, LABEL), min_size=1), min_size=1), st.sampled_from(" \t"))
def test_conll(sentences: list[list[tuple[str, str]]], between: str) -> None:
    lines = ["".join(f"{a}{between}{b}\n" for a, b in sentence) for sentence in sentences]
    table = read_back("t.conll", lambda path: path.write_bytes("\n".join(lines).encode()))
    found = columns(table, "tokens", "tags")
    assert [list(zip(*pair, strict=True)) for pair in found] == sentences
