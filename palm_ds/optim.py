"""The optimizer: which parameters decay, and AdamW or LAMB over them.

Learning rates come step by step from the schedule, so none is kept in the groups for long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from palm_ds.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights follow their gradients."""

    kind: Literal["adamw", "lamb"] = "adamw"
    """`adamw`, or `lamb` for very large batches (ZeRO 0 only)."""
    lr: float = 1e-4
    """Peak learning rate; the schedule scales it."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running mean of gradients and of their squares."""
    eps: float = 1e-6
    """Added to the root of the mean square."""
    weight_decay: float = 0.01
    """Decoupled decay of the backbone's matrices; biases, LayerNorm and heads have none."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise UserError(f"optimizer.lr: must be above 0, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas: each must be in [0, 1), got {list(self.betas)}")
        for name in ("eps", "weight_decay", "clip"):
            if getattr(self, name) < 0:
                raise UserError(
                    f"optimizer.{name}: must not be negative, got {getattr(self, name)}"
                )


def parameter_groups(
    model: nn.Module, weight_decay: float, steps: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Two groups: what decays (matrices and embeddings of the backbone) and what does not
    (biases, LayerNorm, heads).

    A parameter shared by backbone and head appears once and counts as the backbone's. Heads do not
    decay so that one whose task has not begun stays as it is, bit for bit.

    `steps`: how many updates each parameter has had (0 where not given). Parameters of different
    age get groups of their own, since ZeRO keeps one count of steps for a group.
    """
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decays = parameter.ndim >= 2 and not name.startswith("heads.")
        age = (steps or {}).get(name, 0)
        groups.setdefault((-age, not decays), []).append(parameter)
    return [
        {"params": groups[key], "weight_decay": 0.0 if key[1] else weight_decay}
        for key in sorted(groups)
    ]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    zero_stage: int,
    checked: bool,
    steps: Mapping[str, int] | None = None,
) -> torch.optim.Optimizer:
    """`checked`: the optimizer itself clips and skips steps with non-finite gradients. That is for
    ZeRO 0 in fp32, where DeepSpeed does neither well (everywhere else it does both)."""
    groups = parameter_groups(model, config.weight_decay, steps)
    settings: dict[str, Any] = dict(lr=config.lr, betas=config.betas, eps=config.eps)
    if config.kind == "lamb":
        if zero_stage > 0:
            raise UserError(
                f"optimizer.kind: lamb scales each matrix by its own norm, which ZeRO {zero_stage} "
                "cuts into flat pieces; use zero_optimization.stage 0, or adamw"
            )
        return CheckedLamb(groups, clip=config.clip, **settings)
    if checked:
        return CheckedAdamW(groups, clip=config.clip, fused=True, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


class _Checked(torch.optim.Optimizer):
    """Measures the global gradient norm before each step, clips to `clip`, and leaves everything
    alone where the norm is not finite.

    DeepSpeed reads `overflow` and `_global_grad_norm` from its own optimizers to count skipped
    steps and to report the norm; it finds them here too. Gradients were averaged over all
    processes before, so every process decides the same.
    """

    def __init__(self, groups: list[dict[str, Any]], *, clip: float, **settings: Any):
        super().__init__(groups, **settings)
        self.clip = clip
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        parameters = [p for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        self._global_grad_norm = norm.item()
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return
        if 0 < self.clip < self._global_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        super().step()


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, algorithm 2): Adam's step of each matrix, scaled to the matrix's norm.

    Tensors of the group without decay take Adam's step as it is, as in the authors' code. Moments
    are corrected for their start at 0.
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
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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
            update.mul_(_trust(parameter, update))
        parameter.sub_(update, alpha=group["lr"])


def _trust(parameter: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """|weights| / |update|, and 1 where either is 0."""
    weights, length = parameter.norm(), update.norm()
    usable = (weights > 0) & (length > 0)
    return torch.where(usable, weights / length, torch.ones_like(weights))


class CheckedAdamW(_Checked, torch.optim.AdamW):
    """AdamW that clips and skips non-finite gradients."""


class CheckedLamb(_Checked, Lamb):
    """LAMB that clips and skips non-finite gradients."""
