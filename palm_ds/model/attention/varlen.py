"""Attention over `cu_seqlens` by torch's own kernels.

    varlen       FlashAttention 2, which is part of torch
    varlen_fa3   FlashAttention 3, through torch's registry of implementations: Hopper, no dropout
    varlen_fa4   FlashAttention 4, likewise: Hopper and Blackwell, no dropout

All call the operator that torch's `varlen_attn` calls: that function has no dropout, and other
arguments in each version of torch.

They draw their own dropout masks. torch's memory-efficient kernels are none of them: given
`cu_seqlens`, they draw one mask for all sequences.
"""

from __future__ import annotations

import torch
from torch.nn import attention as flash

from palm_ds.model.attention.plan import AttentionPlan, split_heads
from palm_ds.model.inputs.batch import Batch

_FLASH = {"varlen": None, "varlen_fa3": "FA3", "varlen_fa4": "FA4"}


def plan_varlen(batch: Batch, kernel: str, *, compiled: bool) -> AttentionPlan:
    """The plan of all forms that take `cu_seqlens`. Nothing is computed from the number of
    sequences, so compiled layers are marked as independent of it."""
    _activate(_FLASH[kernel])
    cu_seqlens, length = pad_sequences(batch.cu_seqlens), batch.input_ids.shape[1]
    if compiled:
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return AttentionPlan(
        kernel=kernel, compute=varlen_attention, cu_seqlens=cu_seqlens, max_seqlen=length
    )


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
