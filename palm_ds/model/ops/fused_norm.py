"""LayerNorm together with the dropout and the sum at its side, each direction in one kernel.

    norm(x)                               torch's LayerNorm
    norm(x, y, drop)                      LayerNorm(x + dropout(y))      a half of an encoder layer
    norm(x, drop=drop, after=True)        dropout(LayerNorm(x))          the embeddings

The masks are those of `dropout: counter`, computed in the kernel. For GPUs where torch.compile,
which fuses the same, cannot be used. Adding a bias needs no kernel: cuBLAS adds it to its product.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from palm_ds.model.ops.dropout import DropoutKeys, drop_threshold, keep_rate, odd_bits

_PROGRAMS = 256  # of the backward pass: fixed, since others add up in another order


@dataclass(frozen=True)
class Drop:
    """Rate and keys that decide which numbers of (..., hidden) are dropped."""

    rate: float
    keys: DropoutKeys


class FusedLayerNorm(nn.LayerNorm):
    """Its parameters and names are those of torch's."""

    def forward(
        self,
        input: torch.Tensor,
        y: torch.Tensor | None = None,
        drop: Drop | None = None,
        after: bool = False,
    ) -> torch.Tensor:
        if y is None and drop is None:
            return super().forward(input)
        x, y = (each if each is None else _flat(each) for each in (input, y))
        out = _FusedNorm.apply(x, y, self.weight, self.bias, self.eps, drop, after)
        assert isinstance(out, torch.Tensor)
        return out.view(input.shape)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, y, weight, bias, eps, drop, after):
        rows, size = x.shape
        out, total = torch.empty_like(x), torch.empty_like(x)
        mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
        masks = _masks(drop, size)
        options = _options(size, drop, after)
        with torch.cuda.device_of(x):
            _kernels().forward_kernel[(rows,)](
                *(x, y, *masks, weight, bias, out, total, mean, rstd, eps), **options
            )
        ctx.save_for_backward(total, mean, rstd, *masks, weight)
        ctx.options, ctx.adds = options, y is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads):
        grad, (total, mean, rstd, hashes, columns, weight) = grads[0], ctx.saved_tensors
        rows, size = total.shape
        d_x = torch.empty_like(total)
        d_y = torch.empty_like(total) if ctx.adds else None
        programs = min(_PROGRAMS, rows)
        sums = torch.empty(2, programs, size, dtype=torch.float32, device=total.device)
        with torch.cuda.device_of(total):
            _kernels().backward_kernel[(programs,)](
                *(grad.contiguous(), total, mean, rstd, hashes, columns, weight),
                *(d_x, d_y, sums[0], sums[1], rows),
                **ctx.options,
            )
        d_weight, d_bias = sums.sum(1).to(weight.dtype)
        return d_x, d_y, d_weight, d_bias, None, None, None


def _masks(drop: Drop | None, size: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A hash of each row and of each column."""
    if drop is None:
        return None, None
    return odd_bits(drop.keys.tokens.flatten()), drop.keys.columns[:size].contiguous()


def _options(size: int, drop: Drop | None, after: bool) -> dict[str, Any]:
    block = 1 << (size - 1).bit_length()
    return {
        **{"N": size, "BLOCK": block, "num_warps": min(max(block // 256, 1), 16)},
        "DROPPED": None if drop is None else drop_threshold(drop.rate),
        "INVERSE_KEEP": 1.0 if drop is None else 1 / keep_rate(drop.rate),
        "AFTER": after,
    }


def _kernels() -> ModuleType:
    return importlib.import_module("palm_ds.model.ops.fused_norm_triton_kernels")
