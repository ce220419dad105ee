"""Rows in memory are a table like any other; messages name the argument and the row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.reader import Table, TableSettings, open_table


def test_rows_in_memory_equal_those_of_a_file(tmp_path: Path) -> None:
    rows = [{"text_a": "a b", "label": np.int64(1)}, {"text_a": "c", "label": 0}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({**row, "label": int(row["label"])}) + "\n" for row in rows))
    made, read = Table.from_rows(rows), open_table(str(file))
    assert [made[i] for i in range(2)] == [read[i] for i in range(2)]
    assert (made.columns, made.names, made.where(1)) == (read.columns, ("rows",), "rows[1]")
    other = Table.from_rows([*rows[:1], {"text_a": "d", "label": 0}])
    assert made.fingerprint == Table.from_rows(rows, name="x").fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("given", "label"),
    [
        (np.float64(1.5), "1.5"),
        (np.float32(0.5), "0.5"),
        (np.bool_(True), "true"),
        (np.str_("yes"), "yes"),
        ({"b", "a"}, ["a", "b"]),
        (np.array([np.array(["a", "b"]), "c"], object)[0], ["a", "b"]),
    ],
)
def test_labels_of_numpy_are_written_as_pythons(given: object, label: object) -> None:
    """As `zip(texts, frame["score"].to_numpy())` gives them."""
    assert Table.from_rows([{"text_a": "a", "label": given}])[0]["label"] == label


def test_columns_are_chosen_as_in_files() -> None:
    settings = TableSettings(columns={"text_a": "review.text"})
    table = Table.from_rows([{"review": {"text": "good"}, "stars": 5}], settings)
    assert (table[0], table.unused) == ({"text_a": "good"}, ("stars",))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text_a": "a"}, 5], r"^dev\[1\]: expected a mapping with columns, got 5$"),
        ([{"text_a": "a"}, {}], r"^dev\[1\]: expected a mapping with columns, got {}$"),
        ([{"text_a": "a"}, {"text_a": 3j}], None),
        ([{"text_a": "a"}, {"text_a": ["b"]}], r"^dev\[1\]: "),
        ([{"text_a": "a"}, {"text_a": np.nan}], r"^dev\[1\]: text_a is nan, not text$"),
        ([{"text_a": "a"}, {"text_b": "b"}], r"^dev\[\d\]: no field"),
        ([], r"^dev: is empty; give at least one row$"),
        ([{"x": 1}], r"^dev: no known column among `x`"),
    ],
)
def test_mistakes_name_the_argument_and_the_row(rows: list[Any], message: str | None) -> None:
    if message is None:
        assert Table.from_rows(rows, name="dev")[1] == {"text_a": "3j"}
        return
    with pytest.raises(UserError, match=message):
        Table.from_rows(rows, name="dev")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """It would be read to its end by a first look, and then have no rows."""
    os.mkfifo(tmp_path / "rows.tsv")
    with pytest.raises(UserError, match=r"rows.tsv: is a pipe or a device, .*; write it to a file"):
        open_table(str(tmp_path / "rows.tsv"))
