"""State that an optimizer stores for each tensor it updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class OptimizerStateSpec:
    """The per-tensor state of an optimizer: `moments`, tensors of the same shape, and `step`, the
    number of updates."""

    moments: Mapping[str, torch.dtype]
    step: int | torch.Tensor
    """The initial count, a number or a tensor with one element."""
    from_zero: bool = True
    """Whether the moments may start as zeros."""

    def entry(self, tensor: torch.Tensor, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The optimizer's initial `state` of a tensor, all zeros; a count that is a tensor lies on
        `device`."""
        step = self.step
        count = torch.zeros_like(step, device=device) if isinstance(step, torch.Tensor) else 0
        entry: dict[str, Any] = {"step": count}
        for name, dtype in self.moments.items():
            entry[name] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
        return entry


ADAM = OptimizerStateSpec(
    moments={"exp_avg": torch.float32, "exp_avg_sq": torch.float32}, step=torch.zeros(())
)
MOMENTUM = OptimizerStateSpec(moments={"momentum_buffer": torch.float32}, step=torch.zeros(()))
