"""Attention on CPUs: neighbouring sequences joined up to 128 tokens, one tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, cast

import torch

from palm_ds.model.attention.plan import AttentionPlan, Tile, distant, softmax
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.visibility import visible
from palm_ds.model.ops.dropout import DropoutKeys, keep_mask, keep_rate, odd_bits

TILE = 128  # tokens per tile of joined sequences; the fastest of 64 to 192 on CPUs


def plan_tiles(batch: Batch, *, compiled: bool) -> AttentionPlan:
    visibility = None if batch.visibility is None else batch.visibility.flatten(1)
    tiles = _tiles([length for length in batch.cu_seqlens.diff().tolist() if length], visibility)
    compute = _uncompiled_tiles() if compiled else _tiled_attention
    return AttentionPlan(kernel="tiles", compute=compute, tiles=tiles)


def _tiles(lengths: list[int], visibility: torch.Tensor | None) -> tuple[Tile, ...]:
    """Join neighbouring sequences as long as they have at most TILE tokens together. `visibility`
    (2, tokens)."""
    groups: list[list[int]] = []
    for length in lengths:
        if groups and sum(groups[-1]) + length <= TILE:
            groups[-1].append(length)
        else:
            groups.append([length])
    sizes = [sum(group) for group in groups]
    inside = [None] * len(groups) if visibility is None else visibility.split(sizes, 1)
    biases = (_tile_bias(*each) for each in zip(groups, inside, strict=True))
    return tuple(Tile(*each) for each in zip(sizes, biases, strict=True))


def _tile_bias(lengths: list[int], visibility: torch.Tensor | None) -> torch.Tensor | None:
    if len(lengths) == 1 and visibility is None:
        return None
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    hidden = ids[:, None] != ids[None, :]
    if visibility is not None:
        hidden |= ~visible(visibility)
        if not hidden.any():
            return None
    return torch.zeros(1, *hidden.shape).masked_fill_(hidden, -torch.inf)


def _windowed(tiles: tuple[Tile, ...], window: int) -> tuple[Tile, ...]:
    return tuple(Tile(tile.tokens, _windowed_bias(tile, window)) for tile in tiles)


def _windowed_bias(tile: Tile, window: int) -> torch.Tensor | None:
    if window >= tile.tokens - 1:
        return tile.bias
    bias = torch.zeros(1, tile.tokens, tile.tokens) if tile.bias is None else tile.bias
    return bias.masked_fill(distant(tile.tokens, window, bias.device), -torch.inf)


@cache
def _uncompiled_tiles() -> Callable[..., torch.Tensor]:
    """Keeps tiles out of torch.compile, since they differ from batch to batch. Made on demand:
    importing torch's compiler takes two seconds."""
    return cast("Callable[..., torch.Tensor]", torch.compiler.disable(_tiled_attention))


def _tiled_attention(
    qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float, window: int | None
) -> torch.Tensor:
    rows, length, tripled = qkv.shape
    mask_of = _tile_masks(plan.keys, num_heads, rows, dropout)
    tiles = plan.tiles if window is None else _windowed(plan.tiles, window)
    out = _TiledAttention.apply(qkv.reshape(-1, tripled), tiles, num_heads, dropout, mask_of)
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
    return softmax(scores)


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
