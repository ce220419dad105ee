"""Muon: the momentum of each hidden matrix, orthogonalized (Jordan et al. 2024), and AdamW for the
rest.

    optimizer: {kind: muon, lr: 1.0e-3, options: {momentum: 0.95}}

Hidden matrices are those of the encoder's layers; embeddings, biases, LayerNorm and heads take
AdamW's update. Query, key and value are one matrix in the model but three here. Under ZeRO 1 and 2
a process orthogonalizes the matrices that are whole on it; those that are cut between processes are
put together in one all-reduce per group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import PositiveInt

from palm_ds.common.settings import Rate, Settings
from palm_ds.runtime.optimizer.param_groups import USUAL_NAMES
from palm_ds.runtime.optimizer.scaled_adam import adamw_, count_update
from palm_ds.runtime.optimizer.state import AllReduce, FlatLayout, NeedsLayouts, Param

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


@dataclass(frozen=True, kw_only=True)
class MuonOptions(Settings):
    """`optimizer.options` of `kind: muon`."""

    momentum: Rate = 0.95
    nesterov: bool = True
    ns_steps: PositiveInt = 5
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"


class Muon(NeedsLayouts):
    """The updates of `torch.optim.Muon` for groups with a true "hidden", AdamW's for others."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        options: MuonOptions = MuonOptions(),
        stacked: Mapping[str, tuple[int, ...]] = USUAL_NAMES.stacked,
    ):
        """`stacked`: {module of a layer: shares of the matrices stacked in its weight}."""
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=True))
        self.options, self.stacked = options, stacked
        self._cut: Mapping[torch.Tensor, frozenset[int]] = {}

    def set_layouts(
        self, layouts: Mapping[torch.Tensor, FlatLayout], all_reduce: AllReduce | None
    ) -> None:
        super().set_layouts(layouts, all_reduce)
        if all_reduce:
            self._cut = {
                tensor: _on_several(layout, tensor.device, all_reduce)
                for tensor, layout in layouts.items()
            }

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            if group["hidden"]:
                for weight in weights:
                    self._update(weight, group)
            else:
                values = [count_update(self.state[weight], weight) for weight in weights]
                adamw_(values, [value.weight for value in values], group)

    def _update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        """A matrix under ZeRO 0, else a flat tensor with pieces of many."""
        layout, direction = self.layout(weight), self._direction(weight)
        matrices = self._gathered(weight, layout, direction)
        flat = weight.detach().view(-1)
        flat.mul_(1 - group["lr"] * group["weight_decay"])
        for piece in layout.pieces:
            param = layout.params[piece.param]
            matrix = matrices.get(piece.param, direction[piece.inside]).view(param.shape)
            update = self._orthogonalized(matrix, param).reshape(-1)
            own = update[piece.start : piece.start + len(piece)]
            flat[piece.inside].sub_(own, alpha=group["lr"])

    def _direction(self, weight: torch.Tensor) -> torch.Tensor:
        """The momentum after this gradient, flat."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state["momentum_buffer"] = torch.zeros_like(weight, requires_grad=False)
        state["step"] += 1
        momentum = self.options.momentum
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return (gradient.lerp(buffer, momentum) if self.options.nesterov else buffer).view(-1)

    def _gathered(
        self, weight: torch.Tensor, layout: FlatLayout, direction: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """The matrices that are cut between processes, whole and flat, by number."""
        cut = sorted(self._cut.get(weight, ()))
        if not cut or not self._all_reduce:
            return {}
        sizes = [layout.params[number].shape.numel() for number in cut]
        buffer = direction.new_zeros(sum(sizes))
        parts = dict(zip(cut, buffer.split(sizes), strict=True))
        for piece in layout.pieces:
            if piece.param in parts:
                part = parts[piece.param][piece.start : piece.start + len(piece)]
                part.copy_(direction[piece.inside])
        return dict(zip(cut, self._all_reduce(buffer).split(sizes), strict=True))

    def _orthogonalized(self, matrix: torch.Tensor, param: Param) -> torch.Tensor:
        """The update of a parameter, relative to the learning rate."""
        scale, updates = _SCALES[self.options.adjust_lr], []
        for part in matrix.split(stacked_rows(param.name, len(matrix), self.stacked)):
            update = orthogonalize(part, self.options.ns_steps).to(matrix.dtype)
            updates.append(update.mul_(scale(*part.shape)))
        return torch.cat(updates)


def stacked_rows(name: str, rows: int, stacked: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The rows of each matrix that a parameter stacks: queries, keys and values are three. LoRA's
    below such a module are matrices of their own."""
    found = (value for path, value in stacked.items() if f".{name}".endswith(f".{path}.weight"))
    shares = next(found, (1,))
    return [rows * share // sum(shares) for share in shares]


def orthogonalize(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """A matrix with the same singular vectors and singular values near 1, in bf16: quintic
    Newton-Schulz iterations, as in torch.optim.Muon."""
    a, b, c = _COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _original(rows: int, columns: int) -> float:
    return math.sqrt(max(1, rows / columns))


def _match_rms_adamw(rows: int, columns: int) -> float:
    """AdamW's updates have a root mean square of 0.2 to 0.4 (Liu et al. 2025)."""
    return 0.2 * math.sqrt(max(rows, columns))


_SCALES = {"original": _original, "match_rms_adamw": _match_rms_adamw}


def _on_several(layout: FlatLayout, device: torch.device, all_reduce: AllReduce) -> frozenset[int]:
    """The parameters with pieces on more than one process, by number."""
    here = torch.zeros(len(layout.params), device=device)
    for piece in layout.pieces:
        here[piece.param] = 1
    counts = all_reduce(here).tolist()
    return frozenset(number for number, count in enumerate(counts) if count > 1)
