"""Settings that the optimizer has in some steps instead of its own.

    tasks:
      discriminator: {..., trains: [heads.judge.*], optimizer: {lr: 4.0e-4, betas: [0.5, 0.999]}}

Moments and update counts belong to parameters. Where no two tasks train the same parameters, each
task has in effect an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat

from palm_ds.common.settings import Rate, Settings
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from palm_ds.runtime.optimizer.param_groups import set_rates
from palm_ds.runtime.optimizer.wrappers import ClipAndSkipNonFinite


@dataclass(frozen=True, kw_only=True)
class TaskOptimizerSettings(Settings):
    """The optimizer's settings in the steps of a task; those left out are the recipe's."""

    lr: PositiveFloat | None = None
    """Instead of `optimizer.lr` and that of a stage; the schedule scales it, and other rates that
    follow it (`head_lr`, `layer_decay`) keep their ratio to it."""
    betas: tuple[Rate, Rate] | None = None
    """Instead of `optimizer.betas`."""
    eps: PositiveFloat | None = None
    """Instead of `optimizer.eps`."""
    weight_decay: NonNegativeFloat | None = None
    """Instead of `optimizer.weight_decay` and that of a stage."""
    clip: NonNegativeFloat | None = None
    """Instead of `optimizer.clip`: the maximum norm of the gradients of what the step trains."""

    @property
    def of_step(self) -> dict[str, Any]:
        """The settings of `StepHyperparameters.apply` that it has."""
        values = {"betas": self.betas, "eps": self.eps, "clip": self.clip}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class StepHyperparameters:
    """Sets what the update of each step depends on."""

    optimizer: torch.optim.Optimizer
    """The one that computes the update."""
    zero: Any
    """DeepSpeed's, which clips, unless `optimizer` does."""
    usual: OptimizerConfig

    def apply(self, lr: float, decay_scale: float, own: Mapping[str, Any]) -> None:
        """`own`: `betas`, `eps` and `clip` of the step, where they are not the usual ones."""
        groups, usual = self.optimizer.param_groups, self.usual
        set_rates(groups, lr, usual.weight_decay * decay_scale)
        if usual.takes_betas:
            for group in groups:
                group["betas"] = own.get("betas", usual.betas)
                group["eps"] = own.get("eps", usual.eps)
        clip = own.get("clip", usual.clip)
        if isinstance(self.optimizer, ClipAndSkipNonFinite):
            self.optimizer.clip = clip
        else:
            self.zero.clip_grad = clip
