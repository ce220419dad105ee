"""Attention within the sequences of packed rows, in four implementations.

    varlen   torch's variable-length attention: CUDA, half precision, no dropout
    tiles    CPU: neighbouring sequences joined up to 128 tokens, one tile at a time; replaced by
             sdpa where no gradients are needed and a row is at most 128 tokens long
    sdpa     torch's scaled_dot_product_attention with a mask
    plain    the definition: softmax(Q K^T / sqrt(head size), within the sequence) V

`plan_attention` prepares what an implementation needs of a batch, once per forward for all layers.
With dropout keys, `tiles` and `plain` drop the same weights; the others take none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.batch import Batch
from palm_ds.model.dropout import DropoutKeys, keep_mask, keep_rate, odd_bits

TILE = 128  # tokens per tile of joined sequences; the fastest of 64 to 192 on CPUs


@dataclass(frozen=True)
class Tile:
    """Neighbouring sequences that attention computes together."""

    tokens: int
    bias: torch.Tensor | None
    """(1, tokens, tokens), -inf between sequences; None means one sequence."""


@dataclass(frozen=True)
class AttentionPlan:
    """What an implementation needs of a batch, computed once per forward for all layers."""

    kernel: str
    mask: torch.Tensor | None = None
    """(rows, 1, length, length) bool: whether token i attends to token j."""
    tiles: tuple[Tile, ...] = ()
    cu_seqlens: torch.Tensor | None = None
    """(sequences + 1,) int32"""
    max_seqlen: int = 0
    compute: Callable[..., torch.Tensor] | None = None
    """Replaces the implementation's own function."""
    keys: DropoutKeys | None = None
    """What dropout masks are computed from; None: torch draws them."""

    def for_layer(self, number: int) -> AttentionPlan:
        """The same with the dropout keys of a layer."""
        return self if self.keys is None else replace(self, keys=self.keys.site(number))


def plan_attention(
    batch: Batch, kernel: str, *, compiled: bool = False, keys: DropoutKeys | None = None
) -> AttentionPlan:
    """Padding counts as a sequence that attends to itself, so that no row of a softmax is empty.
    `compiled` means that the layers go through torch.compile."""
    if kernel == "varlen":
        cu_seqlens, max_seqlen = batch.cu_seqlens, batch.max_seqlen
        return AttentionPlan(kernel, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, keys=keys)
    short = batch.input_ids.shape[1] <= TILE
    if kernel == "tiles" and short and keys is None and not torch.is_grad_enabled():
        kernel = "sdpa"
    if kernel == "tiles":
        tiles = _tiles(batch.cu_seqlens.diff().tolist())
        compute = _uncompiled_tiles() if compiled else None
        return AttentionPlan(kernel, tiles=tiles, compute=compute, keys=keys)
    ids = batch.sequence_ids
    return AttentionPlan(kernel, mask=(ids[:, :, None] == ids[:, None, :])[:, None], keys=keys)


def attend(
    qkv: torch.Tensor, plan: AttentionPlan, *, num_heads: int, dropout: float = 0.0
) -> torch.Tensor:
    """Attention of every token over its sequence: (rows, length, 3 hidden) -> (..., hidden)."""
    return (plan.compute or _ATTENTION[plan.kernel])(qkv, plan, num_heads, dropout)


