"""What a head of whole texts reads if the recipe does not say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.lora import LoraSettings
from palm_ds.model.multi_task_model import Model
from palm_ds.model.pooling import TextPooling
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.train import train
from palm_ds.weights import weights_folder
from tests.helpers.saved_model import FURTHER, TASKS, recipe_of, save_model, texts, write_rows
from tests.helpers.text_tables import small_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_positions": 64}
MEAN = TextPooling(normalize=True, trained=True)
STARTS: dict[str, tuple[TextPooling, dict[str, Any], str]] = {
    "trained for means": (MEAN, {}, "mean"),
    "a usual pooling": (TextPooling(), {}, "pooler"),
    "trained for [CLS]": (replace(MEAN, pooling="cls"), {}, "pooler"),
    "a pooler of means": (
        MEAN,
        {"kind": "modernbert", "options": {"text_pooling": "mean"}},
        "pooler",
    ),
    "a pooler of [CLS]": (MEAN, {"kind": "modernbert"}, "mean"),
}


def start(folder: Path, pooling: TextPooling, **more: Any) -> Path:
    """Two folders of an encoder, weights/ and hf/."""
    tokenizer = small_tokenizer()
    values = {**SIZES, "vocab_size": tokenizer.size, **more}
    config = EncoderConfig.from_dict(values, "backbone")
    torch.manual_seed(0)
    model = Model(build_encoder(config), {}, {})
    info = weights_folder.WeightsInfo(backbone=config, task_ids={})
    weights_folder.save_weights(
        model, folder / "weights", info, tokenizer=tokenizer, pooling=pooling
    )
    hf = dict(config=config, tokenizer=tokenizer, pooling=pooling)
    weights_folder.export_hf(model, folder / "hf", **hf)  # type: ignore[arg-type]
    return folder


def recipe(folder: Path, origin: Path, **tasks: dict[str, Any]) -> Recipe:
    read = {"columns": FURTHER}
    rows = {"table": str(write_rows(folder / "rows.jsonl", texts(12))), "read": read}
    values = {
        "init_from": str(origin),
        "length": 32,
        "batch": "4 examples",
        "sources": {"texts": rows},
        "tasks": tasks,
        "stages": [dict.fromkeys(tasks, 1)],
        "export_onnx": [],
    }
    return make_recipe(values, "recipe")


def pooling_of(made: Recipe, name: str) -> Any:
    return resolve(made).tasks[name]["pooling"]


@pytest.mark.parametrize("name", STARTS)
def test_classes_are_read_from_means_where_the_start_gives_them(name: str, tmp_path: Path) -> None:
    pooling, encoder, expected = STARTS[name]
    folder = start(tmp_path, pooling, **encoder)
    tasks = {x: dict(TASKS[x]) for x in ("mood", "topic", "size")}
    for place in ("weights", "hf"):
        made = recipe(tmp_path, folder / place, **tasks)
        assert pooling_of(made, "mood") == expected, place
        assert pooling_of(made, "topic") == pooling_of(made, "size") == "pooler"
    asked = recipe(tmp_path, folder / "hf", mood={**TASKS["mood"], "pooling": "pooler"})
    assert pooling_of(asked, "mood") == "pooler"
    adapted = replace(made, lora=LoraSettings())
    assert pooling_of(adapted, "mood") == "pooler"


def test_a_stored_head_is_read_as_it_was(tmp_path: Path) -> None:
    """So that a second run continues the first, from whatever folder of it."""
    origin = start(tmp_path, MEAN)
    first = RunSpec(
        recipe=recipe(tmp_path, origin / "hf", mood=dict(TASKS["mood"])),
        ds_config=make_ds_config({"zero_optimization": {"stage": 0}}),
        folder=tmp_path / "run",
    )
    assert train(first) == 0
    assert recipe_of(tmp_path / "run").tasks["mood"]["pooling"] == "mean"
    weights = tmp_path / "run/weights"
    assert pooling_of(recipe(tmp_path, weights, mood=dict(TASKS["mood"])), "mood") == "mean"
    assert pooling_of(recipe(tmp_path, weights, other=dict(TASKS["mood"])), "other") == "mean"
    settings = json.loads((tmp_path / "run/hf/config_sentence_transformers.json").read_text())
    assert settings["model_type"] == "CrossEncoder"
    named = {"classifier": dict(TASKS["mood"])}
    assert pooling_of(recipe(tmp_path, tmp_path / "run/hf", **named), "classifier") == "mean"
    plain = save_model(tmp_path / "plain", ["mood"])
    assert pooling_of(recipe(tmp_path, plain, mood=dict(TASKS["mood"])), "mood") == "pooler"
    with pytest.raises(UserError, match="trained with `pooling: pooler`, the task of that name"):
        train(
            replace(
                first,
                recipe=recipe(tmp_path, plain, mood={**TASKS["mood"], "pooling": "mean"}),
                folder=tmp_path / "mixed",
            )
        )
