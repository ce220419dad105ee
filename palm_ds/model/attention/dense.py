"""Attention with a mask of (length x length) per row: the definition, and torch's SDPA."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.attention.plan import AttentionPlan, distant, softmax, split_heads
from palm_ds.model.ops.dropout import DropoutKeys, keep_rate


def plain_attention(
    qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float, window: int | None
) -> torch.Tensor:
    query, key, value = (part.transpose(1, 2) for part in split_heads(qkv, num_heads))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if plan.bias is not None:
        scores = scores + plan.bias
    weights = softmax(scores.masked_fill(~_mask(plan, window), -torch.inf))
    if dropout:
        weights = drop_weights(weights, plan.keys, dropout)
    return (weights @ value).transpose(1, 2).flatten(2)


def sdpa(
    qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float, window: int | None
) -> torch.Tensor:
    assert not dropout or plan.keys is None, "it draws its own masks"
    query, key, value = (part.transpose(1, 2) for part in split_heads(qkv, num_heads))
    mask = _mask(plan, window)
    if plan.bias is not None:
        mask = plan.bias.to(query.dtype).masked_fill(~mask, -torch.inf)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return out.transpose(1, 2).flatten(2)


def _mask(plan: AttentionPlan, window: int | None) -> torch.Tensor:
    """(rows, 1, length, length) bool: whether token i attends to token j."""
    assert plan.mask is not None
    length = plan.mask.shape[-1]
    exporting = torch.compiler.is_exporting()  # for rows of any length
    if window is None or (not exporting and window >= length - 1):
        return plan.mask
    return plan.mask & ~distant(length, window, plan.mask.device)


def drop_weights(weights: torch.Tensor, keys: DropoutKeys | None, dropout: float) -> torch.Tensor:
    """Dropout of (rows, heads, length, keys)."""
    if keys is None:
        return F.dropout(weights, dropout)
    rows, heads, length, _ = weights.shape
    tokens = keys.of_heads(heads).tokens.view(heads, rows, length).transpose(0, 1)
    mask = replace(keys, tokens=tokens).mask(weights, dropout)
    return weights * mask.mul_(1 / keep_rate(dropout))
