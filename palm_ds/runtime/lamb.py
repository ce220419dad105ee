"""LAMB, for very large batches (You et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch

from palm_ds.runtime.grad_norm import total_norm


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, algorithm 2): Adam's step of each matrix, scaled to the matrix's norm.

    Tensors without weight decay take Adam's step unscaled, as in the authors' code. Moments are
    bias-corrected.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter))
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1 ** state["step"])).div_(root)
        update.add_(parameter, alpha=group["weight_decay"])
        if group["weight_decay"] > 0:
            update.mul_(_trust_ratio(parameter, update))
        parameter.sub_(update, alpha=group["lr"])


def _trust_ratio(parameter: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """|weights| / |update|; 1 if either is 0."""
    weight_norm, update_norm = total_norm([parameter]), total_norm([update])
    usable = (weight_norm > 0) & (update_norm > 0)
    return torch.where(usable, weight_norm / update_norm, torch.ones_like(weight_norm))
