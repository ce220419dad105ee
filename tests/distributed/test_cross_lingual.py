"""ERNIE-M's tasks with one head: one curve whatever the processes, ZeRO stage and restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_commands import DROPOUT, MASKS, losses, records, write_recipe
from tests.distributed.test_phases import train
from tests.helpers.pair_corpus import write_translations

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TLM, CAMLM = "translation_language_model", "cross_attention_masked_lm"
BTMLM = "back_translation_masked_lm"
ROBERTA = {"token_types": 1, "task_types": 0, "position_offset": 1, "layer_norm_eps": 1e-5}
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 66, **DROPOUT}
LAYOUTS = [
    pytest.param((), id="alone"),
    pytest.param(((3, 2, 2), (4, 1, 1)), id="after kills", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("killed", LAYOUTS)
def test_one_curve_for_any_layout(tmp_path: Path, killed: tuple[tuple[int, int, int], ...]) -> None:
    """Two processes under ZeRO 3 against one without, dropout included; the second stage has
    steps whose micro-batches have no text of one language."""
    pairs = write_translations(tmp_path / "pairs")
    recipe = write_recipe(
        tmp_path,
        pairs.path,
        backbone={**SIZES, **ROBERTA},
        tasks={
            MASKS: {"source": "text", "units": ["word"]},
            TLM: {"source": "text", "share": MASKS},
            CAMLM: {"source": "text", "share": MASKS},
            BTMLM: {"source": "text", "share": MASKS, "temperature": 1.0, "pseudo_rate": 0.5},
        },
        stages=[{MASKS: 1, TLM: 1, CAMLM: 2}, {CAMLM: 2, BTMLM: 1, "mix": "step"}],
        save={"every": 2 if killed else 100},
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(recipe, whole, world=1, stage=0)
    for step, world, stage in killed:
        train(recipe, broken, world=world, stage=stage, killed=step)
    train(recipe, broken, world=2, stage=3)
    mine, its = losses(whole), losses(broken)
    assert len(mine) == len(its) == 7 and {task for step in mine for task in step} >= {TLM, BTMLM}
    for one, other in zip(mine, its, strict=True):
        assert one.keys() == other.keys()
        assert [*one.values()] == pytest.approx([*other.values()], abs=1e-6)
    scores = [records(run, "evaluation")[-1]["scores"] for run in (whole, broken)]
    assert scores[0].keys() == scores[1].keys() == {MASKS, TLM, CAMLM, BTMLM}
    for task, score in scores[0].items():
        assert score["loss"] == pytest.approx(scores[1][task]["loss"], abs=1e-6)
    assert json.loads((whole / "hf/config.json").read_text())["model_type"] == "roberta"
    one, other = (load_file(run / "hf/model.safetensors") for run in (whole, broken))
    assert one.keys() == other.keys()
    for name, values in one.items():
        torch.testing.assert_close(values, other[name], atol=2e-5, rtol=0)
