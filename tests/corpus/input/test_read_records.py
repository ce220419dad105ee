"""Every input format: nothing is lost between units or dropped silently."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.corpus.input import python_docs as embedded
from palm_ds.corpus.input.discover import find_inputs, split_into_units
from palm_ds.corpus.input.read_records import Record, RecordReader, Rejection
from palm_ds.corpus.options import InputOptions

ROWS = [{"id": f"d{i}", "text": f"Text {i}\u2028 of 北京. " * (i + 1)} for i in range(20)]


def read(
    names: list[str], *, size: int = 1 << 20, **options
) -> tuple[list[Record], list[Rejection]]:
    """All records of the inputs, split into units of `size` bytes."""
    chosen = InputOptions(**options)
    inputs, _ = find_inputs(names, chosen)
    found = [
        each
        for unit in split_into_units(inputs, chosen, size=size)
        for span in unit
        for each in RecordReader(inputs[span.input], span, chosen)
    ]
    return (
        [r for r in found if isinstance(r, Record)],
        [r for r in found if isinstance(r, Rejection)],
    )


def jsonl(rows: list) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_arrow(folder: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder))


WRITERS = {
    "a.jsonl": lambda file: file.write_bytes(jsonl(ROWS)),
    "a.json": lambda file: file.write_bytes(jsonl(ROWS).rstrip(b"\n")),
    "a.jsonl.gz": lambda file: file.write_bytes(gzip.compress(jsonl(ROWS))),
    "a.jsonl.zst": lambda file: file.write_bytes(
        zstandard.compress(jsonl(ROWS[:7])) + zstandard.compress(jsonl(ROWS[7:]))
    ),
    "a.parquet": lambda file: pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=6),
    "folder": as_arrow,
}


@pytest.mark.parametrize("size", [300, 1 << 20])
@pytest.mark.parametrize("name", WRITERS)
def test_tables(name: str, size: int, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    records, rejected = read([str(tmp_path / name)], size=size)
    assert [(r.id, r.text) for r in records] == [(row["id"], row["text"]) for row in ROWS]
    assert not rejected


def test_fields_have_names(tmp_path: Path) -> None:
    rows = [{"body": "One.", "key": 7, "id": "x"}, {"body": "Two.", "key": "k"}]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    pq.write_table(pa.Table.from_pylist([{"body": "One.", "key": 7}]), tmp_path / "b.parquet")
    records, _ = read([str(tmp_path / "a.jsonl")], text_field="body", id_field="key")
    assert [(r.id, r.text) for r in records] == [("7", "One."), ("k", "Two.")]
    records, _ = read([str(tmp_path / "b.parquet")], text_field="body")
    assert [(r.id, r.text) for r in records] == [("b.parquet#0", "One.")]
    with pytest.raises(UserError, match="no column `text`; it has body, key"):
        read([str(tmp_path / "b.parquet")])


PARAGRAPHS = "One.\nStill one.\n\n\n  \nTwo.\r\nMore two.\r\n\r\nThree\u2028three."


def test_text_files(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(PARAGRAPHS.encode())
    records, _ = read([str(file)])
    assert [r.text for r in records] == [
        *("One.\nStill one.", "Two.\nMore two.", "Three\u2028three.")
    ]
    assert [r.id for r in records] == ["a.txt@0", "a.txt@21", "a.txt@40"]
    for record in records:  # the id has its offset in the file
        at = int(record.id.partition("@")[2])
        assert PARAGRAPHS.encode()[at:].decode().startswith(record.text[:3])
    whole, _ = read([str(file)], text_documents="file")
    assert [(r.id, r.text) for r in whole] == [("a.txt", PARAGRAPHS.replace("\r\n", "\n"))]
    lines, rejected = read([str(file)], text_documents="line")
    assert len(lines) == 5 and len(rejected) == 4


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.sampled_from(["a", "bb b", "", " ", "ccc\r", "d" * 30]), max_size=30),
    st.integers(1, 60),
    st.sampled_from(["blank_line", "line", "jsonl"]),
)
def test_units_lose_nothing(tmp_path: Path, lines: list[str], size: int, kind: str) -> None:
    """The documents of an input do not depend on the size of the units."""
    if kind == "jsonl":
        lines = [json.dumps({"text": line}) for line in lines]
    file = tmp_path / ("a.jsonl" if kind == "jsonl" else "a.txt")
    file.write_bytes("\n".join(lines).encode())
    options = {"text_documents": "line" if kind == "jsonl" else kind}
    whole, cut_up = read([str(file)], **options), read([str(file)], size=size, **options)
    assert [(r.id, r.text) for r in whole[0]] == [(r.id, r.text) for r in cut_up[0]]
    assert [r.reason for r in whole[1]] == [r.reason for r in cut_up[1]]


BAD_LINES = [
    (b'{"text": "broken', "not JSON"),
    (b'{"txt": "x"}', "no field `text`; it has `txt`"),
    (b'{"text": 3}', "field `text` is int, not text"),
    (b'{"text": null}', "field `text` is null, not text"),
    (b'{"text": "\xff"}', "invalid UTF-8 at byte 11"),
    (b'{"text": " "}', "empty text"),
    (b"", "empty line"),
    (b"[1]", "a JSON list, expected an object"),
    (b'{"text": "\\ud800x"}', "lone surrogate"),
    (b"[" * 100_000, "nested too deep"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=[reason for _, reason in BAD_LINES])
def test_bad_lines_are_named(line: bytes, reason: str, tmp_path: Path) -> None:
    good = b'{"text": "good"}\n'
    (tmp_path / "a.jsonl").write_bytes(good + line + b"\n" + good)
    records, rejected = read([str(tmp_path / "a.jsonl")])
    assert len(records) == 2
    assert [(r.line, reason in r.reason) for r in rejected] == [(2, True)]


def test_a_document_beyond_memory_is_rejected(tmp_path: Path, monkeypatch) -> None:
    for module in ("corpus.input.read_records", "common.rows.lines"):
        monkeypatch.setattr(f"palm_ds.{module}.LONGEST", 100)
    long = "x" * 150
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": long}, {"text": "short"}]))
    (tmp_path / "b.txt").write_text(f"short\n\n{long}\n\nshort\n\n" + "y\n" * 90 + "\nshort")
    for name, good in (("a.jsonl", 1), ("b.txt", 3)):
        records, rejected = read([str(tmp_path / name)])
        assert [r.text for r in records] == ["short"] * good
        assert {r.reason for r in rejected} == {"longer than 100 bytes"}


def test_pairs_of_csv_are_rows_of_a_table(tmp_path: Path) -> None:
    """A quote within a cell is a letter, a row may have several lines, and names differ."""
    text = 'text_a,text_b,label\n5" disk,c,x\n"d\ne",f,x\ng,h,x\n'
    (tmp_path / "a.csv").write_text(text)
    records, rejected = read([str(tmp_path / "a.csv")], format="pairs")
    assert [r.parts for r in records] == [('5" disk', "c"), ("d\ne", "f"), ("g", "h")]
    assert [text[int(r.id.partition("@")[2]) :][:2] for r in records] == ['5"', '"d', "g,"]
    assert [r.line for r in records] == [2, 3, 5] and not rejected
    (tmp_path / "b.csv").write_text("text_a,text_b,text_b,label\na,b,c,x\n")
    with pytest.raises(UserError, match="line 1, the column names: two columns have the name"):
        read([str(tmp_path / "b.csv")], format="pairs")


def test_classes_have_their_names(tmp_path: Path) -> None:
    """In parquet as in Arrow files that `datasets` wrote."""
    text, kinds = datasets.Value("string"), datasets.ClassLabel(names=["after", "but"])
    features = datasets.Features({"text_a": text, "text_b": text, "label": kinds})
    rows = {"text_a": ["a", "b"], "text_b": ["c", "d"], "label": [1, 0]}
    data = datasets.Dataset.from_dict(rows, features=features)
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.save_to_disk(str(tmp_path / "b"))
    for name in ("a.parquet", "b"):
        records, rejected = read([str(tmp_path / name)], format="pairs")
        assert [record.label for record in records] == ["but", "after"] and not rejected


def test_folders_patterns_and_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c.bin", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    inputs, ignored = find_inputs([str(tmp_path)], InputOptions())
    assert [item.name for item in inputs] == ["a.txt", "b/1.txt", "b/2.txt"]
    assert ignored == (str(tmp_path / "c.bin"),)
    inputs, _ = find_inputs([str(tmp_path / "**/*.txt")], InputOptions())
    assert [item.name for item in inputs] == ["a.txt", "1.txt", "2.txt"]
    inputs, _ = find_inputs([str(tmp_path / "c.bin")], InputOptions(format="text"))
    assert inputs[0].kind == "text"
    (tmp_path / "d").mkdir()
    (tmp_path / "d/1.txt").write_text("x")
    two = [str(tmp_path / "b/1.txt"), str(tmp_path / "d/1.txt")]
    assert [item.name for item in find_inputs(two, InputOptions())[0]] == two


def test_small_files_share_a_unit(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
    inputs, _ = find_inputs([str(tmp_path)], InputOptions())
    units = split_into_units(inputs, InputOptions(), size=350)
    assert [len(unit) for unit in units] == [3, 3, 3, 1]
    began = time.process_time()
    many = [replace(inputs[0], bytes=20)] * 20_000
    assert len(split_into_units(many, InputOptions(), size=1 << 20)) == 1
    assert time.process_time() - began < 3  # adding up the unit for each file takes 10 s


@pytest.mark.slow
def test_the_embedded_text() -> None:
    documents = list(embedded.all_documents())
    assert len({name for name, _ in documents}) == len(documents) > 400
    assert sum(len(text) for _, text in documents) > 1_500_000
    text = dict(documents)
    assert "if_stmt" in text["topic/if"] and text["module/re"].startswith("Support for regular")
    records, rejected = read(["embedded"], size=200_000)
    assert [(r.id, r.text) for r in records] == documents and not rejected
