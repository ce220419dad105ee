"""Losses, accuracy and speed of the steps since the last logged one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from palm_ds.engine import Engine
from palm_ds.runtime.device.device_figures import compile_count, peak_flops, take_memory_use
from palm_ds.runtime.step.step_result import StepResult


@dataclass
class StepMeter:
    """Sums over the steps since the last logged one. They stay on the device until read."""

    loss: dict[str, Any] = field(default_factory=dict)
    correct: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    flops: torch.Tensor | float = 0.0
    waited: float = 0.0
    steps: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, result: StepResult, flops: torch.Tensor | float, waited: float) -> None:
        for task, count in result.counts.items():
            self.loss[task] = self.loss.get(task, 0.0) + result.loss_sums[task]
            self.correct[task] = self.correct.get(task, 0) + result.correct[task]
            self.counts[task] = self.counts.get(task, 0) + count
        self.tokens += result.tokens
        self.flops += flops
        self.waited += waited
        self.steps += 1

    def read(self, engine: Engine) -> dict[str, Any]:
        """The record of a logged step. Collective."""
        seen = [task for task, count in self.counts.items() if count]
        peak = peak_flops(engine.device, engine.ds_config.precision)
        sums = engine.reduce(
            {f"loss {t}": self.loss[t] for t in seen}
            | {f"right {t}": self.correct[t] for t in seen}
            | {"flops": self.flops, "waited": self.waited, "peak": peak}
        )
        seconds = max(time.monotonic() - self.began, 1e-9)
        return {
            "loss": {t: sums[f"loss {t}"] / self.counts[t] for t in seen},
            "accuracy": {t: sums[f"right {t}"] / self.counts[t] for t in seen},
            "tokens_per_second": self.tokens / seconds,
            "data_wait": sums["waited"] / engine.world / seconds,
            **_computing(sums["flops"] / seconds, sums["peak"]),
            **_memory(engine),
            "compiled": compile_count(),
        }


def _computing(flops_per_second: float, peak: float) -> dict[str, float]:
    """The rate, and model FLOPs utilization, its share of what all cards can do; without the share
    if a card is unknown, nothing if the encoder only adds, as a bag of words does."""
    if not flops_per_second:
        return {}
    mfu = {} if math.isnan(peak) else {"mfu": flops_per_second / peak}
    return {"flops_per_second": flops_per_second, **mfu}


def _memory(engine: Engine) -> dict[str, int]:
    """Bytes of the process that used most of its GPU; nothing on CPUs. Collective."""
    if (used := take_memory_use(engine.device)) is None:
        return {}
    every = engine.processes.gather(used)
    return {
        "memory_allocated": max(each.allocated for each in every),
        "memory_reserved": max(each.reserved for each in every),
    }
