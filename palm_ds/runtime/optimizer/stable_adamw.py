"""StableAdamW: AdamW whose large updates are scaled down (Wortsman et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch

from palm_ds.runtime.optimizer.scaled_adam import ScaledAdam, Values


class StableAdamW(ScaledAdam):
    """StableAdamW (Wortsman et al. 2023, algorithm 2), as ModernBERT and Ettin use it.

    A parameter whose gradient is much larger than its running mean square has a smaller learning
    rate: divided by the root mean square of gradient / root of the mean square, where that is above
    1. It replaces clipping by the global gradient norm.
    """

    uses_norms = False

    def is_scaled(self, group: dict[str, Any]) -> bool:
        return True

    def sums(self, values: Values, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Squares of the gradient, each divided by its mean square; 0."""
        correction = 1 - torch.pow(group["betas"][1], values.step.double())
        least = (group["eps"] ** 2 * correction).to(values.square.dtype)
        ratio = values.gradient / torch.maximum(values.square, least)
        total = torch.dot(ratio, values.gradient).double() * correction
        return torch.stack([total, torch.zeros_like(total)])

    def factors(self, sums: torch.Tensor, numels: torch.Tensor) -> torch.Tensor:
        rms = (sums[:, 0] / numels).sqrt()
        return 1 / rms.clamp(min=1.0)
