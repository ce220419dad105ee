"""Encoders of every family, fine-tuned for multiple choice and a class: one curve under each ZeRO
stage, and the scores that transformers computes from the folder."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import palm_ds as palm
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.train import train
from tests.helpers.sampling import only
from tests.helpers.small_encoders import SIZES, TRANSFORMERS
from tests.helpers.small_tables import WORDS, write_tables

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's
USUAL = ("albert", "deberta_v2")
"""Layers that share weights, and a table of distances for all layers."""
KINDS = [
    pytest.param(kind, marks=() if kind in USUAL else pytest.mark.exhaustive)
    for kind in TRANSFORMERS
]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, and two vocabularies: padding is the first token, or as MPNet has it the second."""
    folder = write_tables(tmp_path_factory.mktemp("tables"))
    first, second, *rest = (folder / "vocab.txt").read_text().splitlines()
    (folder / "mpnet").mkdir()
    (folder / "mpnet/vocab.txt").write_text("\n".join([second, first, *rest]) + "\n")
    (folder / "choices.jsonl").write_text("\n".join(map(json.dumps, questions(24))))
    return folder


def questions(many: int) -> list[dict[str, Any]]:
    """Two or three choices, of which the one that has the question's word is right."""
    rng, found = random.Random(1), []
    for number in range(many):
        words = rng.sample(range(WORDS), 2 + number % 2)
        right = rng.randrange(len(words))
        choices = [f"w{word} w{rng.randrange(WORDS)}" for word in words]
        found.append({"text_a": f"w{words[right]} ?", "choices": choices, "label": right})
    return found


def finetune(tables: Path, run: Path, kind: str, stage: int, **changes: Any) -> list[float]:
    """The losses of a few steps."""
    vocabulary = tables / "mpnet" if kind == "mpnet" else tables
    source = {"tokenizer": str(vocabulary / "vocab.txt")}
    recipe = {
        "backbone": {**SIZES, **TRANSFORMERS[kind], "kind": kind, "dropout": 0.1},
        "length": 32,
        "batch": "6 examples",
        "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "constant"},
        "sources": {
            "exam": {"table": str(tables / "choices.jsonl"), **source},
            "rows": {"table": str(tables / "train.tsv"), **source},
        },
        "tasks": {
            "exam": {"kind": "multiple_choice", "source": "exam"},
            "rows": {"kind": "classification", "source": "rows"},
        },
        "stages": [{"exam": 3, "rows": 3, "mix": "step"}],
        "log": {"every": 1},
        "export_onnx": [],
        **changes,
    }
    ds_config = make_ds_config({"zero_optimization": {"stage": stage}})
    assert train(RunSpec(recipe=make_recipe(recipe), ds_config=ds_config, folder=run)) == 0
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [x for each in lines if each["kind"] == "step" for x in each["loss"].values()]


@pytest.mark.parametrize("stages", only([(3,)], [(3,), (1, 2)]))
@pytest.mark.parametrize("kind", KINDS)
def test_any_zero_stage_has_the_same_curve(
    tables: Path, kind: str, stages: tuple[int, ...], tmp_path: Path
) -> None:
    """With dropout."""
    whole = finetune(tables, tmp_path / "0", kind, 0)
    assert len(whole) == 6 and np.isfinite(whole).all()
    for stage in stages:
        found = finetune(tables, tmp_path / str(stage), kind, stage)
        assert found == pytest.approx(whole, abs=1e-6, rel=0), stage


@pytest.mark.parametrize("kind", ["modernbert", "deberta_v2"])
def test_multiple_choice_is_that_of_transformers(tables: Path, kind: str, tmp_path: Path) -> None:
    exam = {"exam": {"kind": "multiple_choice", "source": "exam"}}
    finetune(tables, tmp_path, kind, 1, tasks=exam, stages=[{"exam": 4}], optimizer={"lr": 5e-3})
    opened: Any = transformers.AutoModelForMultipleChoice
    its, loading = opened.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loading.values())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    asked = questions(8)
    for mine in (palm.load(tmp_path), palm.load(tmp_path / "hf")):
        for row, said in zip(asked, mine(asked), strict=True):
            texts = [row["text_a"]] * len(row["choices"])
            inputs = tokenizer(texts, row["choices"], return_tensors="pt", padding=True)
            with torch.no_grad():
                scores = its(**{name: x[None] for name, x in inputs.items()}).logits[0]
            probs = scores.softmax(-1).tolist()
            assert said["probs"] == pytest.approx(probs, abs=1e-5), said
