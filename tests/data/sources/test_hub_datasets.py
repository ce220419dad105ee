"""A run knows which data sets of the hub it learns from, however it got them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict

from palm_ds.data.sources.hub_datasets import names_in, names_of

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
    assert names_in([path, "other.tsv"]) == ({name} if name else set())


def test_datasets_say_where_they_are_from(tmp_path: Path) -> None:
    data = loaded()
    for each in (data, data.select([0]), data.map(lambda row: {**row, "more": 1})):
        assert names_of(each) == {"stanfordnlp/sst2"}
    DatasetDict({"train": data}).save_to_disk(tmp_path / "saved")
    assert names_in([str(tmp_path / "saved/train")]) == {"stanfordnlp/sst2"}
    cached = SimpleNamespace(cache_files=[{"filename": "/c/datasets/owner___name/default/x.arrow"}])
    assert names_of(cached) == {"owner/name"}
    for other in (["so good"], [{"text_a": "so"}], Dataset.from_dict({"a": [1]}), "a.tsv"):
        assert names_of(other) == set()
