"""Causal and masked texts in one run: one curve whatever the processes, and one head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_commands import DROPOUT, MASKS, losses, records, write_recipe
from tests.distributed.test_phases import train
from tests.helpers.small_corpus import write_small_corpus

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CLM = "causal_language_model"


def test_one_curve_for_any_number_of_processes(tmp_path: Path) -> None:
    """First causal, then both at once, within windows of attention; the texts of a step are the
    same wherever they are read."""
    write_small_corpus(tmp_path / "corpus")
    recipe = write_recipe(
        tmp_path,
        tmp_path / "corpus",
        backbone={
            **{"kind": "modernbert", "hidden_size": 32, "num_layers": 2, "num_heads": 2},
            **{"max_positions": 64, "options": {"window": 5, "global_every": 2}, **DROPOUT},
        },
        tasks={
            MASKS: {"source": "text", "shifted": True, "spans": {"lengths": "uniform"}},
            CLM: {"source": "text", "share": MASKS},
        },
        stages=[{CLM: 3}, {MASKS: 6, CLM: 2}],
        log={"every": 1},
        save={"every": 20},
    )
    one, two = tmp_path / "one", tmp_path / "two"
    train(recipe, one, world=1, stage=0)
    train(recipe, two, world=2, stage=3)
    mine, its = losses(one), losses(two)
    assert [{*each} for each in mine] == [{CLM}] * 3 + [{CLM, MASKS}] * 8
    for ours, theirs in zip(mine, its, strict=True):
        assert [*ours.values()] == pytest.approx([*theirs.values()], abs=1e-6)
    scores = [records(run, "evaluation")[-1]["scores"] for run in (one, two)]
    for task in (CLM, MASKS):
        assert scores[0][task]["loss"] == pytest.approx(scores[1][task]["loss"], abs=1e-6)
    assert json.loads((two / "hf/config.json").read_text())["palm_ds_reading"] == "shifted"
    weights = [load_file(run / "weights/weights.safetensors") for run in (one, two)]
    assert not any(CLM in name for name in weights[0])
    for name, values in weights[0].items():
        torch.testing.assert_close(values, weights[1][name], atol=2e-5, rtol=0)
