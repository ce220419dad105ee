"""A fine-tuning task of the user's own is one file: in training, evaluation, predictions, score
files, on the server and in what its page gets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import palm_ds as palm
from palm_ds.common.errors import UserError
from palm_ds.train.report.metrics_file import read_metrics
from tests.helpers.serving import Local, local, opened
from tests.helpers.small_tables import TINY, write_tables
from tests.helpers.warm_python import run

pytestmark = pytest.mark.slow

TASK = '''
"""Half of the words: whether a text has more of them than of the others."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import palm_ds as palm
from palm_ds.common.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Majority(palm.ClassesTask):
    """Says which words are the majority.

    The second sentence is not for the page."""

    threshold: float = 0.5
    """Probability from which it is `yes`."""

    prediction_key: ClassVar[str] = "answer"
    rerank_priority: ClassVar[int] = 5

    def __post_init__(self):
        if not 0 < self.threshold < 1:
            raise UserError(f"{self.where}.threshold: {self.threshold} is not in 0..1")

    def label(self, example, source, rng):
        known = source.row(example.item).get(self.label_column)
        number = self.labels.index(known) if known in self.labels else 0
        example.labels[self.name] = np.zeros(1, np.int64), np.array([number])

    def head(self, backbone):
        return palm.heads.ClassHead(backbone.hidden_size, len(self.labels), pooled=True)

    def decode(self, scores, example, source):
        odds = np.exp(scores[0] - scores[0].max())
        sure = float(odds[1] / odds.sum())
        return {"answer": self.labels[int(sure >= self.threshold)], "sure": round(sure, 6)}

    def names_predicted(self, prediction):
        return {prediction["answer"]}

    def metrics(self, predictions, source):
        labels = source.column(self.label_column)
        right = [each["answer"] == labels[item] for item, each in predictions.items()]
        return {"right": sum(right) / len(right)}

    def row_of(self, texts):
        """Of a query and a document the document alone."""
        return {"text_a": texts if isinstance(texts, str) else texts[-1]}

    def relevance(self, prediction):
        return prediction["sure"]
'''


def palm_ds(folder: Path, *words: str) -> str:
    """What a command prints, in a process that finds the file of the task."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = run(["-m", "palm_ds", *words], cwd=folder, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run in a folder with the task's file."""
    folder = write_tables(tmp_path_factory.mktemp("one_file"))
    (folder / "majority.py").write_text(TASK)
    recipe = {
        "backbone": TINY,
        "length": 32,
        "batch": "8 examples",
        "optimizer": {"lr": 0.002},
        "sources": {
            "rows": {"table": "train.tsv", "validation": "dev.tsv", "tokenizer": "vocab.txt"}
        },
        "tasks": {"most": {"kind": "majority.Majority", "source": "rows", "threshold": 0.5}},
        "stages": [{"most": "4 epochs"}],
        "evaluate": {"every": 12, "best": "most.right"},
        "export_onnx": [],
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    cpu = ["--deepspeed_config", "cpu.json", "--run_dir", "run"]
    palm_ds(folder, "finetune", "mine.yaml", *cpu)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Local]:
    sys.path.insert(0, str(folder))
    try:
        with local(*opened(mine=folder / "run")) as found:
            yield found
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("majority", None)


def test_it_is_trained_evaluated_predicted_and_scored(folder: Path) -> None:
    evaluations = read_metrics(folder / "run" / "metrics.jsonl").evaluations
    best = max(each["scores"]["most"]["metrics"]["right"] for each in evaluations)
    assert best > 0.8
    device = ["--device", "cpu"]
    palm_ds(folder, "predict", "run", "--input", "dev.tsv", "--output", "out", "--tsv", *device)
    lines = (folder / "out" / "most.predictions.json").read_text().splitlines()
    made = [json.loads(line) for line in lines]
    assert len(made) == 24 and {each["answer"] for each in made} == {"no", "yes"}
    assert (folder / "out" / "most.tsv").read_text().splitlines()[1] == f"0\t{made[0]['answer']}"
    given = ["--gold", "dev.tsv", "--predictions", "out/most.predictions.json"]
    scored = palm_ds(folder, "evaluate", *given, "--kind", "majority.Majority", "--json")
    assert json.loads(scored) == {"right": pytest.approx(best)}


def test_it_is_served_and_reranks(folder: Path, server: Local) -> None:
    texts = ["w1 w2 w3", "w30 w31 w32"]
    found = server.answer("/predict/most", {"inputs": texts})["predictions"]
    assert [each["answer"] for each in found] == ["no", "yes"]
    ranked = server.answer("/rerank", {"query": "w30 w35", "documents": texts})
    assert ranked["task"] == "most" and [each["index"] for each in ranked["results"]] == [1, 0]


def test_the_page_gets_a_form_of_it(server: Local) -> None:
    """And the row that the page makes of what is typed is one that the task reads."""
    (task,) = server.get("/info").json()["models"][0]["tasks"]
    assert (task["kind"], task["labels"]) == ("majority.Majority", ["no", "yes"])
    form: Any = task["form"]
    assert (form["about"], form["shows"]) == ("Says which words are the majority.", "scores")
    typed = {each["role"]: each["value"] for each in form["fields"] if not each["optional"]}
    assert server.answer("/predict/most", {"inputs": [typed]})["predictions"][0].keys() == (
        {"answer", "sure"}
    )


def test_it_is_complete_in_python_too(folder: Path, server: Local) -> None:
    from majority import Majority  # type: ignore[import-not-found]

    with pytest.raises(UserError, match=r"^Majority.threshold: 2 is not in 0..1$"):
        Majority(threshold=2)
    task = Majority(labels=["no", "yes"], threshold=0.4).on(train=folder / "train.tsv")
    assert task.entry("rows") == {
        "kind": "majority.Majority",
        "source": "rows",
        "labels": ["no", "yes"],
        "threshold": 0.4,
    }
    model = palm.load(folder / "run")
    assert model.labels == {"most": ("no", "yes")}
    assert model(["w30 w31 w32"])[0]["answer"] == "yes"
