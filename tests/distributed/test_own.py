"""Custom optimizers on the engine: one curve across restarts, or one clear error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.distributed

LION, SGD = "tests.helpers.own_optimizer.Lion", "torch.optim.SGD"
FIRST = {"lion 2": (LION, 2), "sgd 1": (SGD, 1), "lion 3": (LION, 3)}
MOVED = {"a": (LION, (2, 0)), "b": (SGD, (0, 2)), "c": (SGD, (1, 0)), "d": (LION, (3, 1))}
SOME_FIRST, SOME_MOVED = ("sgd 1", "lion 3"), ("a",)


def test_custom_optimizers(run_distributed, tmp_path, every) -> None:
    first = FIRST if every else {name: FIRST[name] for name in SOME_FIRST}
    moved = MOVED if every else {name: MOVED[name] for name in SOME_MOVED}

    def run(*each: Any, **options: Any) -> Any:
        runs = sorted(each, key=lambda run: run[2])  # ZeRO 3 last: it changes its process
        values = {"folder": tmp_path, "runs": runs}
        return run_distributed("own.curves", values, **{"launcher": "fork", **options}).result

    whole = [(name, *how, 0, 8) for name, how in first.items()]
    halves = [(name, kind, stages[0], 0, 4) for name, (kind, stages) in moved.items()]
    two = run(*whole, *halves)
    hand = run_distributed("own.by_hand", launcher="python").result
    for curve in hand.values():
        assert curve[-1] < curve[0] - 0.02  # it learns, so that a difference would grow
    for name, (kind, _) in first.items():
        losses = [loss for loss, _ in two[name]["steps"]]
        np.testing.assert_allclose(losses, hand[kind], rtol=1e-5, err_msg=name)

    one = run(
        ("lion 0", LION, 0, 0, 8),
        *((name, kind, stages[1], 4, 8) for name, (kind, stages) in moved.items()),
        launcher="python",
    )
    found = {"lion 0": one["lion 0"]["steps"]}
    found |= {name: two[name]["steps"] + one[name]["steps"] for name in moved}
    for name, steps in found.items():
        kind = LION if name == "lion 0" else MOVED[name][0]
        losses = [loss for loss, _ in steps]
        np.testing.assert_allclose(losses, hand[kind], rtol=1e-5, err_msg=name)

    refused = run_distributed("own.refused", launcher="fork").result
    assert "the update of a value" not in refused and len(refused) == 4
    for kind, text in refused.items():
        assert text.startswith(f"optimizer.kind: {kind}: ") and "\n" not in text
    assert "ZeRO 2 cuts parameters" in refused["tests.helpers.own_optimizer.OfWhole"]


@pytest.mark.parametrize(
    ("kind", "stage", "launcher"),
    [(LION, 2, "fork"), pytest.param(SGD, 0, "python", marks=pytest.mark.exhaustive)],
)
def test_killed_and_resumed_bit_for_bit(kind, stage, launcher, run_distributed, tmp_path) -> None:
    def run(first: int, folder: str, **options: Any) -> Any:
        values = {"folder": tmp_path / folder, "kill": options.pop("kill", -1)}
        values["runs"] = [("x", kind, stage, first, 8)]
        return run_distributed("own.curves", values, launcher=launcher, **options).result

    whole = run(0, "whole")
    assert run(0, "killed", kill=5, code=-9) is None
    resumed = run(4, "killed")
    assert resumed["x"].pop("steps") == whole["x"].pop("steps")[4:]
    assert resumed["x"] == whole["x"]
