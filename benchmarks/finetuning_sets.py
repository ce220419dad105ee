"""The data sets of finetune_vs_transformers.py: files, rows, and how long to learn from them.

Small: with an encoder of six layers of 384 a run takes less than a minute on one core, one of
reading a few minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Rows to learn from and to score on, and how long to learn."""

    language: str
    kind: str
    train: str
    dev: str = ""
    """Empty: the last third of the rows of `train`, none with a context of the others."""
    read: Mapping[str, Any] = field(default_factory=dict)
    rows: int
    """Rows to learn from, sampled once for all seeds."""
    dev_rows: int
    epochs: int
    lr: float
    length: int = 128
    longest: int = 100_000
    """Contexts of more characters are left out."""


_SST2 = {"columns": {"text_a": "sentence"}}
_SICK = {"format": "tsv", "columns": {"text_a": "sentence_A", "text_b": "sentence_B"}}
_NLI = {**_SICK["columns"], "label": "entailment_judgment"}  # type: ignore[dict-item]
_STSB = {"header": False, "columns": {"text_a": 0, "text_b": 1, "label": 2}}
_TNEWS = {"format": "jsonl", "columns": {"text_a": "sentence", "label": "label_desc"}}
_MSRA = {"header": False, "columns": {"tokens": 1, "tags": 2}}
SETS: dict[str, DataSet] = {
    "SST-2": DataSet(
        language="english",
        kind="classification",
        train="en/sst2/train.tsv",
        dev="en/sst2/test.tsv",
        read=_SST2,
        rows=480,
        dev_rows=300,
        epochs=1,
        lr=2e-4,
    ),
    "SICK, pairs": DataSet(
        language="english",
        kind="classification",
        train="en/sick/SICK_train.txt",
        dev="en/sick/SICK_test_annotated.txt",
        read={**_SICK, "columns": _NLI},
        rows=320,
        dev_rows=250,
        epochs=1,
        lr=2e-4,
    ),
    "STS-B": DataSet(
        language="english",
        kind="regression",
        train="en/stsb/stsb-en-train.csv",
        dev="en/stsb/stsb-en-dev.csv",
        read=_STSB,
        rows=320,
        dev_rows=250,
        epochs=1,
        lr=2e-4,
    ),
    "wikigold": DataSet(
        language="english",
        kind="tagging",
        train="en/wikigold/wikigold.conll.txt",
        read={"format": "conll"},
        rows=192,
        dev_rows=120,
        epochs=2,
        lr=5e-4,
    ),
    "XQuAD": DataSet(
        language="english",
        kind="reading",
        train="en/xquad/xquad.en.articles00-35.json",
        rows=320,
        dev_rows=120,
        epochs=4,
        lr=5e-4,
        length=256,
        longest=750,
    ),
    "TNEWS": DataSet(
        language="chinese",
        kind="classification",
        train="zh/fewclue_tnews/train_few_all.json",
        dev="zh/fewclue_tnews/test_public.json",
        read=_TNEWS,
        rows=1_184,
        dev_rows=500,
        epochs=5,
        lr=1e-3,
    ),
    "MSRA sample": DataSet(
        language="chinese",
        kind="tagging",
        train="zh/msra_ner_sample/train.tsv",
        dev="zh/msra_ner_sample/test.tsv",
        read=_MSRA,
        rows=480,
        dev_rows=250,
        epochs=6,
        lr=1e-3,
    ),
}
