"""A generator and its discriminator: one curve whatever the processes, ZeRO stage and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from palm_ds.model.heads.replaced_tokens import generator_name
from tests.distributed.test_commands import DROPOUT, MASKS, losses, records, write_recipe
from tests.distributed.test_phases import train
from tests.helpers.sampling import only
from tests.helpers.small_corpus import write_small_corpus

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RTD = "replaced_token_detection"
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 64, **DROPOUT}
WAYS: dict[str, dict[str, Any]] = {
    "shared": {"kind": "electra", "options": {"embedding_size": 16}},
    "gradient_disentangled": {"task_types": 3},
}
LAYOUTS = {  # (steps done when it is killed, processes and ZeRO stage until then)
    "shared": ((4, 2, 2),),
    "gradient_disentangled": ((4, 1, 2),),
}


@pytest.mark.parametrize("sharing", only(["gradient_disentangled"], WAYS))
def test_one_curve_for_any_layout(tmp_path: Path, sharing: str) -> None:
    """Killed and resumed with other layouts, the last of them ZeRO 3 in two processes; in the
    second stage other heads use the embeddings too."""
    write_small_corpus(tmp_path / "corpus")
    task = {"source": "text", "embedding_sharing": sharing, "generator": {"width": 0.5}}
    recipe = write_recipe(
        tmp_path,
        tmp_path / "corpus",
        backbone={**SIZES, **WAYS[sharing]},
        tasks={MASKS: {"source": "text"}, RTD: task},
        stages=[{RTD: 4}, {f"{MASKS} + {RTD}": 2, MASKS: 2}],
        log={"every": 1},
        save={"every": 3},
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(recipe, whole, world=1, stage=0)
    for killed, world, stage in LAYOUTS[sharing]:
        train(recipe, broken, world=world, stage=stage, killed=killed)
    train(recipe, broken, world=2, stage=3)
    mine, its = losses(whole), losses(broken)
    assert len(mine) == len(its) == 8
    assert mine[0].keys() == {RTD, generator_name(RTD)}
    for one, other in zip(mine, its, strict=True):
        assert one.keys() == other.keys()
        assert [*one.values()] == pytest.approx([*other.values()], abs=1e-6)
    scores = [records(run, "evaluation")[-1]["scores"][RTD]["metrics"] for run in (whole, broken)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6) and scores[0]["always_original"] < 1
    for folder, file in (("weights", "weights"), ("generator", "model"), ("hf", "model")):
        if sharing == "gradient_disentangled" and folder == "generator":
            assert not (whole / folder).exists()  # narrower than its embeddings
            continue
        one, other = (load_file(run / folder / f"{file}.safetensors") for run in (whole, broken))
        assert one.keys() == other.keys() and not any("delta" in name for name in one)
        for name, values in one.items():
            torch.testing.assert_close(values, other[name], atol=2e-5, rtol=0)
