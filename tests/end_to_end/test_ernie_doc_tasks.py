"""Answers and ranking over long documents, read with memories: trained, evaluated, predicted and
scored by the commands."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from palm_ds.cli.main import main
from palm_ds.common.errors import UserError
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.serve.served_model import ModelOptions, open_served
from tests.helpers.small_configs import ERNIE_DOC

ANSWERS, CANDIDATES = "answers", "candidates"
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_long_tables(folder: Path, *, training: int = 40) -> dict[str, Any]:
    """Keys of a recipe for contexts of several windows: the answer is what stands behind the word
    that is asked for, and candidates that have this word are relevant."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*SPECIALS, "?", *(f"w{n}" for n in range(30))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    rng = random.Random(1)
    for name, many in (("train", training), ("dev", 15)):
        rows = [_row(rng, number) for number in range(many)]
        for task in (ANSWERS, CANDIDATES):
            lines = [json.dumps(row[task]) + "\n" for row in rows]
            (folder / f"{task}_{name}.jsonl").write_text("".join(lines))
    sources = {
        task: {
            "table": str(folder / f"{task}_train.jsonl"),
            "validation": str(folder / f"{task}_dev.jsonl"),
            "tokenizer": str(folder / "vocab.txt"),
        }
        for task in (ANSWERS, CANDIDATES)
    }
    return {
        "sources": sources,
        "tasks": {
            ANSWERS: {"kind": "reading", "source": ANSWERS, "score": "squad1", "dropout": 0.1},
            CANDIDATES: {"kind": "ranking", "source": CANDIDATES},
        },
        "stages": [{ANSWERS: 10}, {CANDIDATES: 6}],
    }


def _row(rng: random.Random, number: int) -> dict[str, dict[str, Any]]:
    """{task: a row}"""
    context = [f"w{rng.randrange(20)}" for _ in range(rng.randrange(5, 90))]
    at = rng.randrange(len(context) - 1)
    context[at], context[at + 1] = "w25", f"w{rng.randrange(20)}"
    start = len(" ".join(context[: at + 1])) + 1
    text, answer = " ".join(context), {"text": context[at + 1], "start": start}
    pair = {"text_a": "w25 ?", "text_b": text, "qid": number // 5, "label": int(number % 5 == 0)}
    return {ANSWERS: {"question": "w25 ?", "context": text, "answers": [answer]}, CANDIDATES: pair}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    recipe = {
        "backbone": ERNIE_DOC,
        "length": 32,
        "batch": "4 rows",
        "documents": {"stride": 12, "readings": 2},
        **write_long_tables(folder),
        "export_onnx": [],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "machine.json").write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    words = [str(folder / "recipe.yaml"), "--deepspeed_config", str(folder / "machine.json")]
    assert main(["finetune", *words, "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


def evaluated(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "evaluation"][-1]["scores"]


@pytest.mark.parametrize(
    ("task", "kind", "file"),
    [
        (ANSWERS, "reading", "answers.rows.json"),
        (CANDIDATES, "ranking", "candidates.predictions.json"),
    ],
)
def test_predictions_are_those_of_the_evaluation(
    run: Path, tmp_path: Path, task: str, kind: str, file: str
) -> None:
    """Whatever the rows of a batch; and `palm-ds evaluate` gives them the same scores."""
    gold = str(run.parent / f"{task}_dev.jsonl")
    made: list[list[dict[str, Any]]] = []
    wanted = evaluated(run)[task]["metrics"]
    for number, tokens in enumerate(("32", "4096")):
        out = tmp_path / str(number)
        words = ["predict", str(run), "--input", gold, "--output", str(out), "--tasks", task]
        assert main([*words, "--batch_tokens", tokens]) == 0
        scores = json.loads((out / "scores.json").read_text())[task]
        assert scores == pytest.approx(wanted, abs=1e-5)
        made.append([json.loads(line) for line in (out / file).read_text().splitlines()])
    assert len(made[0]) == 15
    for one, other in zip(*made, strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)
    said = tmp_path / "said.json"
    words = ["evaluate", "--kind", kind, "--gold", gold, "--json", str(said)]
    words += ["--predictions", str(tmp_path / "0" / file)]
    assert main(words) == 0
    again = json.loads(said.read_text())
    assert {name: again[name] for name in wanted} == pytest.approx(wanted, abs=1e-5)


def test_windows_of_a_recipe_are_not_a_tasks_own(run: Path, tmp_path: Path) -> None:
    from palm_ds.train.recipe.recipe import read_recipe

    recipe = yaml.safe_load((run.parent / "recipe.yaml").read_text())
    wrong = [
        ({ANSWERS: {"stride": 64}}, "answers.stride: 64, but windows of documents .* remove it"),
        ({ANSWERS: {"max_length": 30}}, "answers.max_length: 30, but windows of documents"),
    ]
    for changes, message in wrong:
        tasks = {name: {**x, **changes.get(name, {})} for name, x in recipe["tasks"].items()}
        (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({**recipe, "tasks": tasks}))
        with pytest.raises(UserError, match=message):
            read_recipe(tmp_path / "wrong.yaml")
    tasks = {**recipe["tasks"], "whole": {"kind": "classification", "source": ANSWERS}}
    stages = {"stages": [{f"whole + {ANSWERS}": 2}, {CANDIDATES: 2}]}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({**recipe, "tasks": tasks, **stages}))
    with pytest.raises(UserError, match=f"has its question in each; name {ANSWERS} first"):
        read_recipe(tmp_path / "wrong.yaml")


def test_it_is_not_served_and_makes_no_vectors(run: Path) -> None:
    with pytest.raises(UserError, match=r"window by window, .*\(palm-ds predict\), but"):
        open_served(run, "mine", ModelOptions(devices=[torch.device("cpu")]))
    with pytest.raises(UserError, match="embed, serve and fill-mask read packed texts"):
        TrainedModel.open(run).embedder()


@pytest.mark.exhaustive  # 30 s; the rest of this file trains a few steps
def test_answers_in_contexts_of_several_windows_are_learned(tmp_path: Path) -> None:
    keys = write_long_tables(tmp_path, training=4000)
    keys["tasks"][ANSWERS]["dropout"] = 0.0
    recipe = {
        **{kind: {ANSWERS: keys[kind][ANSWERS]} for kind in ("sources", "tasks")},
        "backbone": {**ERNIE_DOC, "hidden_size": 64, "intermediate_size": 256, "init_range": 0.05},
        "length": 32,
        "batch": "32 rows",
        "documents": {"stride": 12},
        "optimizer": {"lr": 2e-3, "clip": 1.0},
        "stages": [{ANSWERS: 240}],
        "export_onnx": [],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = ["finetune", str(tmp_path / "recipe.yaml"), "--deepspeed_config", "cpu.json"]
    assert main([*words, "--run_dir", str(tmp_path / "run")]) == 0
    assert evaluated(tmp_path / "run")[ANSWERS]["metrics"]["f1"] > 0.9
