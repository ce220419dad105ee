"""What a run does that is started again where it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.report.metrics_file import FILE, read_metrics
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.train import train
from palm_ds.weights.formats.native import WEIGHTS
from tests.helpers.small_corpus import write_small_corpus

MASKS = "knowledge_masking"
TINY = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "text"
    write_small_corpus(folder, documents=30)
    return folder


def start(corpus: Path, folder: Path, **changes: Any) -> int:
    """Start a run of a tiny model in a folder, or start it again; returns the exit code."""
    values = {
        "backbone": {"preset": "tiny", "max_positions": 32, "dropout": 0.0, **TINY},
        "length": 32,
        "batch": "4 rows",
        "schedule": {"kind": "constant"},
        "sources": {"text": {"corpus": str(corpus)}},
        "tasks": {MASKS: {"source": "text"}},
        "stages": [{MASKS: 4}],
        "log": {"every": 5},
        "export_onnx": [],
    }
    recipe = make_recipe(values | changes)
    ds_config = make_ds_config({"zero_optimization": {"stage": 0}})
    return train(RunSpec(recipe=recipe, ds_config=ds_config, folder=folder))


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_metrics(folder / FILE).events if event["event"] in kinds]


def test_another_metric_does_not_choose_among_the_values_of_the_last_one(
    corpus: Path, tmp_path: Path
) -> None:
    """Losses, negated, were compared with accuracies: none was ever better."""
    for metric in ("accuracy", "loss"):
        evaluate = {"every": 2, "best": f"{MASKS}.{metric}", "patience": 2}
        assert start(corpus, tmp_path, held_out=0.3, evaluate=evaluate) == 0
    last = events(tmp_path, "best", "best forgotten")[-2:]
    assert [(each["event"], each["step"]) for each in last] == [("best forgotten", 4), ("best", 4)]
    (*_, chosen) = events(tmp_path, "chosen")
    assert chosen["of_step"] == 4 and f"the best by {MASKS}.loss" in chosen["message"]


def test_averages_that_are_not_good_are_not_exported_later_either(
    corpus: Path, tmp_path: Path
) -> None:
    """The same command at the end of a run replaced its good weights with them, without a line."""
    changes = {
        "batch": "16 rows",
        "optimizer": {"lr": 0.01, "ema": 0.9999},
        "stages": [{MASKS: 90}],
        "loss_spike": {"zscore": 6, "window": 20},
    }
    written = []
    for _ in range(2):
        assert start(corpus, tmp_path, **changes) == 0
        written.append(load_file(tmp_path / "weights" / WEIGHTS))
    first, second = written
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    lines = [event["message"] for event in events(tmp_path, "averages")]
    assert len(lines) == 2 and lines[0] == lines[1] and "are not good" in lines[0]
