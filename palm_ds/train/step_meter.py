"""Losses, accuracy and speed of the steps since the last logged one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from palm_ds.engine import Engine
from palm_ds.runtime.step_result import StepResult


@dataclass
class StepMeter:
    """Sums over the steps since the last logged one. They stay on the device until read."""

    loss: dict[str, Any] = field(default_factory=dict)
    correct: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    flops: float = 0.0
    waited: float = 0.0
    steps: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, result: StepResult, flops: float, waited: float) -> None:
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
        sums = engine.reduce(
            {f"loss {t}": self.loss[t] for t in seen}
            | {f"right {t}": self.correct[t] for t in seen}
            | {"flops": self.flops, "waited": self.waited}
        )
        seconds = max(time.monotonic() - self.began, 1e-9)
        return {
            "loss": {t: sums[f"loss {t}"] / self.counts[t] for t in seen},
            "accuracy": {t: sums[f"right {t}"] / self.counts[t] for t in seen},
            "tokens_per_second": self.tokens / seconds,
            "flops_per_second": sums["flops"] / seconds,
            "data_wait": sums["waited"] / engine.world / seconds,
        }
