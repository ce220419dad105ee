"""Parts that train in turns equal plain torch with an optimizer for each part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.distributed

STEPS, HALF = 8, 4
ALL = [(name, stage) for name in ("gan", "ranking") for stage in (0, 1, 2)]
SOME = [("gan", 0), ("ranking", 1), ("gan", 2)]
UPDATES = {
    "gan": {"heads.judge.D.bias": 6, "heads.judge.G.bias": 2, "backbone.pooler.dense.bias": 0},
    "ranking": {"backbone.word.weight": 6, "backbone.layers.0.expand.weight": 2},
}
"""Of some parameters."""


def test_turns_equal_two_optimizers_in_plain_torch(run_distributed, tmp_path, every) -> None:
    """Two processes are killed in the last run after its checkpoint and started again; one process
    trains from the beginning, and from their checkpoints under other stages. Each run itself checks
    that what a step does not train stays the same bit for bit."""
    cases = ALL if every else SOME
    whole = [(name, stage, 0, STEPS, stage) for name, stage in cases]
    halves = [(name, stage, HALF, STEPS, stage) for name, stage in cases]
    moved = [(name, (stage + 1) % 3, HALF, STEPS, stage) for name, stage in cases]

    def run(runs: list[Any], launcher: str = "fork", code: int = 0, **values: Any) -> Any:
        given = {"folder": tmp_path, "runs": runs, **values}
        return run_distributed("turns.curves", given, launcher=launcher, code=code).result

    assert run(whole, code=-9, kill=HALF + 1) is None
    two = run(halves)["runs"]
    one = run([*moved, *whole], "python", compared=True)
    for (name, stage, first, *_), found in zip(
        [*halves, *moved, *whole], two + one["runs"], strict=True
    ):
        wanted, case = one["by hand"][name][first:], f"{name}, ZeRO {stage}, from {first}"
        np.testing.assert_allclose(found["losses"], wanted, rtol=0, atol=1e-6, err_msg=case)
    for (name, *_), found in zip([*moved, *whole], one["runs"], strict=True):
        assert UPDATES[name].items() <= found["updates"].items()
