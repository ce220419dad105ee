"""Real data sets through the tasks: every row is checked and becomes one example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.data.reader import TableSettings, open_table
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.data.tasks.task import build
from palm_ds.text.tokenizer import load_tokenizer

STS = {"header": False, "columns": {"text_a": 0, "text_b": 1, "label": 2}}
SICK = {"text_a": "sentence_A", "text_b": "sentence_B"}
FAQ = {"text_a": "question_1", "text_b": "question_2", "label": "similar"}


@pytest.mark.parametrize(
    ("file", "read", "kind", "found"),
    [
        ("en/sst2/dev.tsv", {}, "classification", {"labels": ("0", "1")}),
        ("zh/ocnli/dev.json", {"drop": {"label": ["-"]}}, "classification", {}),
        ("en/stsb/stsb-en-dev.csv", STS, "regression", {"scale": True}),
        (
            "en/sick/SICK_trial.txt",
            {"format": "tsv", "columns": {**SICK, "label": "relatedness_score"}},
            "regression",
            {"scale": True},
        ),
        (
            "en/covid_faq/eval_question_similarity_en.csv",
            {"columns": FAQ},
            "matching",
            {"labels": ("0", "1")},
        ),
        ("zh/qbqtc/dev.json", {}, "ranking", {"relevant_from": 2.0}),
        ("zh/fewclue_bustm/dev_few_all.json", {}, "masked_words", {}),
    ],
)
def test_every_row_becomes_an_example(
    shared: Path, file: str, read: dict[str, Any], kind: str, found: dict[str, Any]
) -> None:
    format = {"format": "jsonl"} if file.endswith(".json") else {}
    table = open_table(str(shared / "data/finetune" / file), TableSettings(**format, **read))
    words = "vocab_en.txt" if file.startswith("en") else "vocab.txt"
    tokenizer = load_tokenizer(shared / "data/ernie" / words)
    source = TableSource(table, np.arange(min(len(table), 300)), tokenizer, file)
    given = {name: x for name, x in found.items() if name != "labels"}
    task = build("task", {"kind": kind, "source": "s", **given}).resolved(source)
    task.check(source, labeled=True)
    assert {name: getattr(task, name) for name in found} == found
    dataset = TaskGroupDataset(
        "task", (task,), task_id=0, source=source, seed=1, max_length=48, fixed=True
    )
    layouts = dataset.layouts(np.arange(dataset.num_items))
    examples = [dataset.example(n, layout) for n, layout in enumerate(layouts)]
    assert [example.item for example in examples] == list(range(len(source)))
    assert all(len(example.labels["task"][0]) for example in examples)
    assert max(map(len, examples)) <= 48
