"""The output of a finished run, as far as it needs no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from palm_ds.runtime.ds_config import make_ds_config
from palm_ds.train.build import build_model
from palm_ds.train.export import export
from palm_ds.train.recipe import make_recipe
from palm_ds.train.run_folder import RunSpec
from palm_ds.train.sources import open_data
from palm_ds.weights.weights_folder import read_info
from tests.helpers.small_corpus import write_small_corpus

MASKS, APART = "knowledge_masking", "sentence_distance"


@pytest.mark.parametrize(
    ("chosen", "name", "row"),
    [("", MASKS, 1), (MASKS, MASKS, 1), (APART, APART, 0), ("phrases", "phrases", 1)],
)
def test_texts_are_read_as_export_task(tmp_path, chosen, name, row) -> None:
    """By default as the first masked-words task; a task that shares a head has its row."""
    write_small_corpus(tmp_path / "corpus", documents=8)
    values: dict[str, Any] = {
        "backbone": {"preset": "tiny", "max_positions": 32, "task_types": 4},
        "length": 32,
        "batch": "4 rows",
        "sources": {"text": {"corpus": str(tmp_path / "corpus")}},
        "held_out": 0.2,
        "tasks": {
            APART: {"source": "text"},
            MASKS: {"source": "text"},
            "phrases": {"kind": MASKS, "source": "text", "share": MASKS},
        },
        "stages": {"joint": [APART, MASKS, "phrases"], "steps": 2},
        "export_task": chosen,
    }
    recipe = make_recipe(values, "recipe.yaml")
    ds_config = make_ds_config({"zero_optimization": {"stage": 0}})
    run = RunSpec(recipe=recipe, ds_config=ds_config, folder=tmp_path / "run")
    data = open_data(recipe)
    model = build_model(recipe, ds_config, data.vocabulary, device=torch.device("cpu"))
    export(run, model, model.state_dict(), data, recipe.curriculum.steps)
    info = read_info(Path(run.folder / "weights"))
    assert (info.export_task, info.task_id) == (name, row)
    theirs = load_file(run.folder / "hf" / "model.safetensors")
    (table,) = [value for key, value in theirs.items() if "task_type_embeddings" in key]
    assert torch.equal(table[0], model.backbone.state_dict()["task.weight"][row])
