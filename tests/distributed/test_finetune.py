"""Nine tasks of different kinds in one run: one curve and the same weights, wherever the run is
interrupted and resumed; frozen steps, learning rates and EMA from a recipe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from palm_ds.common.errors import STOPPED

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def assert_close(
    found: list[dict[str, float]],
    wanted: list[dict[str, float]],
    rel: float = 1e-5,
    absolute: float = 1e-7,
) -> None:
    assert [set(step) for step in found] == [set(step) for step in wanted]
    for step, (mine, its) in enumerate(zip(found, wanted, strict=True)):
        for task, loss in its.items():
            assert mine[task] == pytest.approx(loss, rel=rel, abs=absolute), (step, task)


def test_joint_runs(run_distributed, tmp_path, every) -> None:
    place = {"folder": tmp_path, "every": every}
    done = run_distributed("finetune.joint_runs", place, launcher="python", timeout=500)
    result = done.result
    codes = result["codes"]
    assert not every or codes.pop("killed") == [-9, -9], result["log"][-3000:]
    assert codes.pop("lora killed") == [-9, -9], result["log"][-3000:]
    assert codes.pop("taught killed") == [-9, -9], result["log"][-3000:]
    assert codes.pop("stopped") == [STOPPED, STOPPED], result["log"][-3000:]
    assert all(code == 0 for each in codes.values() for code in each), result["log"][-3000:]
    check_one_curve_wherever_it_resumes(result)
    for name in ("resumed", "killed") if every else ("resumed",):
        interrupted_and_resumed_to_the_last_bit(result["whole"], result[name])
    rests_rates_and_averages(result["watched"])
    lora_is_the_same_in_every_layout(result)
    distillation_is_the_same_in_every_layout(result)


def check_one_curve_wherever_it_resumes(result: dict[str, Any]) -> None:
    """Two processes under ZeRO 2; those stopped after some steps and gone on as one under ZeRO 0;
    and a plain torch loop. Dropout is on."""
    whole, moved = result["whole"], result["moved"]
    assert_close(whole["losses"], result["by hand"])
    assert_close(moved["losses"], result["by hand"])
    assert "resume" in moved["events"] and "resume" not in whole["events"]
    # The step after which it was stopped had an evaluation due, which is made up for.
    steps = [step for step, _ in whole["evaluations"]]
    assert steps == [step for step, _ in moved["evaluations"]] == [6, 10, 12, 14]
    assert whole["chosen"] == moved["chosen"]
    for name, value in whole["weights"].items():
        np.testing.assert_allclose(moved["weights"][name], value, rtol=1e-4, atol=1e-3)
    assert whole["heads"] == ["better", "first", "number", "reading", "tags", "titles", "words"]


def interrupted_and_resumed_to_the_last_bit(whole: dict[str, Any], killed: dict[str, Any]) -> None:
    """The same losses, scores, confusions, best weights."""
    assert "resume" in killed["events"] and killed["losses"] == whole["losses"]
    assert killed["evaluations"] == whole["evaluations"] and killed["chosen"] == whole["chosen"]
    assert killed["weights"] == whole["weights"] and killed["bytes"] == whole["bytes"]
    (chosen,) = whole["chosen"]
    scores = {step: found["first"]["metrics"]["accuracy"] for step, found in whole["evaluations"]}
    assert scores[chosen] == max(scores.values())
    assert chosen == min(step for step, score in scores.items() if score == scores[chosen])
    last = dict(whole["evaluations"])[14]
    assert last["titles"]["metrics"]["rouge_l"] >= 0 and last["titles"]["loss"] > 0
    assert "pearson" in last["number"]["metrics"] and last["number"]["accuracy"] is None
    assert last["found"]["loss"] > 0 and last["found"]["metrics"]["ndcg@10"] > 0
    assert last["alike"]["loss"] > 0 and "spearman" in last["alike"]["metrics"]
    rows = last["first"]["tables"]["Confusion"][1:]
    assert sum(count for row in rows for count in row[1:]) == 6


def lora_is_the_same_in_every_layout(result: dict[str, Any]) -> None:
    """With dropout, under ZeRO 0, 2 and 3, with one and two processes; to the last bit if killed
    and resumed."""
    killed = result["lora killed"]
    runs = {name: each for name, each in result.items() if name.startswith("lora")}
    assert "resume" in killed["events"]
    first = runs["lora, ZeRO 0, 1"]
    for each in runs.values():
        assert_close(each["losses"], first["losses"], rel=5e-5)  # gradient norms up to 150
        assert each["weights"].keys() == result["whole"]["weights"].keys()  # merged
        for name, value in first["weights"].items():
            np.testing.assert_allclose(each["weights"][name], value, rtol=1e-4, atol=1e-3)
    if whole := runs.get("lora, ZeRO 3, 2"):
        assert killed["losses"] == whole["losses"] and killed["bytes"] == whole["bytes"]
        assert killed["weights"] == whole["weights"]
    moved = {
        name
        for name, value in result["whole"]["weights"].items()
        if abs(value - first["weights"][name]) > 1e-4
    }
    assert not any(".word." in name or "norm" in name for name in moved if "heads" not in name)
    assert "backbone.layers.0.qkv.weight" in moved and "backbone.layers.0.qkv.bias" not in moved
    assert "heads.first.out.weight" in moved and "backbone.pooler.dense.weight" in moved


TAUGHT = {"taught killed", *(f"taught, ZeRO {way}" for way in ("0, 1", "2, 2", "3, 2"))}


def distillation_is_the_same_in_every_layout(result: dict[str, Any]) -> None:
    """Under ZeRO 0, 2 and 3, with one and two processes, the teacher whole or shared out; to the
    last bit if killed and resumed. The teacher's losses are in every step that has its texts, and
    the projections in no weights/."""
    runs = {name: each for name, each in result.items() if name in TAUGHT}
    for name, each in runs.items():
        # a divergence near 0 is a difference of log-probabilities near -9 in fp32
        assert_close(each["losses"], result["taught by hand"], rel=5e-5, absolute=3e-6)
        assert not any("distillation" in weight for weight in each["weights"]), name
    killed = result["taught killed"]
    assert "resume" in killed["events"]
    if whole := runs.get("taught, ZeRO 3, 2"):
        assert killed["losses"] == whole["losses"] and killed["bytes"] == whole["bytes"]
        assert killed["weights"] == whole["weights"]
    seen = {loss for step in killed["losses"] for loss in step if loss.startswith("teacher.")}
    tasks = {"first", "second", "number", "better", "tags", "reading", "titles", "words"}
    inside = {"hidden_states", "attention", "relations", "embeddings"}
    assert seen == {f"teacher.{name}" for name in tasks | inside}


def rests_rates_and_averages(watched: dict[str, Any]) -> None:
    steps = watched["steps"]
    tasks = [step["tasks"] for step in steps]
    assert sorted(tasks) == [["first"]] * 4 + [["number"]] * 3
    for step in steps:
        moved = set(step["moved"])
        assert not any(name.startswith("backbone.word.") for name in moved)  # frozen always
        rested = not any(name.startswith("backbone.layers.0.") for name in moved)
        assert rested == (step["tasks"] == ["number"])
        assert any(name.startswith("backbone.layers.1.") for name in moved)
    assert watched["far"] < 1e-6  # what is left are the averages
    # Adam's first step moves every weight by its rate.
    first = next(step for step in steps if step["tasks"] == ["first"])
    rates = {
        "heads.first.out.weight": 3e-2,
        "backbone.layers.1.project.weight": 3e-3 * 0.5,
    }
    if first is steps[0]:
        for name, rate in rates.items():
            assert first["change"][name] == pytest.approx(rate, rel=0.1), name
