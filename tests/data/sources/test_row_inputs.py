"""Rows of every kind become the same mappings; anything else is one clear line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict

from palm_ds.common.errors import UserError
from palm_ds.data.reader import TableSettings
from palm_ds.data.sources.row_inputs import (
    columns_for,
    dataset_names_in,
    dataset_names_of,
    listed,
    open_rows,
    train_and_dev,
)
from palm_ds.data.sources.table import TableSource
from palm_ds.tasks.classification import Classification

TEXTS = ({"text_a": "a fine film"}, {"text_a": "dull"})
PAIRS = ({"text_a": "a", "text_b": "b"}, {"text_a": "c", "text_b": "d"})
LABELLED = [{"sentence": "a fine film", "label": "good"}, {"sentence": "dull", "label": "bad"}]
NAMES = datasets.ClassLabel(names=["bad", "good"])


def as_dataset(labels: list[int]) -> datasets.Dataset:
    features = datasets.Features({"sentence": datasets.Value("string"), "label": NAMES})
    texts = [row["sentence"] for row in LABELLED]
    return datasets.Dataset.from_dict({"sentence": texts, "label": labels}, features=features)


@pytest.mark.parametrize(
    "given",
    [
        ["a fine film", "dull"],
        ("a fine film", "dull"),
        (text for text in ("a fine film", "dull")),
        lambda: iter(["a fine film", "dull"]),
        np.array(["a fine film", "dull"]),
        pd.Series(["a fine film", "dull"]),
        [{"text_a": "a fine film"}, {"text_a": "dull"}],
    ],
)
def test_texts(given: Any) -> None:
    assert listed(given) == TEXTS


@pytest.mark.parametrize(
    "given",
    [[("a", "b"), ("c", "d")], [["a", "b"], ["c", "d"]], np.array([["a", "b"], ["c", "d"]])],
)
def test_pairs(given: Any) -> None:
    assert listed(given) == PAIRS


@pytest.mark.parametrize(
    "given",
    [
        LABELLED,
        pd.DataFrame(LABELLED),
        pd.DataFrame(LABELLED).astype({"label": "category"}),
        as_dataset([1, 0]),
        as_dataset([1, 0]).with_format("torch"),
        as_dataset([1, 0]).to_iterable_dataset(),
    ],
)
def test_rows_with_columns(given: Any) -> None:
    """Class numbers of a Dataset are their names."""
    rows = listed(given)
    assert list(rows) == LABELLED
    table = open_rows(rows, TableSettings(), "train")
    assert table[0] == {"text_a": "a fine film", "label": "good"}


def test_tuples_with_a_label() -> None:
    assert listed([("a", 1), ("b", 0.5)]) == (
        {"text_a": "a", "label": 1},
        {"text_a": "b", "label": 0.5},
    )
    assert listed([("a", True), ("b", np.True_)]) == (
        {"text_a": "a", "label": True},
        {"text_a": "b", "label": True},
    )
    assert listed([("a", "b", "c")]) == ({"text_a": "a", "text_b": "b", "label": "c"},)


def test_the_second_of_two_texts_is_no_label() -> None:
    source = TableSource.of_labels(open_rows(listed(PAIRS), TableSettings(), "train"))
    expected = (
        r'no column \'label\': a tuple of two texts .* such as {"text_a": ..., "label": ...}$'
    )
    with pytest.raises(UserError, match=expected):
        source.need("label", "tasks.mood")
    source = TableSource.of_labels(open_rows(listed(TEXTS), TableSettings(), "train"))
    with pytest.raises(UserError, match="map one with `columns: {label: NAME}`$"):
        source.need("label", "tasks.mood")


def test_missing_values_are_none() -> None:
    frame = pd.DataFrame({"sentence": ["a", None], "label": [1.5, np.nan], "when": pd.NaT})
    assert listed(frame) == (
        {"sentence": "a", "label": 1.5, "when": None},
        {"sentence": None, "label": None, "when": None},
    )
    assert [row["label"] for row in listed(as_dataset([-1, 1]))] == [None, "good"]  # type: ignore


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([1, None, 0], [1, None, 0]),  # pandas has no missing int64: 1.0, NaN, 0.0
        ([1.0, 2.0], [1.0, 2.0]),
        ([1.0, None, 2.5], [1.0, None, 2.5]),
        ([None, None], [None, None]),
        ([np.inf, 1.0, None], [np.inf, 1.0, None]),
        ([1e17, None], [1e17, None]),
        (pd.array([1.0, None], dtype="Float64"), [1.0, None]),
        (pd.array([1, None], dtype="Int64"), [1, None]),
    ],
)
def test_whole_numbers_beside_missing_ones_stay_whole(given: Any, read: list[Any]) -> None:
    found = [row["label"] for row in listed(pd.DataFrame({"label": given}, dtype=None))]
    assert found == read and list(map(type, found)) == list(map(type, read))


def test_bytes_are_text() -> None:
    """b'so' was read with its quotes."""
    rows = [{"text": "sü".encode()}, {"text": b"\xff"}]
    assert open_rows(listed(rows[:1]), TableSettings(), "train")[0] == {"text_a": "sü"}
    with pytest.raises(UserError, match=r"train\[1\]: text_a: lone surrogate at character 1"):
        open_rows(listed(rows), TableSettings(), "train")


def test_files(tmp_path: Path) -> None:
    odd = tmp_path / "rows of today"
    odd.write_text("")
    assert listed("new.tsv") == "new.tsv" and listed(str(odd)) == str(odd)
    assert listed(Path("rows")) == "rows" and listed("data/*.jsonl.gz") == "data/*.jsonl.gz"
    assert listed([Path("a.tsv"), Path("b.tsv")]) == ["a.tsv", "b.tsv"]
    assert listed(["see a.tsv", "b"]) == ({"text_a": "see a.tsv"}, {"text_a": "b"})


def test_the_splits_of_a_dataset_dict() -> None:
    parts = {name: as_dataset([1, 0]) for name in ("train", "test")}
    split = datasets.DatasetDict(parts)
    assert train_and_dev(split, None) == (parts["train"], parts["test"])
    split["validation"] = as_dataset([0, 1])
    assert train_and_dev(split, None)[1] is split["validation"]
    assert train_and_dev(split, "dev.tsv")[1] == "dev.tsv"
    task = Classification.on(train=split)
    assert task.train is parts["train"] and task.dev is split["validation"]
    alone = datasets.DatasetDict({"train": parts["train"]})
    assert train_and_dev(alone, None) == (parts["train"], None)
    with pytest.raises(UserError, match=r"^train: no split 'train'; it has a, b; give one of them"):
        train_and_dev(datasets.DatasetDict(a=parts["train"], b=parts["train"]), None)


def test_a_generator_is_read_once(tmp_path: Path) -> None:
    task = Classification.on(train=(row for row in LABELLED))
    first = Path(task.source(tmp_path)["table"]).read_text()
    assert Path(task.source(tmp_path)["table"]).read_text() == first != ""


def test_columns_of_another_file() -> None:
    """A model trained on `review` reads rows that have the role's own name, and texts."""
    columns = {"text_a": "review", "label": "stars"}
    assert columns_for([{"review": "a"}], columns) == {"text_a": "review"}
    assert columns_for([{"text_a": "a", "stars": "5"}], columns) == {"label": "stars"}
    assert columns_for(PAIRS, {"text_a": 0}, ("question", "context")) == {
        "question": "text_a",
        "context": "text_b",
    }
    assert columns_for([{"a": {"b": "x"}}], {"text_a": "a.b", "label": ""}) == {
        "text_a": "a.b",
        "label": "",
    }


