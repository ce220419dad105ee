"""Attention within blocks, in four forms.

    varlen   torch's own for packed rows: CUDA, half precision, no dropout inside
    tiles    neighbouring blocks joined up to 128 tokens, one tile after another: CPU;
             where no gradients are wanted and a row is no longer than that, sdpa
    sdpa     torch's scaled_dot_product_attention with a mask
    plain    the definition: softmax(Q K^T / sqrt(head width), within the block) V

`plan_attention` makes what a form needs to know of a batch, once a forward for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.batch import Batch
from palm_ds.model.kernels import keep_mask, keep_rate

TILE = 128  # tokens that short blocks are joined up to; the fastest of 64 to 192 on CPUs


@dataclass(frozen=True)
class Tile:
    """Neighbouring blocks that attention is computed over at once."""

    tokens: int
    bias: torch.Tensor | None  # (1, tokens, tokens): -inf between blocks; none: one block


@dataclass(frozen=True)
class AttentionPlan:
    """What a form of attention needs to know of a batch: made once a forward, for all layers."""

    form: str
    mask: torch.Tensor | None = None  # (rows, 1, length, length) bool: may i see j?
    tiles: tuple[Tile, ...] = ()
    starts: torch.Tensor | None = None  # (blocks + 1,) int32
    longest: int = 0
    compute: Callable[..., torch.Tensor] | None = None  # in place of the form's own function


def plan_attention(batch: Batch, form: str, *, compiled: bool = False) -> AttentionPlan:
    """Padding is a block too: it sees itself, so that no row of a softmax is ever empty.
    `compiled`: the layers go through torch.compile."""
    if form == "varlen":
        return AttentionPlan(form, starts=batch.starts, longest=batch.longest)
    if form == "tiles" and batch.ids.shape[1] <= TILE and not torch.is_grad_enabled():
        form = "sdpa"
    if form == "tiles":
        tiles = _tiles(batch.starts.diff().tolist())
        return AttentionPlan(form, tiles=tiles, compute=_uncompiled_tiles() if compiled else None)
    return AttentionPlan(form, mask=(batch.block[:, :, None] == batch.block[:, None, :])[:, None])


def attend(
    qkv: torch.Tensor, plan: AttentionPlan, *, num_heads: int, dropout: float = 0.0
) -> torch.Tensor:
    """Attention of every token over its block: (rows, length, 3 hidden) -> (..., hidden)."""
    return (plan.compute or _ATTENTION[plan.form])(qkv, plan, num_heads, dropout)


def _split_heads(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value, each (rows, heads, length, width / heads)."""
    rows, length, tripled = qkv.shape
    return qkv.view(rows, length, 3, heads, tripled // 3 // heads).permute(2, 0, 3, 1, 4).unbind()


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """In fp32 at least, back in the type of the scores."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(scores.dtype)


def _plain_attention(
    qkv: torch.Tensor, plan: AttentionPlan, heads: int, dropout: float
) -> torch.Tensor:
    query, key, value = _split_heads(qkv, heads)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    assert plan.mask is not None
    scores = scores.masked_fill(~plan.mask, -torch.inf)
    shares = _softmax(scores)  # (rows, heads, length, length)
    return (F.dropout(shares, dropout) @ value).transpose(1, 2).flatten(2)


def _sdpa(qkv: torch.Tensor, plan: AttentionPlan, heads: int, dropout: float) -> torch.Tensor:
    query, key, value = _split_heads(qkv, heads)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=plan.mask, dropout_p=dropout)
    return out.transpose(1, 2).flatten(2)


def _varlen(qkv: torch.Tensor, plan: AttentionPlan, heads: int, dropout: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert dropout == 0.0 and plan.starts is not None
    rows, length, tripled = qkv.shape
    query, key, value = qkv.view(rows * length, 3, heads, tripled // 3 // heads).unbind(1)
    out = varlen_attn(query, key, value, plan.starts, plan.starts, plan.longest, plan.longest)
    assert isinstance(out, torch.Tensor)
    return out.reshape(rows, length, tripled // 3)


def _tiles(sizes: list[int]) -> tuple[Tile, ...]:
    """Join neighbouring blocks while they have at most TILE tokens together."""
    groups: list[list[int]] = []
    for size in sizes:
        if groups and sum(groups[-1]) + size <= TILE:
            groups[-1].append(size)
        else:
            groups.append([size])
    return tuple(Tile(sum(group), _tile_bias(group)) for group in groups)


def _tile_bias(sizes: list[int]) -> torch.Tensor | None:
    if len(sizes) == 1:
        return None
    block = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    apart = block[:, None] != block[None, :]
    return torch.zeros(1, *apart.shape).masked_fill_(apart, -torch.inf)


@cache
def _uncompiled_tiles() -> Callable[..., torch.Tensor]:
    """Tiles differ from batch to batch. (Made when needed: it imports torch's compiler, which takes
    two seconds.)"""
    return cast("Callable[..., torch.Tensor]", torch.compiler.disable(_tiled_attention))


def _tiled_attention(
    qkv: torch.Tensor, plan: AttentionPlan, heads: int, dropout: float
) -> torch.Tensor:
    rows, length, tripled = qkv.shape
    out = _Tiled.apply(qkv.reshape(-1, tripled), plan.tiles, heads, dropout)
    return out.view(rows, length, tripled // 3)  # type: ignore[union-attr]


class _Tiled(torch.autograd.Function):
    """Attention tile by tile: a tile's scores stay in a CPU's cache, and no score is computed
    between tiles. Its backward is written out, into slices of one gradient: autograd's own would
    make a gradient of the whole for every slice taken."""

    @staticmethod
    def forward(ctx: Any, qkv, tiles, heads, dropout):
        tokens, tripled = qkv.shape
        parts = qkv.view(tokens, 3, heads, -1)  # (tokens, 3, heads, head width)
        out = parts.new_empty(tokens, heads, parts.shape[-1])
        saved, at, keep = [], 0, keep_rate(dropout)
        for tile in tiles:
            inside = slice(at, at := at + tile.tokens)
            shares, mask = _shares(parts[inside], tile, dropout)
            seen = shares if mask is None else shares * mask
            value = parts[inside, 2].transpose(0, 1)  # (heads, tile, head width)
            torch.mul(torch.bmm(seen, value).transpose(0, 1), 1 / keep, out=out[inside])
            saved += [shares] if mask is None else [shares, mask]
        ctx.save_for_backward(parts, out, *saved)
        ctx.tiles, ctx.keep = tiles, keep
        return out.view(tokens, tripled // 3)

    @staticmethod
    def backward(ctx: Any, *grads):
        parts, out, *saved = ctx.saved_tensors
        grad = grads[0].reshape(out.shape)
        # The sum over a row of shares times their gradient, from the output alone
        # (FlashAttention, Dao et al. 2022, appendix B.4). (heads, tokens, 1)
        total = (grad * out).sum(-1).t().unsqueeze(-1)
        grad = grad / ctx.keep
        grad_parts, at, pieces = torch.empty_like(parts), 0, iter(saved)
        for tile in ctx.tiles:
            inside = slice(at, at := at + tile.tokens)
            shares, mask = next(pieces), next(pieces) if ctx.keep < 1 else None
            _tile_backward(
                parts[inside], grad_parts[inside], grad[inside], total[:, inside], shares, mask
            )
        return grad_parts.view(len(parts), -1), None, None, None


def _shares(
    parts: torch.Tensor, tile: Tile, dropout: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The softmax of one tile, (heads, tile, tile), and which of it dropout keeps."""
    query, key, _ = parts.permute(1, 2, 0, 3).unbind()  # each (heads, tile, head width)
    scale = query.shape[-1] ** -0.5
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    if tile.bias is not None:
        scores.add_(tile.bias)
    shares = _softmax(scores)
    return shares, keep_mask(shares, dropout) if dropout else None


def _tile_backward(
    parts: torch.Tensor,
    grad_parts: torch.Tensor,
    grad: torch.Tensor,
    total: torch.Tensor,
    shares: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Write the gradient of one tile's query, key and value into grad_parts."""
    query, key, value = parts.permute(1, 2, 0, 3).unbind()
    to_query, to_key, to_value = grad_parts.permute(1, 2, 0, 3).unbind()
    grad = grad.transpose(0, 1)  # (heads, tile, head width)
    seen, to_scores = shares, torch.bmm(grad, value.transpose(1, 2))
    if mask is not None:
        seen, to_scores = shares * mask, to_scores.mul_(mask)
    to_value.copy_(torch.bmm(seen.transpose(1, 2), grad))
    to_scores.sub_(total).mul_(shares)
    scale = query.shape[-1] ** -0.5
    torch.mul(torch.bmm(to_scores, key), scale, out=to_query)
    torch.mul(torch.bmm(to_scores.transpose(1, 2), query), scale, out=to_key)


_ATTENTION = {
    "plain": _plain_attention,
    "sdpa": _sdpa,
    "varlen": _varlen,
    "tiles": _tiled_attention,
}
