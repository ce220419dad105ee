"""User-defined optimizers, some of them invalid."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: the sign of a running mean of gradients."""

    def __init__(self, params: Any, lr: float, betas: Any = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group, self.state[weight])

    def update(self, weight: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["mean"] = torch.zeros_like(weight)
        first, second = group["betas"]
        sign = state["mean"].lerp(weight.grad, 1 - first).sign_()
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(sign, alpha=group["lr"])
        state["mean"].lerp_(weight.grad, 1 - second)


class OfWhole(Lion):
    """Its step is as long as the gradient of the whole parameter."""

    def update(self, weight: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["mean"] = torch.zeros_like(weight)
        weight.sub_(weight.grad / weight.grad.norm(), alpha=group["lr"])


class Early(Lion):
    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr)
        self.state[self.param_groups[0]["params"][0]]["mean"] = torch.zeros(1)


class Rows(Lion):
    def update(self, weight: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(weight, group, state)
        state["row"] = weight.sum(-1)


class Aside(Lion):
    """Keeps a value outside its state."""

    def update(self, weight: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.turn = getattr(self, "turn", 0) + 1
        weight.sub_(weight.grad, alpha=group["lr"] / self.turn)


class OwnRate(Lion):
    def update(self, weight: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        weight.sub_(weight.grad, alpha=0.1)


class NoDecay(Lion):
    def update(self, weight: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        weight.sub_(weight.grad, alpha=group["lr"])


class Broken(Lion):
    def update(self, weight: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise IndexError("first line\nsecond line")


class Still(Lion):
    def update(self, weight: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        pass


class Needs(Lion):
    def __init__(self, params: Any, lr: float, rho: float):
        super().__init__(params, lr)
