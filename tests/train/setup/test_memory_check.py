"""Sizes that no memory holds are refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.device.memory import host_memory
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.setup.memory_check import check_memory

RECIPE = {
    "backbone": {"preset": "tiny", "max_positions": 64},
    "length": 64,
    "batch": "8 rows",
    "sources": {"text": {"corpus": "somewhere"}},
    "tasks": {"knowledge_masking": {"source": "text"}},
    "stages": [{"knowledge_masking": 3}],
}


def check(world: int = 1, **changes: Any) -> None:
    backbone = {**RECIPE["backbone"], **changes.pop("backbone", {})}  # type: ignore[dict-item]
    recipe = make_recipe({**RECIPE, "backbone": backbone, **changes})
    check_memory(recipe, 30_000, world=world, memory=16 * 10**9)


@pytest.mark.parametrize(
    ("backbone", "shown"),
    [
        ({"hidden_size": 100_000, "num_heads": 1}, "hidden_size 100,000, num_layers 2"),
        ({"num_layers": 10**6}, "num_layers 1,000,000"),
        ({"vocab_size": 10**12}, "vocab_size 1,000,000,000,000"),
        ({"max_positions": 10**9}, "max_positions 1,000,000,000"),
    ],
)
def test_a_model_beyond_memory(backbone: dict[str, Any], shown: str) -> None:
    with pytest.raises(UserError) as error:
        check(backbone=backbone)
    message = str(error.value)
    assert message.startswith("backbone: ") and shown in message
    assert message.endswith("GB in fp32, and 16 GB can be used here")


def test_a_step_beyond_memory() -> None:
    with pytest.raises(UserError, match="batch: 640,000,000 tokens of a step for each of 1 proc"):
        check(batch="10_000_000 rows")
    check(batch="10_000_000 rows", world=4)


def test_a_usual_run_passes() -> None:
    check()
    assert 1e8 < host_memory() < 1e15
