"""Dropout, and the sum x + dropout(y) that ends each half of an encoder layer.

`bits` draws 16 random bits for each element, four elements per 64-bit draw: on a CPU, drawing is
what dropout costs. `plain` is torch's dropout. They draw different random numbers at the same rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

_STEPS = 1 << 16  # the drop rates that 16 random bits can express


def add_dropout(x: torch.Tensor, y: torch.Tensor, rate: float, kernel: str) -> torch.Tensor:
    """x + dropout(y). `rate` is 0 outside training."""
    if rate == 0.0:
        return x + y
    if kernel == "bits":
        return _AddDropout.apply(x, y, rate)
    return x + F.dropout(y, rate)


def keep_rate(rate: float) -> float:
    """The share that 16 bits keep at this drop rate: within 1e-5 of 1 - rate, and the exact value
    to rescale by."""
    return 1 - round(rate * _STEPS) / _STEPS


def keep_mask(like: torch.Tensor, rate: float) -> torch.Tensor:
    """A random mask, 1 to keep and 0 to drop, of the shape and dtype of `like`. One draw of 64 bits
    serves 4 elements; torch's own dropout draws one element at a time, in one thread."""
    count = like.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64, device=like.device)
    bits = draws.random_(-(2**63), None).view(torch.int16)[:count].view(like.shape)
    dropped = round(rate * _STEPS) - _STEPS // 2  # int16 starts at -32768
    return torch.ge(
        bits, dropped, out=torch.empty_like(like, memory_format=torch.contiguous_format)
    )


class _AddDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, y, rate):
        ctx.mask, ctx.scale = keep_mask(y, rate), 1 / keep_rate(rate)
        return torch.addcmul(x, y, ctx.mask, value=ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads):
        return grads[0], (grads[0] * ctx.mask).mul_(ctx.scale), None
