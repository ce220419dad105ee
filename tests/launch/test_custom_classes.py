"""A pretraining task, a fine-tuning task and an encoder of the user's, in every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from tests.helpers.own_task import Counting
from tests.helpers.saved_model import write_rows
from tests.helpers.small_corpus import write_small_corpus
from tests.launch.conftest import Said

MACHINE = Path(__file__).resolve().parents[2] / "ds_configs" / "cpu.json"
PRETRAINING, FINETUNING = "tests.helpers.own_task.EvenTokens", "tests.helpers.own_task.HowMany"
ENCODER = {"kind": "tests.helpers.own_encoder.PreNorm", "options": {"scale": 0.5}}
SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 32, "token_types": 2}


@pytest.fixture
def command(enter: Callable[..., Said]) -> Callable[..., str]:
    """command("predict", argument, ...): what a command that ends well prints."""

    def command(name: str, *arguments: object) -> str:
        said = enter(name, *arguments)
        assert said.code == 0, said.err
        return said.out

    return command


def write_recipe(folder: Path, values: dict[str, Any], **more: Any) -> Path:
    file = folder / "recipe.yaml"
    rest = {"length": 32, "schedule": {"kind": "linear", "warmup": 0}, "log": {"every": 1}}
    file.write_text(yaml.safe_dump({**rest, **values, **more}))
    return file


def pretraining(folder: Path) -> Path:
    write_small_corpus(folder / "corpus")
    return write_recipe(
        folder,
        {
            "backbone": {**SIZES, **ENCODER},
            "batch": "4 rows",
            "sources": {"text": {"corpus": str(folder / "corpus")}},
            "held_out": 0.2,
            "tasks": {"even": {"kind": PRETRAINING, "source": "text"}},
            "stages": [{"even": 2}],
            "evaluate": {"examples": 4},
        },
    )


def finetuning(folder: Path, **more: Any) -> Path:
    rows = write_rows(
        folder / "rows.jsonl", [{**x, "label": int(x["label"])} for x in Counting(12)]
    )
    return write_recipe(
        folder,
        {
            "batch": "4 examples",
            "sources": {"texts": {"table": str(rows), "validation": str(rows)}},
            "tasks": {"many": {"kind": FINETUNING, "source": "texts", "unit": 2.0}},
            "stages": [{"many": "1 epochs"}],
            "evaluate": {"best": "many.minus_error"},
        },
        **more,
    )


def test_all_three_together(tmp_path: Path, command: Callable[..., str]) -> None:
    ds_config = ("--deepspeed_config", MACHINE)
    before, run, out = tmp_path / "before", tmp_path / "run", tmp_path / "out"
    command("pretrain", pretraining(tmp_path), *ds_config, "--run_dir", before)
    assert "heads.even.out.weight" in load_file(before / "weights" / "weights.safetensors")

    recipe = finetuning(tmp_path, init_from=str(before / "weights"))
    shown = command("finetune", recipe, *ds_config, "--run_dir", run)
    assert "minus_error" in shown
    assert not (run / "hf").exists(), "Hugging Face has no such encoder"

    rows = tmp_path / "rows.jsonl"
    command("predict", run, "--input", rows, "--output", out, "--tsv")
    lines = [json.loads(x) for x in (out / "many.predictions.json").read_text().splitlines()]
    assert len(lines) == 12 and set(lines[0]) == {"index", "value"}
    cells = [x.split("\t")[1] for x in (out / "many.tsv").read_text().splitlines()[1:]]
    assert cells == [str(line["value"]) for line in lines]
    scores = json.loads((out / "scores.json").read_text())["many"]

    scored = ("--gold", rows, "--predictions", out / "many.predictions.json", "--kind", FINETUNING)
    command("evaluate", *scored, "--task", "unit=2", "--json", tmp_path / "scores.json")
    assert json.loads((tmp_path / "scores.json").read_text()) == pytest.approx(scores)
    command("evaluate", *scored, "--json", tmp_path / "scores.json")  # the unit that was noted
    assert json.loads((tmp_path / "scores.json").read_text()) == pytest.approx(scores)


def test_a_task_says_which_head_of_transformers_it_has(
    tmp_path: Path, command: Callable[..., str]
) -> None:
    write_small_corpus(tmp_path / "corpus")
    recipe = finetuning(tmp_path, backbone=SIZES)
    values = yaml.safe_load(recipe.read_text())
    values["sources"]["texts"]["tokenizer"] = str(tmp_path / "corpus" / "tokenizer")
    recipe.write_text(yaml.safe_dump(values))
    command("finetune", recipe, "--deepspeed_config", MACHINE, "--run_dir", tmp_path / "run")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/hf")
    head = load_file(tmp_path / "run" / "weights" / "weights.safetensors")["heads.many.out.weight"]
    torch.testing.assert_close(theirs.classifier.weight.detach(), head)