def _split_heads(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value, each (rows, heads, length, head size)."""
    rows, length, tripled = qkv.shape
    parts = qkv.view(rows, length, 3, num_heads, tripled // 3 // num_heads)
    return parts.permute(2, 0, 3, 1, 4).unbind()


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Computed in fp32 at least, returned in the dtype of the scores."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(scores.dtype)


def _plain_attention(
    qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float
) -> torch.Tensor:
    query, key, value = _split_heads(qkv, num_heads)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    assert plan.mask is not None
    scores = scores.masked_fill(~plan.mask, -torch.inf)
    weights = _softmax(scores)  # (rows, heads, length, length)
    if dropout:
        weights = _dropped(weights, plan.keys, dropout)
    return (weights @ value).transpose(1, 2).flatten(2)


def _dropped(weights: torch.Tensor, keys: DropoutKeys | None, dropout: float) -> torch.Tensor:
    if keys is None:
        return F.dropout(weights, dropout)
    rows, heads, length, _ = weights.shape
    tokens = keys.of_heads(heads).tokens.view(heads, rows, length).transpose(0, 1)
    mask = replace(keys, tokens=tokens).mask(weights, dropout)
    return weights * mask.mul_(1 / keep_rate(dropout))


def _sdpa(qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float) -> torch.Tensor:
    assert not dropout or plan.keys is None, "it draws its own masks"
    query, key, value = _split_heads(qkv, num_heads)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=plan.mask, dropout_p=dropout)
    return out.transpose(1, 2).flatten(2)


def _varlen(qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert dropout == 0.0 and plan.cu_seqlens is not None
    rows, length, tripled = qkv.shape
    parts = qkv.view(rows * length, 3, num_heads, tripled // 3 // num_heads)
    query, key, value = parts.unbind(1)
    cu_seqlens, longest = plan.cu_seqlens, plan.max_seqlen
    out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest)
    assert isinstance(out, torch.Tensor)
    return out.reshape(rows, length, tripled // 3)


def _tiles(lengths: list[int]) -> tuple[Tile, ...]:
    """Join neighbouring sequences as long as they have at most TILE tokens together."""
    groups: list[list[int]] = []
    for length in lengths:
        if groups and sum(groups[-1]) + length <= TILE:
            groups[-1].append(length)
        else:
            groups.append([length])
    return tuple(Tile(sum(group), _tile_bias(group)) for group in groups)


def _tile_bias(lengths: list[int]) -> torch.Tensor | None:
    if len(lengths) == 1:
        return None
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    different = ids[:, None] != ids[None, :]
    return torch.zeros(1, *different.shape).masked_fill_(different, -torch.inf)


@cache
def _uncompiled_tiles() -> Callable[..., torch.Tensor]:
    """Keeps tiles out of torch.compile, since they differ from batch to batch. Made on demand:
    importing torch's compiler takes two seconds."""
    return cast("Callable[..., torch.Tensor]", torch.compiler.disable(_tiled_attention))


def _tiled_attention(
    qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float
) -> torch.Tensor:
    rows, length, tripled = qkv.shape
    mask_of = _tile_masks(plan.keys, num_heads, rows, dropout)
    out = _TiledAttention.apply(qkv.reshape(-1, tripled), plan.tiles, num_heads, dropout, mask_of)
    return cast("torch.Tensor", out).view(rows, length, tripled // 3)


_TileMask: TypeAlias = Callable[[slice, torch.Tensor], torch.Tensor | None]


def _tile_masks(keys: DropoutKeys | None, heads: int, rows: int, rate: float) -> _TileMask:
    """The dropout mask of the flat tokens of a tile for its weights (heads, tile, tile), if any."""
    if not rate:
        return lambda _, weights: None
    if keys is None:
        return lambda _, weights: torch.empty_like(weights).bernoulli_(1 - rate)
    tokens = odd_bits(keys.of_heads(heads).tokens)  # (heads, tokens)
    columns = keys.columns[: tokens.shape[1] // rows].repeat(rows)  # (tokens,)

    def mask(tile: slice, weights: torch.Tensor) -> torch.Tensor:
        kept = keep_mask(tokens[:, tile].flatten(), columns[tile], rate, weights.dtype)
        return kept.view_as(weights)

    return mask


class _TiledAttention(torch.autograd.Function):
    """Attention tile by tile: the scores of a tile stay in a CPU's cache, and none are computed
    between tiles. The hand-written backward writes into slices of one gradient; autograd would
    allocate a full-size gradient for every slice."""

    @staticmethod
    def forward(ctx: Any, qkv, tiles, num_heads, dropout, mask_of):
        tokens, tripled = qkv.shape
        parts = qkv.view(tokens, 3, num_heads, -1)  # (tokens, 3, heads, head size)
        out = parts.new_empty(tokens, num_heads, parts.shape[-1])
        saved, start, keep = [], 0, keep_rate(dropout)
        for tile in tiles:
            inside = slice(start, start := start + tile.tokens)
            weights = _attention_weights(parts[inside], tile)
            mask = mask_of(inside, weights)
            dropped = weights if mask is None else weights * mask
            value = parts[inside, 2].transpose(0, 1)  # (heads, tile, head size)
            torch.mul(torch.bmm(dropped, value).transpose(0, 1), 1 / keep, out=out[inside])
            saved += [weights] if mask is None else [weights, mask]
        ctx.save_for_backward(parts, out, *saved)
        ctx.tiles, ctx.keep = tiles, keep
        return out.view(tokens, tripled // 3)

    @staticmethod
    def backward(ctx: Any, *grads):
        parts, out, *saved = ctx.saved_tensors
        grad = grads[0].reshape(out.shape)
        # The row sums of weights times their gradient follow from the output alone
        # (FlashAttention, Dao et al. 2022, appendix B.4). (heads, tokens, 1)
        row_sums = (grad * out).sum(-1).t().unsqueeze(-1)
        grad = grad / ctx.keep
        d_parts, start, remaining = torch.empty_like(parts), 0, iter(saved)
        for tile in ctx.tiles:
            inside = slice(start, start := start + tile.tokens)
            weights, mask = next(remaining), next(remaining) if ctx.keep < 1 else None
            _tile_backward(
                parts[inside], d_parts[inside], grad[inside], row_sums[:, inside], weights, mask
            )
        return d_parts.view(len(parts), -1), None, None, None, None


def _attention_weights(parts: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The softmax of one tile, (heads, tile, tile)."""
    query, key, _ = parts.permute(1, 2, 0, 3).unbind()  # each (heads, tile, head size)
    scale = query.shape[-1] ** -0.5
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    if tile.bias is not None:
        scores.add_(tile.bias)
    return _softmax(scores)


def _tile_backward(
    parts: torch.Tensor,
    d_parts: torch.Tensor,
    grad: torch.Tensor,
    row_sums: torch.Tensor,
    weights: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Write the gradient of one tile's query, key and value into `d_parts`."""
    query, key, value = parts.permute(1, 2, 0, 3).unbind()
    d_query, d_key, d_value = d_parts.permute(1, 2, 0, 3).unbind()
    grad = grad.transpose(0, 1)  # (heads, tile, head size)
    dropped, d_scores = weights, torch.bmm(grad, value.transpose(1, 2))
    if mask is not None:
        dropped, d_scores = weights * mask, d_scores.mul_(mask)
    d_value.copy_(torch.bmm(dropped.transpose(1, 2), grad))
    d_scores.sub_(row_sums).mul_(weights)
    scale = query.shape[-1] ** -0.5
    torch.mul(torch.bmm(d_scores, key), scale, out=d_query)
    torch.mul(torch.bmm(d_scores.transpose(1, 2), query), scale, out=d_key)


_ATTENTION = {
    "plain": _plain_attention,
    "sdpa": _sdpa,
    "varlen": _varlen,
    "tiles": _tiled_attention,
}
