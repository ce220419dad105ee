"""Attention over `cu_seqlens` by torch's memory-efficient kernels (CUTLASS): fp32, and fp16 on
cards that FlashAttention does not run on. They draw their own dropout masks and have no windows.

Forward and backward are operators of our own around torch's, since torch 2.13 cannot trace the
gradient of its own: the shape function of `_efficient_attention_backward` takes other arguments.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from palm_ds.common.errors import UserError
from palm_ds.model.attention.plan import AttentionPlan

_Operator = TypeVar("_Operator")
_NO_CAUSAL_MASK = 0


def efficient_attention(
    qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float, window: int | None
) -> torch.Tensor:
    if window is not None:
        raise UserError(
            'kernels: attention: "efficient" has no windows; use "varlen", "triton" or "sdpa"'
        )
    rows, length, tripled = qkv.shape
    parts = qkv.view(1, rows * length, 3, num_heads, tripled // 3 // num_heads)
    out, *_ = efficient_forward(parts, plan.cu_seqlens, plan.max_seqlen, dropout)
    return out.view(rows, length, tripled // 3)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    parts, cu_seqlens, *options = inputs
    ctx.save_for_backward(parts, cu_seqlens, *output)
    ctx.options = options


def _backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return efficient_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options), *[None] * 3


def _differentiable(operator: _Operator) -> _Operator:
    torch.library.register_autograd("palm_ds::efficient_forward", _backward, setup_context=_save)
    return operator


@_differentiable
@torch.library.custom_op("palm_ds::efficient_forward", mutates_args=())
def efficient_forward(
    parts: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of query, key and value (1, tokens, 3, heads, head size): the output (1, tokens, heads, head
    size), what its softmax was divided by, and the two numbers that its masks were drawn from."""
    query, key, value = parts.unbind(2)
    out, *saved = torch.ops.aten._efficient_attention_forward(
        *(query, key, value, None, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
        dropout_p=dropout,
        custom_mask_type=_NO_CAUSAL_MASK,
        compute_log_sumexp=True,
        scale=parts.shape[-1] ** -0.5,
    )
    return out, saved[0], saved[1], saved[2]


@efficient_forward.register_fake
def _(parts, cu_seqlens, max_seqlen, dropout):  # noqa: ANN001, ANN202
    aligned = -(-max_seqlen // 32) * 32
    sums = parts.new_empty(cu_seqlens.shape[0] - 1, parts.shape[3], aligned, dtype=torch.float32)
    # torch has the two numbers on the CPU, except while a CUDA graph is captured.
    seed, offset = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return torch.empty_like(parts.select(2, 0)), sums, seed, offset


@torch.library.custom_op("palm_ds::efficient_backward", mutates_args=())
def efficient_backward(
    grad: torch.Tensor,
    parts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    max_seqlen: int,
    dropout: float,
) -> torch.Tensor:
    """The gradient of `parts`."""
    query, key, value = parts.unbind(2)
    grads = torch.ops.aten._efficient_attention_backward(
        *(grad, query, key, value, None, out, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, sums),
        dropout_p=dropout,
        philox_seed=seed,
        philox_offset=offset,
        custom_mask_type=_NO_CAUSAL_MASK,
        bias_requires_grad=False,
        scale=parts.shape[-1] ** -0.5,
    )
    return torch.stack(grads[:3], 2)


@efficient_backward.register_fake
def _(grad, parts, *others):  # noqa: ANN001, ANN002, ANN202
    return torch.empty_like(parts)
