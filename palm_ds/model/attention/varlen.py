"""Attention over `cu_seqlens` by torch's own kernels.

    varlen       FlashAttention 2, which is part of torch
    varlen_fa3   FlashAttention 3, through torch's registry of implementations: Hopper, no dropout
    varlen_fa4   FlashAttention 4, likewise: Hopper and Blackwell, no dropout

All call the operator that torch's `varlen_attn` calls: that function has no dropout, and other
arguments in each version of torch.

    efficient    memory-efficient (CUTLASS): fp32, and fp16 on cards that FlashAttention does not
                 run on; without windows

They draw their own dropout masks. The efficient kernels are wrapped in operators of our own, since
torch 2.13 cannot trace their gradient: the shape function of `_efficient_attention_backward` takes
other arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn import attention as flash

from palm_ds.common.errors import UserError
from palm_ds.model.attention.plan import AttentionPlan, split_heads
from palm_ds.model.inputs.batch import Batch

_FLASH = {"varlen": None, "varlen_fa3": "FA3", "varlen_fa4": "FA4"}


def plan_varlen(
    batch: Batch, kernel: str, compute: Callable[..., torch.Tensor], *, compiled: bool
) -> AttentionPlan:
    """The plan of all forms that take `cu_seqlens`. Nothing is computed from the number of
    sequences, so compiled layers are marked as independent of it."""
    if kernel in _FLASH:
        _activate(_FLASH[kernel])
    cu_seqlens, length = pad_sequences(batch.cu_seqlens), batch.input_ids.shape[1]
    if compiled:
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return AttentionPlan(kernel=kernel, compute=compute, cu_seqlens=cu_seqlens, max_seqlen=length)


def varlen_attention(
    qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float, window: int | None
) -> torch.Tensor:
    cu_seqlens, longest = plan.cu_seqlens, plan.max_seqlen
    query, key, value = (part.flatten(0, 1) for part in split_heads(qkv, num_heads))
    out = torch.ops.aten._flash_attention_forward(
        *(query, key, value, cu_seqlens, cu_seqlens, longest, longest, dropout),
        is_causal=False,
        return_debug_mask=False,
        scale=query.shape[-1] ** -0.5,
        window_size_left=window,
        window_size_right=window,
    )[0]  # (tokens, heads, head size)
    return out.reshape(*qkv.shape[:2], -1)


def pad_sequences(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """With empty sequences at the end, so that few batches differ in shape: a multiple of 64, and
    from 512 on of an eighth of the next power of two. It follows from the batch alone, so that a
    resumed run computes the same."""
    sequences = len(cu_seqlens) - 1
    step = max(64, (1 << (sequences - 1).bit_length()) // 8)
    missing = -sequences % step
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)])


def _activate(name: str | None) -> None:
    """Let torch's flash operator run this implementation, None: its own. A process has one."""
    if not hasattr(flash, "restore_flash_attention_impl"):
        assert name is None, "choose_kernels says so"
    elif flash.current_flash_attention_impl() == name:
        return
    elif name is None:
        flash.restore_flash_attention_impl()
    else:
        flash.activate_flash_attention_impl(name)


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
