"""One recipe is one loss curve: on any number of processes, any ZeRO stage, any accumulation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.plan.memory import state_bytes

pytestmark = pytest.mark.distributed

SOME = ["0:fp32:2", "0:bf16:8", "1:bf16:8", "2:fp16:4", "3:bf16-offload:4", "3:fp32:4:dropout"]
"""Of the following: each stage; with and without dropout, offload and accumulation."""
FP32 = ["0:fp32:8", "0:fp32:2", "1:fp32:2", "2:fp32:8", "3:fp32:2"]
DROPOUT = [f"{stage}:fp32:{micro}:dropout" for stage, micro in ((0, 1), (1, 8), (2, 1), (3, 4))]
BF16 = ["0:bf16:2", "0:bf16:8", "1:bf16:2", "1:bf16:8", "2:bf16:2", "3:bf16:8"]
FP16 = [f"{stage}:fp16:4" for stage in (0, 1, 2, 3)]
OFFLOAD = [
    f"{stage}:{kind}-offload:4"
    for stage, kind in ((1, "fp16"), (2, "fp32"), (2, "bf16"), (3, "fp16"), (3, "bf16"))
]
OFFLOAD += ["2:fp32-offload:8"]
ALONE = ["0:fp32:16", "1:fp32:4", "2:fp32:4", "3:fp32:4", "0:bf16:16", "0:fp16:16"]
ALONE += ["3:fp32:4:dropout"]
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-3, "fp16": 3e-4}
"""Of the losses, relative to a plain loop in fp32 (docs/engine.md)."""


def tolerance(run: str) -> float:
    return TOLERANCE[run.split(":")[1].removesuffix("-offload")]


def in_order(runs: Iterable[str]) -> list[str]:
    """ZeRO 3 last: it changes the process it runs in."""
    return sorted(runs)


@pytest.mark.slow
def test_losses_of_two_processes_and_of_one_equal_a_plain_loop(run_distributed, every) -> None:
    runs = FP32 + BF16 + FP16 + OFFLOAD + DROPOUT if every else SOME
    options = {"runs": in_order(runs), "dropout": 0.1, "steps": 8 if every else 5}
    two = run_distributed("engine_runs.losses", options, launcher="fork").result
    assert two["world"] == 2
    plain, masked = two["plain"], two["dropout"]
    assert plain[-1] < plain[0] - 0.05  # it learns, so that a difference would grow
    assert np.abs(np.array(masked) - plain).max() > 0.01
    check_curves(two, runs)
    for run in runs:  # under bf16 and fp16 stage 0 is stage 1
        if run.startswith(("0:bf16", "0:fp16")):
            assert two[run] == two["1" + run[1:]], run

    runs = ALONE if every else ["0:fp32:16", "3:fp32:4:dropout"]
    one = run_distributed(
        "engine_runs.losses", options | {"runs": in_order(runs)}, launcher="python"
    ).result
    assert one["world"] == 1 and one["plain"] == plain and one["dropout"] == masked
    check_curves(one, runs)


def check_curves(found: dict[str, Any], runs: Iterable[str]) -> None:
    """Against plain loops, with accumulation (1, 2, 4 and 8) or without."""
    for run in runs:
        wanted = found["dropout" if "dropout" in run else "plain"]
        np.testing.assert_allclose(found[run], wanted, rtol=tolerance(run), err_msg=run)


def test_mean_of_means_is_another_loss() -> None:
    """These rows show rule 4: without the global count, accumulation would change the loss."""
    from tests.distributed.tiny import plain_loop

    steps = range(6)
    whole, parts = np.array(plain_loop(steps)), np.array(plain_loop(steps, means=4))
    assert np.abs(whole - parts).max() / whole.max() > 1e-3


def distance(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    return max(np.abs(np.array(one[name]) - np.array(other[name])).max() for name in one)


SOME_POISONED = ["0:fp32", "2:fp16", "3:fp32"]
POISONED = [*SOME_POISONED, "1:bf16", "1:fp32", "2:bf16", "2:fp32", "3:bf16"]


def test_rules(run_distributed, every) -> None:
    stages = (0, 1, 2, 3) if every else (0, 2, 3)
    options = {"stages": stages, "poisoned_runs": POISONED if every else SOME_POISONED}
    two = run_distributed("rules.steps", options, launcher="fork").result
    one = run_distributed("rules.together", launcher="python").result

    # Rule 3. Processes with different tasks in a step agree with one process that has them all,
    # because every head runs everywhere.
    for stage in stages:
        assert distance(two[f"each {stage}"], one["each 0"]) < 2e-6, stage
    assert distance(two["turns 3"], one["turns"]) < 2e-6
    # A head whose task has not started stays unchanged, bit for bit.
    for stage in stages:
        for name, value in two["fresh"].items():
            assert two[f"each {stage}"][name] == value
    # Without the rule idle heads repeat their last step under ZeRO 3, silently (and processes whose
    # tasks differ crash one another under the other stages).
    assert distance(two["turns 3, only busy heads"], one["turns"]) > 1e-4

    # A loss that is infinite on one process touches no weight anywhere.
    for name, got in two["poisoned"].items():
        assert got["same"] and got["skipped"] == 1, (name, got)
        assert got["moved"], (name, got)
        assert all(map(math.isfinite, [*got["losses"], got["norm"]])), (name, got)

    assert two["poisoned"].keys() == set(options["poisoned_runs"])
    assert two["empty"] == {"words": 0.0, "order": 0.0, "later": 0.0}
    assert two["stop"] is True and two["tokens"] == one["tokens"] > 0
    assert two["names"] == two["keys"]


RUNS = ["0:fp32", "1:bf16", "1:fp16", "1:fp32", "2:bf16", "2:fp16", "2:fp32"]
RUNS += ["3:bf16", "3:fp16", "3:fp32"]
SOME_RUNS = ["0:fp32", "1:fp16", "2:bf16", "3:fp32"]


def test_resume_is_exact(run_distributed, tmp_path, every) -> None:
    """Losses, norms, loss scales and weights after a resume, in new processes, dropout on; from a
    checkpoint that was written while training continued, equal to one that it waited for."""
    runs = RUNS if every else SOME_RUNS
    options: dict[str, Any] = {"folder": tmp_path, "runs": runs}
    whole = run_distributed("engine_runs.resume", options, launcher="fork").result
    options["resumed"] = True
    resumed = run_distributed("engine_runs.resume", options, launcher="fork").result
    for run in runs:
        assert resumed[run] == whole[run], run


@pytest.mark.slow
@pytest.mark.exhaustive  # test_commands.py kills and damages by default
def test_killed_again_and_again(run_distributed, tmp_path, every) -> None:
    """SIGKILL at chosen moments of steps and of saves in the background, a flipped
    bit, a truncated shard: whatever is computed afterwards equals the uninterrupted run, dropout
    on."""
    base = {"base": tmp_path, "every": every}
    done = run_distributed("killed.again_and_again", base, launcher="python", timeout=500)
    result = done.result
    assert result["whole"] == result["last"] == [0, 0]
    assert result["kills"] == len(result["codes"]) == (17 if every else 11), result["codes"]
    assert [r for r in result["whole record"] if r.get("trained while writing")], "no background"
    want = {r["step"]: r for r in result["whole record"] if "step" in r}
    got = [r for r in result["killed record"] if "step" in r]
    assert len(want) == 12 and {r["step"] for r in got} == set(want)
    for one in got:
        assert one == want[one["step"]]
    starts = {r["start"] for r in result["killed record"] if "start" in r}
    assert {0, 2, 4} <= starts <= {0, 2, 4, 6, 8, 10, 12}  # always from a checkpoint's step
    assert "step_00000004: not used: " in result["log"] and "(checksum mismatch)" in result["log"]
    assert "step_00000006: not used: " in result["log"] and "bytes instead of" in result["log"]
    left = [name for name in result["left"] if not name.endswith(".old.partial")]
    assert left == ["step_00000010", "step_00000012"]  # one may have died deleting an older one


def test_a_hanging_process_does_not_block_the_others_forever(run_distributed, tmp_path) -> None:
    done = {"done": tmp_path / "done"}
    result = run_distributed("engine_runs.hanging", done, launcher="fork").result
    assert set(result) == {"world", "group of DeepSpeed's making"}
    for name, (seconds, error) in result.items():
        assert 2 < seconds < 60 and error == "RuntimeError", (name, seconds, error)


def test_processes_compare_and_measure_one_another(run_distributed, tmp_path) -> None:
    place = {"folder": tmp_path}
    found = run_distributed("engine_runs.preflight", place, launcher="fork").result
    assert found["shared"] == [True, True] and found["apart"] == [True, False]
    assert found["left"] == [] and found["rate"] > 1e6
    assert len(found["seconds"]) == 2 and max(map(abs, found["clocks"])) < 60


STATES = [(0, "fp32", 1), (1, "bf16", 2), (3, "bf16", 2)]
ALL_STATES = [*STATES, (1, "fp32", 1), (1, "bf16", 1), (2, "bf16", 2)]
"""Stage, precision, accumulation."""


def test_two_processes_hold_the_states_that_a_plan_predicts(run_distributed, every) -> None:
    """Weights, gradients and optimizer of one of two processes, to 3 % (batches come on top)."""
    found = run_distributed(
        "states.all_cases", {"cases": ALL_STATES if every else STATES}, launcher="fork"
    ).result
    for name, bytes_of in found.items():
        stage, precision, _ = name.split()
        values: dict[str, Any] = {"zero_optimization": {"stage": int(stage)}}
        values |= {} if precision == "fp32" else {precision: {"enabled": True}}
        states = state_bytes(bytes_of["parameters"], make_ds_config(values), world=2)
        kept = states["weights"] + states["optimizer"]
        assert bytes_of["before"] == pytest.approx(kept + states["gradients"], rel=0.03), name
        if stage != "3":  # which keeps its gradients
            assert bytes_of["between"] == pytest.approx(kept, rel=0.03), name


def test_rollback_in_a_running_engine(run_distributed, tmp_path, every) -> None:
    """Loading a checkpoint into an engine that has continued, and repeating the same steps."""
    stages = (0, 1, 2, 3) if every else (2, 3)
    place = {"folder": tmp_path, "stages": stages}
    result = run_distributed("engine_runs.rollback", place, launcher="fork").result
    assert set(result) == {*map(str, stages)}
    for stage, (again, first) in result.items():
        assert again == first, stage


WAITS: dict[str, list[str]] = {
    "1:bf16": [],
    "2:bf16": [],
    "1:bf16:fgm": [],
    "0:fp32": ["palm_ds.runtime.optimizer.wrappers.step: _local_scalar_dense"],
    "1:fp32": [
        "deepspeed.runtime.utils.is_invalid_grad_norm: _local_scalar_dense",
        "deepspeed.runtime.utils.mask_nan_or_inf_with_val_inplace: lift_fresh",
    ],
    "2:fp16": [
        "deepspeed.runtime.utils.is_invalid_grad_norm: _local_scalar_dense",
        "deepspeed.runtime.utils.mask_nan_or_inf_with_val_inplace: lift_fresh",
        "deepspeed.runtime.zero.stage_1_and_2.has_overflow: _local_scalar_dense",
    ],
    "3:bf16": [
        "deepspeed.runtime.utils.is_invalid_grad_norm: _local_scalar_dense",
        "deepspeed.runtime.zero.stage3.get_grad_norm_direct: lift_fresh",
    ],
}
"""What waits for the device in a step, by stage and precision; docs/engine.md says why."""


def test_what_waits_for_the_device_in_a_step_and_what_it_leaves_behind(run_distributed) -> None:
    run = run_distributed("waits.all_waits", {"runs": in_order(WAITS)}, launcher="python")
    assert run.result.pop("printed") == ""
    found = {
        name: [line for line in lines if "attention.tiles" not in line]  # CPUs only
        for name, (lines, _) in run.result.items()
    }
    assert found == WAITS
    # runtime/device/torch_settings.py relies on it: two steps leave 24 objects on Python 3.11.2,
    # none elsewhere.
    assert max(cycles for _, cycles in run.result.values()) <= 50


def test_shipped_machine_files_train_and_resume(run_distributed, root, tmp_path) -> None:
    place = {"folder": tmp_path}
    result = run_distributed("engine_runs.shipped", place, launcher="fork").result
    assert result.keys() == {path.stem for path in (root / "ds_configs").glob("*.json")}
    for name, (losses, again, skipped) in result.items():
        assert again == losses, name
        # fp16 begins by finding its loss scale
        np.testing.assert_allclose(losses, result["cpu"][0], rtol=2e-2 if skipped else 3e-3)
        assert skipped == 0 or "fp16" in name


CHAINS = {
    "a": ("1:fp32", "3:fp32", "2:fp32"),
    "b": ("2:fp32", "0:fp32", "3:fp32"),
    "c": ("3:fp32", "2:fp32", "1:fp32"),
    "d": ("0:fp32", "1:fp32", "0:fp32"),
    "e": ("3:fp32", "3:fp32", "0:fp32"),
    "f": ("1:bf16", "3:bf16", "2:bf16"),
    "g": ("2:fp32-offload", "1:fp32", "3:fp32-offload"),
    "h": ("1:fp32", "3:fp32-offload", "2:fp32-offload"),
}
SOME_CHAINS = "adfg"
PART = 2
"""Steps between changes."""


def test_any_process_count_and_zero_stage_can_resume(run_distributed, tmp_path, every) -> None:
    """2, 1, 2 processes, each with another ZeRO stage: one curve, that of a plain loop."""
    chains = CHAINS if every else {name: CHAINS[name] for name in SOME_CHAINS}
    losses: dict[str, list[float]] = {name: [] for name in chains}
    for part, launcher in enumerate(("fork", "python", "fork")):
        order = sorted(chains, key=lambda name: chains[name][part])  # ZeRO 3 last
        runs = {name: chains[name][part] for name in order}
        steps: dict[str, Any] = {"folder": tmp_path, "runs": runs, "first": PART * part}
        steps["last"] = PART * (part + 1)
        done = run_distributed("engine_runs.resize", steps, launcher=launcher)
        for name in chains:
            losses[name] += done.result[name]
    options = {"runs": ["0:fp32:16"], "steps": 3 * PART}
    plain = run_distributed("engine_runs.losses", options, launcher="python")
    for name, chain in chains.items():
        tolerance = 3e-3 if "bf16" in chain[0] else 1e-5
        np.testing.assert_allclose(
            losses[name], plain.result["plain"], rtol=tolerance, err_msg=name
        )


EXTENDED = {"shrunk": ("fork", "python", (1, 3)), "grown": ("python", "fork", (2,))}
"""How it starts, how it goes on, and under which stages."""


def test_a_run_is_extended_by_a_task(run_distributed, tmp_path, every) -> None:
    """The old tasks' losses continue as in plain torch with the moments carried over, under
    every ZeRO stage and with another number of processes than before."""
    from tests.distributed.grow import plain

    kept, lost = plain(), plain(forget=True)
    assert np.abs(np.array(lost[4:]) - kept[4:]).max() > 1e-3  # so that moments show
    for folder, (first, second, some) in EXTENDED.items():
        stages = (1, 2, 3) if every else some
        place = {"folder": tmp_path / folder, "stages": stages}
        before = run_distributed("grow.first", place, launcher=first).result
        after = run_distributed("grow.second", place, launcher=second).result
        for stage in map(str, stages):
            losses, fresh, consumed, ages = after[stage]
            found = before[stage] + losses
            np.testing.assert_allclose(found, kept, rtol=1e-5, err_msg=f"{folder} {stage}")
            assert fresh == ["heads.added.out.weight", "heads.added.out.bias"]
            assert consumed == {"b": 7} and ages == [2, 6]