WRONG: dict[str, Any] = {
    r"rows: no file 'a fine film'; put a text into a list: \['a fine film'\]": "a fine film",
    r"rows: no file 'What\?'; put a text": "What?",
    r"rows\[0\]: 'a.tsv' looks like a file, but a str in a list is a text; for files give "
    r"Path\('a.tsv'\), for texts \{'text_a': 'a.tsv'\}": ["a.tsv", "b.csv.gz"],
    r"rows\[1\]: is a mapping, but rows\[0\] is a text": ["a", {"text_a": "b"}],
    r"rows\[1\]: is a text, but rows\[0\] is a Path": [Path("a.tsv"), "b.tsv"],
    r"rows\[0\]: expected a mapping with columns, a text or a pair of texts, got 5": [5],
    r"rows\[0\]: expected .* got \('a',\)": [("a",)],
    r"rows\[0\]: expected .* got \('a', None\)": [("a", None)],
    r"rows\[0\]: expected .* got \('a', 1, 'c'\)": [("a", 1, "c")],
    r"rows\[0\]: 4 elements; expected one or two texts and a label": [("a", "b", "c", "d")],
    r"rows\[1\]: is a tuple of texts and a label, but rows\[0\] is a pair of texts": [
        ("a", "b"),
        ("c", 1),
    ],
    r"rows\[0\]: expected .* got None": [None],
    r"rows: expected a list of rows, got one mapping; give \[\{...\}, ...\]": {"text_a": "b"},
    r"rows: expected a file or a list of rows, got 5": 5,
    r"rows: expected a file or a list of rows, got b'a'": b"a",
    r"rows: has the splits train; give one of them: data\[NAME\]": datasets.DatasetDict(
        train=as_dataset([1, 0])
    ),
    r"rows: is a Table; give its rows: .to_pylist\(\)": pa.table({"text": ["a"]}),
    r"rows: expected a list of rows, got one mapping; .*; of columns pandas.DataFrame\(": {
        "text": ["a"]
    },
    r"rows: two columns of the DataFrame are called 'a'": pd.DataFrame(
        [[1, 2]], columns=["a", "a"]
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_no_row(message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}") as error:
        listed(WRONG[message])
    assert "\n" not in str(error.value)


def test_a_data_frame_without_the_columns() -> None:
    rows = listed(pd.DataFrame({"body": ["a"], "score": [1]}))
    expected = (
        "^train: no known column among `body`, `score`; assign .*: {text_a: NAME, label: NAME}$"
    )
    with pytest.raises(UserError, match=expected):
        open_rows(rows, TableSettings(), "train")
    with pytest.raises(UserError, match=r"^train: is empty; give at least one row$"):
        open_rows(listed(pd.DataFrame({"text": []})), TableSettings(), "train")


PARQUET = "hf://datasets/stanfordnlp/sst2@abc123/data/train.parquet"


def loaded() -> Dataset:
    """As `load_dataset("stanfordnlp/sst2")` returns it."""
    made = Dataset.from_dict({"text_a": ["so good", "bad"] * 4, "label": [1, 0] * 4})
    made.info.download_checksums = {PARQUET: {"num_bytes": 1, "checksum": None}}
    return made


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (PARQUET, "stanfordnlp/sst2"),
        ("hf://datasets/owner/name", "owner/name"),
        ("/c/hub/datasets--owner--a.b/snapshots/1f/train.tsv", "owner/a.b"),
        ("hf://models/owner/name/train.tsv", ""),
        ("data/train.tsv", ""),
        ("s3://bucket/datasets/owner/name", ""),
    ],
)
def test_names_in_paths(path: str, name: str) -> None:
    assert dataset_names_in([path, "other.tsv"]) == ({name} if name else set())


def test_datasets_say_where_they_are_from(tmp_path: Path) -> None:
    data = loaded()
    for each in (data, data.select([0]), data.map(lambda row: {**row, "more": 1})):
        assert dataset_names_of(each) == {"stanfordnlp/sst2"}
    DatasetDict({"train": data}).save_to_disk(tmp_path / "saved")
    assert dataset_names_in([str(tmp_path / "saved/train")]) == {"stanfordnlp/sst2"}
    cached = SimpleNamespace(cache_files=[{"filename": "/c/datasets/owner___name/default/x.arrow"}])
    assert dataset_names_of(cached) == {"owner/name"}
    for other in (["so good"], [{"text_a": "so"}], Dataset.from_dict({"a": [1]}), "a.tsv"):
        assert dataset_names_of(other) == set()
