"""One plain torch form of each operation, which defines the result, and faster forms of it.

    choose_kernels(requested, ...)   -> Kernels, and one line for each operation to print
    plan_attention(batch, kernels)   -> what an attention form needs to know of a batch, made once a forward
    attend(qkv, plan, ...)           -> attention within blocks
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from palm_ds.example import Batch


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The form of each operation. The defaults run everywhere and define the result."""

    attention: str = "plain"
    word_loss: str = "plain"
    layer_norm: str = "torch"
    compile: bool = False


def plan_attention(batch: Batch, kernels: Kernels) -> torch.Tensor:
    """(rows, 1, length, length) bool: may token i see token j? Padding sees padding, so that no
    row of the softmax is ever empty."""
    return (batch.block[:, :, None] == batch.block[:, None, :])[:, None]


def attend(qkv: torch.Tensor, plan: torch.Tensor, *, heads: int, dropout: float) -> torch.Tensor:
    """Attention of every token over its block: (rows, length, 3 width) -> (rows, length, width)."""
    rows, length, tripled = qkv.shape
    width = tripled // 3
    query, key, value = qkv.view(rows, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(-1, -2) * (width // heads) ** -0.5
    shares = scores.masked_fill(~plan, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    return (F.dropout(shares, dropout) @ value).transpose(1, 2).reshape(rows, length, width)


def layer_norm(width: int, eps: float, kernels: Kernels) -> nn.Module:
    return nn.LayerNorm(width, eps=eps)
