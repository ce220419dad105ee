"""The counters and the fp16 loss scale that DeepSpeed's engine keeps from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def count_skipped(engine: Any) -> int | torch.Tensor:
    """Steps that changed nothing; a tensor where only the device knows."""
    return engine.skipped_steps + getattr(engine.optimizer, "skipped", 0)


def read_counters(engine: Any, *, fp16: bool) -> dict[str, Any]:
    """{name: value} of a DeepSpeed engine, as JSON."""
    counters = {name: getattr(engine, name) for name in _COUNTERS}
    counters["skipped_steps"] = int(count_skipped(engine))
    if fp16:
        scaler = engine.optimizer.loss_scaler
        counters["scaler"] = {name: getattr(scaler, name) for name in _SCALER}
    return counters


def restore_counters(engine: Any, counters: Mapping[str, Any], *, fp16: bool) -> None:
    """Set what `read_counters` returned, perhaps in a run of another precision."""
    for name in _COUNTERS:
        setattr(engine, name, counters[name])
    if hasattr(engine.optimizer, "skipped"):
        engine.optimizer.skipped = 0
    engine.micro_steps = counters["global_steps"] * engine.gradient_accumulation_steps()
    if fp16 and "scaler" in counters:
        for name, value in counters["scaler"].items():
            setattr(engine.optimizer.loss_scaler, name, value)
