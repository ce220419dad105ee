"""Losses over all texts of a step, and their gradients, do not depend on how the step is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.distributed

SOME_ONE, SOME_TWO = ["0:fp32:16:plain"], ["1:bf16:4", "3:fp32:2", "3:fp32:8"]
ONE = ["0:fp32:16", "0:fp32:4", "0:fp32:16:plain", "2:fp32:8", "3:fp32:2"]
TWO = ["0:fp32:8", "0:fp32:2", "1:fp32:1", "1:bf16:4", "2:fp32:4", "3:fp32:2", "3:fp32:8"]


def assert_same(found: dict[str, Any], wanted: dict[str, Any], rtol: float, name: str) -> None:
    for mine, its in zip(found["losses"], wanted["losses"], strict=True):
        assert mine.keys() == its.keys()
        for task, loss in its.items():
            np.testing.assert_allclose(mine[task], loss, rtol=rtol, atol=1e-6, err_msg=name)
    for part, values in wanted["weights"].items():
        if "bf16" in name and "sparse" in part:
            continue  # which token has the largest logit depends on the rounding
        np.testing.assert_allclose(
            found["weights"][part], values, atol=100 * rtol * 1e-3, err_msg=f"{name} {part}"
        )


def test_loss_over_a_step_is_the_same_however_it_is_split(run_distributed, every) -> None:
    alone, shared = (ONE, TWO) if every else (SOME_ONE, SOME_TWO)
    one = run_distributed(
        "contrastive.losses", {"runs": alone, "reference": True}, launcher="python"
    ).result
    two = run_distributed("contrastive.losses", {"runs": shared}, launcher="fork").result
    assert (one["world"], two["world"]) == (1, 2)
    whole = one["counter"]
    assert whole["losses"][2]["found"] == 0 and whole["losses"][0]["found"] > 0.1
    assert whole["losses"][0]["retromae"] == 0 and whole["losses"][1]["retromae"] > 3
    assert one["plain"]["losses"][0]["found"] != whole["losses"][0]["found"]
    for result, runs in ((one, alone), (two, shared)):
        for name in runs:
            wanted = one["plain" if "plain" in name else "counter"]
            assert_same(result[name], wanted, 3e-2 if "bf16" in name else 1e-4, name)
