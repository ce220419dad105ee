"""A run's tasks predict the same with its ONNX file as with its model, whatever their kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.cli.convert import COMMAND
from palm_ds.common.errors import UserError
from palm_ds.inference.onnx_scores import OnnxTasks, run_of
from palm_ds.inference.predict_files import PredictionJob, predict_files
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.heads.crf import CRFHead
from palm_ds.train.setup.build import outputs_of
from palm_ds.weights.formats.onnx.description import read_description
from palm_ds.weights.formats.onnx.run import OnnxModel
from palm_ds.weights.model_folder import open_model
from tests.helpers.saved_model import TASKS, pairs, questions, save_model, texts, write_rows

RNG = np.random.default_rng(4)
TAGS = ["B-PER", "I-PER", "O", "B-LOC"]
ROWS: dict[str, list[dict[str, Any]]] = {
    "texts": texts(30, 1),
    "pairs": [{"qid": n // 4, **row} for n, row in enumerate(pairs(20, 2))],
    "questions": questions(6, 3),
    "tagged": [
        {"tokens": list(RNG.choice(["good", "bads", "very", "x"], n)), "tags": ["O"] * n}
        for n in (1, 5, 40, 12, 3)
    ],
    "choices": [
        {"text_a": "so ?", "choices": ["good", "bad x", "y"][: 2 + n % 2], "label": n % 2}
        for n in range(8)
    ],
}
for row in ROWS["tagged"]:
    row["tags"] = [
        TAGS[int(k) % 3 if i else 0] for i, k in enumerate(RNG.integers(0, 9, len(row["tags"])))
    ]
    row["tags"][-1] = "B-LOC"
KINDS = {
    **{name: dict(TASKS[name]) for name in ("mood", "topic", "pair", "answer")},
    "size": {"kind": "regression", "source": "texts", "label_column": "label_size", "scale": True},
    "best": {"kind": "ranking", "source": "pairs"},
    "choice": {"kind": "multiple_choice", "source": "choices"},
    "names": {
        "kind": "tagging",
        "source": "tagged",
        "crf": True,
        "constrain": True,
        "scheme": "BIO",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a task of every kind, task embeddings, and its ONNX file."""
    folder = tmp_path_factory.mktemp("onnx")
    sources = {
        name: {
            "table": str(write_rows(folder / f"{name}.jsonl", rows)),
            "tokenizer": str(folder / "run" / "vocabulary"),
            "read": {
                "columns": {"label_topic": "label_topic", "label_size": "label_size"}
                if name == "texts"
                else {}
            },
        }
        for name, rows in ROWS.items()
    }
    backbone = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 64}
    backbone |= {"task_types": 4}
    save_model(folder / "run", tuple(KINDS), tasks=KINDS, sources=sources, backbone=backbone)
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Any]:
    out = folder / "out"
    arguments = [folder / "run", out, "--to", "onnx", "--json", "--score", folder / "texts.jsonl"]
    arguments += ["--head", ",".join(KINDS)]
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *values, **_: lines.append(str(values[0])))
        assert COMMAND.run(COMMAND.parser().parse_args(list(map(str, arguments)))) == 0
    return json.loads(lines[-1])


@pytest.mark.parametrize("name", ROWS)
def test_predictions_are_the_same(
    folder: Path, said: dict[str, Any], name: str, tmp_path: Path
) -> None:
    tasks = [task for task, values in KINDS.items() if values["source"] == name]
    predictor = TrainedModel.open(folder / "run").predictor(tasks)
    about = read_description(folder / "out")
    graph = OnnxModel(folder / "out" / "onnx" / "model.onnx", about)
    meanings = outputs_of(predictor.recipe, predictor.model)
    other = replace(predictor, model=OnnxTasks(predictor.model, graph, meanings))
    files = [str(folder / f"{name}.jsonl")]
    found = []
    for each in (predictor, other):
        job = PredictionJob(inputs=files, output=tmp_path / str(len(found)))
        assert predict_files(each, job) is not None
        found.append({task: read(job.output / f"{task}.predictions.json") for task in tasks})
    for task in tasks:
        assert len(found[0][task]) == len(ROWS[name])
        for one, two in zip(found[0][task], found[1][task], strict=True):
            if KINDS[task]["kind"] == "ranking":
                one, two = relative(one), relative(two)
            assert_alike(one, two, task)


def relative(prediction: dict[str, Any]) -> dict[str, Any]:
    """The graph has one score of relevance: the logits are known up to a constant."""
    first, second = prediction["logits"]
    return {**prediction, "logits": [0.0, second - first]}


def read(file: Path) -> list[Any]:
    text = file.read_text()
    if text.startswith("{\n"):  # {id: answer}
        return [{key: value} for key, value in json.loads(text).items()]
    return [json.loads(line) for line in text.splitlines()]


def assert_alike(one: Any, two: Any, where: str) -> None:
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_alike(one[key], two[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_alike(a, b, where)
    elif isinstance(one, float):
        assert one == pytest.approx(two, abs=2e-5), where
    else:
        assert one == two, where


def test_the_command_scores_the_files(said: dict[str, Any]) -> None:
    assert said["scores"].keys() == {"mood", "topic", "size"}, "tasks whose labels are in the file"
    for metrics in said["scores"].values():
        for values in metrics.values():
            assert values.keys() == {"source", "fp32"}
            assert values["fp32"] == pytest.approx(values["source"], abs=1e-4)
    assert said["to"] == "onnx" and said["warnings"] == []
    assert said["graph"]["heads"]["size"]["problem_type"] == "regression"


def test_a_crf_decodes_as_the_task_allows(folder: Path) -> None:
    found = run_of(open_model(folder / "run")).allowed
    head = TrainedModel.open(folder / "run").predictor().model.heads["names"]
    assert isinstance(head, CRFHead) and head.crf.allowed is not None
    assert list(found) == ["names"] and torch.equal(found["names"], head.crf.allowed)
    assert not found["names"].all()
    without_tasks = replace(open_model(folder / "run"), recipe={})
    assert run_of(without_tasks).allowed == {}
    with pytest.raises(UserError, match="^--score needs a run: .* does not name the tasks"):
        run_of(without_tasks, ["x"])


TO = ("--to", "onnx")
WRONG = {
    "no run": (["{}/out", "{}/new", *TO, "--score", "x"], "has an ONNX program"),
    "no labels": (
        ["{}/run", "{}/new", "--to", "onnx", "--score", "{}/bare.jsonl"],
        "no labels to score",
    ),
    "another format": (["{}/run", "{}/new", "--opset", "18"], "--opset: --to palm_ds has none"),
    "two heads": (["{}/run", "{}/new", "--head", "a,b"], "--head: palm_ds takes one head"),
    "a family": (
        ["{}/run", "{}/new", "--to", "onnx", "--family", "bert"],
        "--family: does not apply",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_end_in_a_line(folder: Path, said: object, case: str, capsys) -> None:
    arguments, message = WRONG[case]
    write_rows(folder / "bare.jsonl", [{"text_a": "good"}])
    with pytest.raises(SystemExit) as ended:
        COMMAND.main([each.format(folder) for each in arguments])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert not (folder / "new").exists()
