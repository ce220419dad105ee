import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from palm_ds.runtime.device.device_figures import MemoryUse
from palm_ds.runtime.step.step_result import StepResult
from palm_ds.train.loop import step_meter
from palm_ds.train.loop.step_meter import StepMeter


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
    monkeypatch.setattr(step_meter, "peak_flops", lambda *_: 2e12)
    used = MemoryUse(allocated=10, reserved=20)
    monkeypatch.setattr(step_meter, "take_memory_use", lambda _: used)
    record = meter().read(engine_of(4, device="cuda"))
    assert record["mfu"] == pytest.approx(0.25, rel=1e-2)
    assert (record["memory_allocated"], record["memory_reserved"]) == (10, 20)


def test_an_unknown_card_has_no_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_meter, "peak_flops", lambda *_: math.nan)
    monkeypatch.setattr(step_meter, "take_memory_use", lambda _: None)
    assert "mfu" not in meter().read(engine_of(1, device="cuda"))


def test_a_model_without_counted_products_has_no_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bag of words only adds: 0 FLOP/s would be wrong."""
    monkeypatch.setattr(step_meter, "peak_flops", lambda *_: 2e12)
    monkeypatch.setattr(step_meter, "take_memory_use", lambda _: None)
    adding = meter()
    adding.flops = torch.zeros(())
    assert not {"mfu", "flops_per_second"} & adding.read(engine_of(1, device="cuda")).keys()
