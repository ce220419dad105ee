"""Rows of files as texts of an index."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.search.texts import IndexedText, TextColumns, read_texts


def read(file: Path, **columns: object) -> list[IndexedText]:
    return [text for _, text in read_texts([str(file)], TextColumns(**columns))]  # type: ignore[arg-type]


def test_columns_become_ids_titles_and_metadata(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"_id": 7, "title": "T", "text": "a", "year": 2020, "tags": ["x", null]}\n'
        '{"_id": "8", "title": null, "text": "b", "metadata": {"year": NaN, "lang": "en"}}\n'
    )
    one, two = read(rows)
    assert one == IndexedText(
        id="7", title="T", text="a", metadata={"year": 2020, "tags": ["x", None]}
    )
    assert two == IndexedText(id="8", text="b", metadata={"year": None, "lang": "en"})
    assert (one.passage, two.passage) == ("T a", "b")
    table = tmp_path / "rows.parquet"
    given = {"text": "body", "id": "key", "title": "head"}
    columns = {"key": [1, 2], "body": ["a", "b"], "head": ["A", "B"], "n": [1.5, 2.0], "o": [0, 0]}
    pq.write_table(pa.table(columns), table)
    first, _ = read(table, **given, metadata=["n"])
    assert first == IndexedText(id="1", title="A", text="a", metadata={"n": 1.5})
    assert read(table, **given)[1].metadata == {"n": 2.0, "o": 0}


def test_without_ids_a_text_is_known_by_its_hash(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("one\ntwo\none\n")
    ids = [each.id for each in read(lines)]
    assert ids[0] == ids[2] != ids[1]
    assert all(len(each) == 16 for each in ids)


@pytest.mark.parametrize(
    ("row", "columns", "line"),
    [
        ('{"text": " "}', {}, ":1: the text is empty"),
        ('{"text": 3}', {}, ":1: text: expected a text, got 3"),
        ('{"text": "a", "id": null}', {}, ":1: id: expected a name or a number, got None"),
        ('{"txt": "a"}', {}, ":1: no text column among txt; name one with --column"),
        ('{"text": "a", "idd": 1}', {"id": "ids"}, ":1: no column 'ids' for the id; did you mean"),
        ('{"text": "a"}', {"metadata": ["x"]}, ":1: no column 'x' for the metadata"),
        ('{"text": "a\\u0000"}', {}, ":1: text: NUL at character 2"),
        ('{"text": "a", "n": {"m": "\\ud800"}}', {}, ":1: metadata.n.m: half a character at 1"),
        ('{"text": "a", "n": 9223372036854775808}', {}, ":1: metadata.n: an integer of more"),
        ('{"text": "a", "n": 1' + "0" * 400 + "}", {}, ":1: metadata.n: an integer of more"),
        ('{"text": "a", "n": ' + "[" * 20 + "]" * 20 + "}", {}, ":1: metadata.*nested too deeply"),
    ],
)
def test_mistakes_in_one_line(
    row: str, columns: dict[str, object], line: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{row}\n")
    with pytest.raises(UserError, match=f"rows.jsonl{line}") as raised:
        read(file, **columns)
    assert "\n" not in str(raised.value)
