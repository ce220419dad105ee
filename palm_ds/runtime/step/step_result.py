"""Results of a training step, to be read later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Sums of one step. Losses and correct predictions are this process's and stay on the device;
    `Engine.reduce` adds them up over all processes."""

    loss_sums: Mapping[str, torch.Tensor]
    correct: Mapping[str, torch.Tensor]
    counts: Mapping[str, int]
    """Labels of each task, over all processes."""
    tokens: int
    """Tokens without padding, over all processes."""
    stop: bool
    """Whether any process was asked to stop."""
    checkpoint_written: bool = False
    """Whether all processes had written a checkpoint in the background, before this step."""


class LossAndCorrect(Protocol):
    """Output of a head, as far as the engine reads it."""

    @property
    def loss_sum(self) -> torch.Tensor: ...

    @property
    def correct(self) -> torch.Tensor: ...


class LossSums:
    """Adds up losses and correct predictions on the device."""

    def __init__(self) -> None:
        self.loss: dict[str, torch.Tensor] = {}
        self.correct: dict[str, torch.Tensor] = {}

    def add(self, outputs: Mapping[str, LossAndCorrect]) -> None:
        """Add those of some tasks."""
        for task in outputs:
            loss, correct = outputs[task].loss_sum.detach(), outputs[task].correct.detach()
            self.loss[task] = self.loss[task] + loss if task in self.loss else loss
            self.correct[task] = self.correct[task] + correct if task in self.correct else correct
