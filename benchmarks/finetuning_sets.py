"""The data sets of finetune_vs_transformers.py: files, rows, and how long to learn from them.

English: 300 steps of 8 rows with a rate of 1e-4, chosen once for all sets and not tuned. With an
encoder of six layers of 384 a run takes one to three minutes on one core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

METRICS = {"classification": "accuracy", "regression": "pearson", "tagging": "f1", "reading": "f1"}


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Rows to learn from and to score on, and how long to learn."""

    language: str = "english"
    kind: str = "classification"
    train: str
    dev: str = ""
    """Empty: the last third of the rows of `train`, none with a context of the others."""
    read: Mapping[str, Any] = field(default_factory=dict)
    rows: int
    """Rows to learn from, sampled once for all seeds."""
    dev_rows: int
    epochs: int
    lr: float = 1e-4
    length: int = 128
    longest: int = 100_000
    """Contexts of more characters are left out."""

    @property
    def metric(self) -> str:
        return METRICS[self.kind]


_SICK_PAIR = {"text_a": "sentence_A", "text_b": "sentence_B"}
_MRPC = {"text_a": "#1 String", "text_b": "#2 String", "label": "Quality"}
_STSB = {"header": False, "columns": {"text_a": 0, "text_b": 1, "label": 2}}
_TNEWS = {"format": "jsonl", "columns": {"text_a": "sentence", "label": "label_desc"}}
_MSRA = {"header": False, "columns": {"tokens": 1, "tags": 2}}
SETS: dict[str, DataSet] = {
    "SST-2": DataSet(
        train="en/sst2/train.tsv",
        dev="en/sst2/test.tsv",
        read={"columns": {"text_a": "sentence"}},
        rows=2_400,
        dev_rows=872,
        epochs=1,
    ),
    "MRPC": DataSet(
        train="en/mrpc/msr-para-train.tsv",
        dev="en/mrpc/msr-para-val.tsv",
        read={"columns": _MRPC},
        rows=1_200,
        dev_rows=500,
        epochs=2,
    ),
    "SICK entailment": DataSet(
        train="en/sick/SICK_train.txt",
        dev="en/sick/SICK_test_annotated.txt",
        read={"format": "tsv", "columns": {**_SICK_PAIR, "label": "entailment_judgment"}},
        rows=1_200,
        dev_rows=1_000,
        epochs=2,
    ),
    "SICK relatedness": DataSet(
        kind="regression",
        train="en/sick/SICK_train.txt",
        dev="en/sick/SICK_test_annotated.txt",
        read={"format": "tsv", "columns": {**_SICK_PAIR, "label": "relatedness_score"}},
        rows=1_200,
        dev_rows=1_000,
        epochs=2,
    ),
    "STS-B": DataSet(
        kind="regression",
        train="en/stsb/stsb-en-train.csv",
        dev="en/stsb/stsb-en-dev.csv",
        read=_STSB,
        rows=1_200,
        dev_rows=1_000,
        epochs=2,
    ),
    "wikigold": DataSet(
        kind="tagging",
        train="en/wikigold/wikigold.conll.txt",
        read={"format": "conll"},
        rows=600,
        dev_rows=400,
        epochs=4,
    ),
    "WNUT17": DataSet(
        kind="tagging",
        train="en/wnut17/wnut17train.conll",
        dev="en/wnut17/emerging.dev.conll",
        read={"format": "conll"},
        rows=1_200,
        dev_rows=600,
        epochs=2,
    ),
    "XQuAD": DataSet(
        kind="reading",
        train="en/xquad/xquad.en.articles00-35.json",
        rows=320,
        dev_rows=120,
        epochs=10,
        length=256,
        longest=750,
    ),
    "TNEWS": DataSet(
        language="chinese",
        train="zh/fewclue_tnews/train_few_all.json",
        dev="zh/fewclue_tnews/test_public.json",
        read=_TNEWS,
        rows=1_184,
        dev_rows=500,
        epochs=3,
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
