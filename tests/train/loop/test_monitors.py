from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.runtime.device.memory import MemoryUse
from palm_ds.runtime.step.gradient_accumulation import StepResult
from palm_ds.train.loop import monitors
from palm_ds.train.loop.monitors import FIRST_STEPS, LabelWatch, RankTime, SlowRanks, StepMeter


def engine_of(world: int, *, device: str = "cpu") -> Any:
    """An engine whose processes all have the same numbers."""

    def reduce(values: Mapping[str, Any]) -> dict[str, float]:
        return {name: world * float(value) for name, value in values.items()}

    return SimpleNamespace(
        world=world,
        device=torch.device(device),
        ds_config=SimpleNamespace(precision="bf16"),
        reduce=reduce,
        processes=SimpleNamespace(gather=lambda value: [value] * world),
    )


def meter() -> StepMeter:
    made = StepMeter()
    result = StepResult(
        loss_sums={"words": torch.tensor(8.0)},
        correct={"words": torch.tensor(2)},
        counts={"words": 8},
        tokens=100,
        stop=False,
    )
    made.add(result, torch.tensor(5e12, dtype=torch.float64), waited=0.0)
    made.began -= 10
    return made


def test_on_a_cpu_there_is_no_utilization_and_no_gpu_memory() -> None:
    record = meter().read(engine_of(2))
    assert record["loss"] == {"words": 2.0}
    assert record["flops_per_second"] == pytest.approx(1e12, rel=1e-2)
    assert not {"mfu", "memory_allocated", "memory_reserved"} & record.keys()


def test_utilization_is_that_of_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "peak_flops", lambda *_: 2e12)
    used = MemoryUse(allocated=10, reserved=20)
    monkeypatch.setattr(monitors, "take_memory_use", lambda _: used)
    record = meter().read(engine_of(4, device="cuda"))
    assert record["mfu"] == pytest.approx(0.25, rel=1e-2)
    assert (record["memory_allocated"], record["memory_reserved"]) == (10, 20)


def test_an_unknown_card_has_no_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "peak_flops", lambda *_: math.nan)
    monkeypatch.setattr(monitors, "take_memory_use", lambda _: None)
    assert "mfu" not in meter().read(engine_of(1, device="cuda"))


def test_a_model_without_counted_products_has_no_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bag of words only adds: 0 FLOP/s would be wrong."""
    monkeypatch.setattr(monitors, "peak_flops", lambda *_: 2e12)
    monkeypatch.setattr(monitors, "take_memory_use", lambda _: None)
    adding = meter()
    adding.flops = torch.zeros(())
    assert not {"mfu", "flops_per_second"} & adding.read(engine_of(1, device="cuda")).keys()


def times(*seconds: float, waited: float = 0.0) -> list[RankTime]:
    """The last process has also waited for data."""
    last = len(seconds) - 1
    return [
        RankTime(host=f"h{rank}", forward=each, waited=waited if rank == last else 0.0)
        for rank, each in enumerate(seconds)
    ]


def test_a_slow_process_is_named_once_per_episode() -> None:
    slow = SlowRanks()
    lines = [slow.add(times(1.0, 1.1, 2.0, 0.9), 5.0) for _ in range(30)]
    assert [len(each) for each in lines] == [0] * 4 + [1] + [0] * 25
    assert lines[4] == [
        "rank 2 on h2 is slow: its forward passes: 2.0 times the median of all processes, which "
        "wait for it 20 % of the time"
    ]
    assert slow.add(times(1.0, 1.0, 1.0, 1.0), 5.0) == []
    assert sum(len(slow.add(times(1.0, 1.1, 2.0, 0.9), 5.0)) for _ in range(9)) == 1


def test_of_two_the_slower_one() -> None:
    slow = SlowRanks()
    (line,) = [line for _ in range(5) for line in slow.add(times(3.0, 1.0), 5.0)]
    assert line.startswith("rank 0 on h0 is slow: its forward passes: 3.0 times")


def test_waiting_for_data_is_a_cause() -> None:
    slow = SlowRanks()
    (line,) = [line for _ in range(5) for line in slow.add(times(1.0, 1.0, waited=2.0), 5.0)]
    assert line.startswith("rank 1 on h1 is slow: waiting for data: 3.0 times")


def test_what_costs_no_time_is_not_said() -> None:
    slow = SlowRanks()
    assert not any(slow.add(times(0.01, 0.05), 5.0) for _ in range(20))
    assert not any(slow.add(times(0.0, 0.0), 5.0) for _ in range(20))
    assert not any(slow.add(times(1.0), 5.0) for _ in range(20))
    for _ in range(20):
        assert not any(slow.add(times(1.0, 3.0), 5.0) for _ in range(4))
        slow.add(times(1.0, 1.0), 5.0)


TASKS = ["words", "order", "never"]


def reported(stages: list[dict[str, Any]], labeled: set[str], *, first: int = 0) -> dict:
    """{task: the number of steps done when it is reported}."""
    curriculum, found = read_stages(stages, TASKS), {}
    watch = LabelWatch(curriculum)
    for step in range(first, curriculum.steps):
        at = curriculum.at(step, seed=1)
        trained = {task for group in at.task_groups for task in TASKS if task in group}
        counts = {task: 8 * (task in labeled & trained) for task in TASKS}
        for task in watch.add(at, counts):
            assert task not in found, "reported twice"
            found[task] = step + 1
    return found


def test_after_the_first_steps_of_its_own() -> None:
    stages = [{"words": 5}, {"words + never": 200}]
    assert reported(stages, {"words"}) == {"never": 5 + FIRST_STEPS}
    assert reported(stages, {"words"}, first=50) == {"never": 50 + FIRST_STEPS}


def test_a_small_share_of_every_step_takes_longer() -> None:
    """A task group with a tenth of each step may have no example in the first ones."""
    assert reported([{"words": 900, "never": 100}], {"words"}) == {"never": 10 * FIRST_STEPS - 5}
    assert reported([{"words": 900, "order": 100}], {"words", "order"}) == {}


def test_at_the_end_of_a_short_run() -> None:
    assert reported([{"words + never": 3}], {"words"}) == {"never": 3}
    assert reported([{"words": 3, "order": 2, "mix": "step"}], {"words", "order"}) == {}


def test_the_end_says_nothing_of_tasks_from_before_a_restart() -> None:
    """One with a label in every hundredth step was said to learn nothing, after two steps."""
    stages = [{"words + order": 98}, {"words + order + never": 5}]
    assert reported(stages, {"words"}, first=97) == {"never": 103}
    assert reported(stages, {"words", "never"}, first=101) == {}
