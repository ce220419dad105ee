"""LAMB, StableAdamW and Muon on the engine: one curve under any ZeRO stage and process count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.distributed

RUNS = {
    "lamb": ("lamb", (0, 1, 2, 3), "fp32"),
    "lamb bf16": ("lamb", (1, 2, 3), "bf16"),
    "lamb fp16": ("lamb", (2,), "fp16"),
    "lamb offload": ("lamb", (2, 3), "fp32-offload"),
    "stable": ("stable_adamw", (2,), "fp32"),
    "stable offload": ("stable_adamw", (3,), "fp32-offload"),
    "muon": ("muon", (1, 2), "fp32"),
}
SOME = {
    "lamb": ("lamb", (3,), "fp32"),
    "lamb bf16": ("lamb", (2,), "bf16"),
    "lamb offload": ("lamb", (3,), "fp32-offload"),
    "stable offload": ("stable_adamw", (3,), "fp32-offload"),
    "muon": ("muon", (1,), "fp32"),
}
RESUMED = ("lamb 1", "lamb 3", "stable 2", "muon 1", "lamb bf16 2", "lamb offload 3")
MOVED = {"stable offload 3": 0, "muon 1": 0}
ALL_MOVED = MOVED | {"lamb 1": 3}
"""The stage under which one process goes on from half way."""
KINDS = ("adamw", "lamb", "stable_adamw", "muon")
HALF, STEPS = 2, 4


def test_one_curve_under_every_stage_and_process_count(run_distributed, tmp_path, every) -> None:
    runs, moved = (RUNS, ALL_MOVED) if every else (SOME, MOVED)

    def run(*each: Any, **options: Any) -> Any:
        ordered = sorted(each, key=lambda run: run[2])  # ZeRO 3 last: it changes its process
        values = {"folder": tmp_path, "runs": ordered}
        return run_distributed("optimizers.curves", values, launcher="fork", **options).result

    whole = [
        (f"{name} {stage}", kind, stage, precision, 0, STEPS)
        for name, (kind, stages, precision) in runs.items()
        for stage in stages
    ]
    again = [(f"{each[0]}@again", *each[1:4], HALF, STEPS) for each in whole if each[0] in RESUMED]
    two = run(*whole)
    resumed = run(*again)
    kind_of = {name: kind for name, kind, *_ in whole}
    one = run(
        *((f"one {kind}", kind, 0, "fp32", 0, STEPS) for kind in KINDS),
        *((x, kind_of[x], stage, "fp32", HALF, STEPS) for x, stage in moved.items()),
        processes=1,
    )

    curves = {kind: one[f"one {kind}"]["losses"] for kind in KINDS}
    for kind in KINDS[1:]:
        assert curves[kind][-1] < curves[kind][0] - 0.03  # it learns, so a difference would grow
        assert np.abs(np.array(curves[kind]) - curves["adamw"]).max() > 1e-3
    for name, kind, _, precision, *_ in whole:
        tolerance = 1e-5 if "fp32" in precision else 5e-3
        np.testing.assert_allclose(two[name]["losses"], curves[kind], rtol=tolerance, err_msg=name)
        assert two[name]["skipped"] == 0
        assert (two[name]["newton_schulz"] > 0) == (kind == "muon")
    for name in moved:
        losses = two[name]["losses"][:HALF] + one[name]["losses"]
        np.testing.assert_allclose(losses, curves[kind_of[name]], rtol=1e-5, err_msg=name)
    for name in (each[0].removesuffix("@again") for each in again):  # half way, bit for bit
        part = resumed[f"{name}@again"]
        assert part["losses"] == two[name]["losses"][HALF:], name
        assert part["weights"] == two[name]["weights"], name
        assert part["averages"] == two[name]["averages"], name
