"""Parameters with different learning rates, frozen always or in some steps; EMA; and adversarial
token embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.distributed

RUNS = ["0:fp32", "0:fp32:fgm", "1:bf16", "1:fp32:fgm", "2:bf16:fgm", "2:fp16", "2:fp32"]
RUNS += ["3:bf16", "3:fp32", "3:fp32:fgm"]
BACKWARDS = ["3:fp32", "3:fp32:fgm", "3:bf16", "0:fp32:fgm", "2:bf16:fgm", "2:fp16", "0:fp32"]
BACKWARDS += ["1:bf16", "2:fp32", "1:fp32:fgm"]
ALL = dict(zip(RUNS, BACKWARDS, strict=True))
"""The run whose checkpoint each one resumes, with another number of processes."""
SOME = {"0:fp32": "3:fp32", "2:fp16": "2:fp16", "3:fp32": "0:fp32"}
SOME |= {"3:fp32:fgm": "3:fp32:fgm"}


def check(result: dict[str, Any], name: str, first: int) -> None:
    """A run that started at step `first` against a hand-written loop."""
    run, attacked = result[name], ":fgm" in name
    hand = result["attacked by hand" if attacked else "by hand"]
    exact = ":fp32" in name
    tolerance: dict[str, Any] = dict(rtol=1e-5) if exact else dict(rtol=5e-3)
    np.testing.assert_allclose(run["losses"], hand["losses"][first:], err_msg=name, **tolerance)
    assert set(run["weights"]) == set(hand["weights"]) and run["back"], name
    for kind in ("weights", "averages"):
        for parameter, wanted in hand[kind].items():
            found, atol = run[kind][parameter], 2e-6 if exact else 2e-2
            message = f"{name} {kind} {parameter}"
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=atol, err_msg=message)
    for parameter, value in hand["first"].items():
        assert run["weights"][parameter] == run["averages"][parameter] == value, (name, parameter)
    before, averaged, after = run["held out"]
    assert before == after and (averaged == before) == attacked, name


def test_learning_rates_freezing_and_ema_equal_a_plain_loop(
    run_distributed, tmp_path, every
) -> None:
    sources = ALL if every else SOME
    whole = {"folder": tmp_path, "sources": {run: run for run in sources}, "whole": True}
    two = run_distributed("rates.curves", whole, launcher="fork").result
    for run in sources:
        check(two, run, 0)
        going, resumed = two[run], two[f"{run} after {run}"]
        assert resumed.pop("losses") == going["losses"][4:], run
        assert {k: going[k] for k in resumed} == resumed, run
    moved = {"folder": tmp_path, "sources": sources}
    one = run_distributed("rates.curves", moved, launcher="python").result
    for run, source in sources.items():
        check(one, f"{run} after {source}", 4)
