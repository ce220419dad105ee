"""Attention on CPUs: neighboring sequences joined up to 128 tokens, one tile at a time, or a few
of one size. In layers with a window a longer sequence is several tiles, so that it costs what its
windows cost.

Predictions, whose texts are sorted by length, need no joined sequences, masks or padding: those of
one length go through torch's scaled_dot_product_attention together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, TypeAlias, cast

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.attention.plan import AttentionPlan, Tile, distant
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.visibility import visible
from palm_ds.model.ops.dropout import DropoutKeys, keep_mask, keep_rate, odd_bits

TILE = 128  # tokens per tile of joined sequences; the fastest of 64 to 192 on CPUs
_TOGETHER = 4  # tiles in a call below fp32: 1.5 to 2 times as fast; fp32 gains nothing
_LEAST_SHARED = 16  # tokens of a call of SDPA, on average: below, joined sequences cost less


def plan_tiles(batch: Batch, *, compiled: bool) -> AttentionPlan:
    visibility = None if batch.visibility is None else batch.visibility.flatten(1)
    tiles = _tiles([length for length in batch.cu_seqlens.diff().tolist() if length], visibility)
    compute = _uncompiled(_tiled_attention) if compiled else _tiled_attention
    return AttentionPlan(kernel="tiles", compute=compute, tiles=tiles)


def plan_equal_lengths(batch: Batch, *, compiled: bool) -> AttentionPlan | None:
    """The plan without gradients and dropout for neighboring texts that are often equally long;
    None if they are not, or hide tokens."""
    if batch.visibility is not None:
        return None
    lengths = [length for length in batch.cu_seqlens.diff().tolist() if length]
    runs = [(length, sum(1 for _ in run)) for length, run in groupby(lengths)]
    if batch.input_ids.numel() < _LEAST_SHARED * len(runs):
        return None
    compute = _uncompiled(_attention_of_runs) if compiled else _attention_of_runs
    tiles = tuple(Tile(length, None, texts=texts) for length, texts in runs)
    return AttentionPlan(kernel="tiles", compute=compute, tiles=tiles)


def _tiles(lengths: list[int], visibility: torch.Tensor | None) -> tuple[Tile, ...]:
    """Join neighboring sequences as long as they have at most TILE tokens together. `visibility`
    (2, tokens)."""
    groups: list[list[int]] = []
    for length in lengths:
        if groups and sum(groups[-1]) + length <= TILE:
            groups[-1].append(length)
        else:
            groups.append([length])
    sizes = [sum(group) for group in groups]
    inside = [None] * len(groups) if visibility is None else visibility.split(sizes, 1)
    biases = (_tile_bias(*group) for group in zip(groups, inside, strict=True))
    return tuple(Tile(*size) for size in zip(sizes, biases, strict=True))


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


def _layer_tiles(plan: AttentionPlan, window: int | None, count: int = 1) -> tuple[Tile, ...]:
    """The tiles of layers with this window, up to `count` of one size together."""
    if window not in plan.layer_tiles:
        tiles: Iterable[Tile] = plan.tiles
        if window is not None:
            biases: dict[tuple[int, int, int], torch.Tensor] = {}
            tiles = [part for tile in tiles for part in _parts_of(tile, window, biases)]
        plan.layer_tiles[window] = tuple(tiles if count == 1 else _together(tiles, count))
    return plan.layer_tiles[window]


def _together(tiles: Iterable[Tile], count: int) -> Iterator[Tile]:
    """Up to `count` neighbors of one size as one tile of several texts."""
    for (tokens, *around), run in groupby(tiles, key=lambda x: (x.tokens, x.before, x.after)):
        equal = list(run)
        step = 1 if any(around) or tokens > TILE else count
        for start in range(0, len(equal), step):
            same = equal[start : start + step]
            joined = Tile(tokens, _joined([tile.bias for tile in same], tokens), texts=len(same))
            yield joined if len(same) > 1 else same[0]


def _joined(biases: Sequence[torch.Tensor | None], tokens: int) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    nothing = torch.zeros(1, tokens, tokens)
    return torch.cat([nothing if bias is None else bias for bias in biases])


def _parts_of(
    tile: Tile, window: int, biases: dict[tuple[int, int, int], torch.Tensor]
) -> Iterator[Tile]:
    """A tile as one or several. `biases`: {(before, tokens, after): bias} of parts so far."""
    if window >= tile.tokens - 1:
        yield tile
        return
    if tile.tokens <= TILE + 2 * window:
        bias = torch.zeros(1, tile.tokens, tile.tokens) if tile.bias is None else tile.bias
        far = distant(tile.tokens, window, bias.device)
        yield Tile(tile.tokens, bias.masked_fill(far, -torch.inf), texts=tile.texts)
        return
    for start in list(range(0, tile.tokens, TILE)) * tile.texts:  # each is one sequence
        tokens = min(TILE, tile.tokens - start)
        before, after = min(start, window), min(tile.tokens - start - tokens, window)
        shape = (before, tokens, after)
        if shape not in biases:
            far = distant(sum(shape), window, torch.device("cpu"))[before : before + tokens]
            biases[shape] = torch.zeros(1, *far.shape).masked_fill_(far, -torch.inf)
        bias = biases[shape]
        if tile.bias is not None:
            end = start + tokens
            bias = bias + tile.bias[:, start:end, start - before : end + after]
        yield Tile(tokens, bias, before, after)


@cache
def _uncompiled(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Keeps tiles out of torch.compile, since they differ from batch to batch. Made on demand:
    importing torch's compiler takes two seconds."""
    return cast("Callable[..., torch.Tensor]", torch.compiler.disable(compute))


def _attention_of_runs(
    qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float, window: int | None
) -> torch.Tensor:
    """One call for each run of equally long texts, or part of a long one."""
    rows, length, tripled = qkv.shape
    parts = qkv.reshape(rows * length, 3, num_heads, -1)
    tiles = _layer_tiles(plan, window)
    outs = []
    for tile, _, keys in _places(tiles):
        of_texts = parts[keys].unflatten(
            0, (tile.texts, -1)
        )  # (texts, tokens, 3, heads, head size)
        query, key, value = of_texts.permute(2, 0, 3, 1, 4).unbind()
        query = query[:, :, tile.before : tile.before + tile.tokens]
        bias = None if tile.bias is None else tile.bias.to(query.dtype)[None]
        out = F.scaled_dot_product_attention(query, key, value, bias, dropout)
        outs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
    whole = outs[0] if len(outs) == 1 else torch.cat(outs)
    return whole.view(rows, length, tripled // 3)


def _tiled_attention(
    qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float, window: int | None
) -> torch.Tensor:
    rows, length, tripled = qkv.shape
    mask_of = _tile_masks(plan.keys, num_heads, rows, dropout)
    tiles = _layer_tiles(plan, window, 1 if qkv.dtype == torch.float32 else _TOGETHER)
    out = _TiledAttention.apply(qkv.reshape(-1, tripled), tiles, num_heads, dropout, mask_of)
    return cast("torch.Tensor", out).view(rows, length, tripled // 3)


_TileMask: TypeAlias = Callable[[Tile, slice, slice, torch.Tensor], torch.Tensor | None]
"""(tile, queries, keys, weights) -> the dropout mask of the weights, if any."""


def _tile_masks(keys: DropoutKeys | None, heads: int, rows: int, rate: float) -> _TileMask:
    """The dropout masks of the flat tokens of tiles for their weights (texts * heads, tile,
    keys)."""
    if not rate:
        return lambda _, __, ___, weights: None
    if keys is None:
        return lambda _, __, ___, weights: torch.empty_like(weights).bernoulli_(1 - rate)
    tokens = odd_bits(keys.of_heads(heads).tokens)  # (heads, tokens)
    columns = keys.columns[: tokens.shape[1] // rows].repeat(rows)  # (tokens,)

    def mask(tile: Tile, queries: slice, keys: slice, weights: torch.Tensor) -> torch.Tensor:
        of_texts = zip(
            tokens[:, queries].chunk(tile.texts, 1), columns[keys].chunk(tile.texts), strict=True
        )
        kept = [keep_mask(mine.flatten(), its, rate, weights.dtype) for mine, its in of_texts]
        return (kept[0] if tile.texts == 1 else torch.cat(kept)).view_as(weights)

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
        saved, keep = [], keep_rate(dropout)
        for tile, queries, keys in _places(tiles):
            query, key, value = _of_texts(parts, tile, queries, keys)
            weights = _attention_weights(query, key, tile)
            mask = mask_of(tile, queries, keys, weights)
            dropped = weights if mask is None else weights * mask
            of_tile = torch.bmm(dropped, value).unflatten(0, (tile.texts, -1)).transpose(1, 2)
            torch.mul(of_tile, 1 / keep, out=out[queries].unflatten(0, (tile.texts, -1)))
            saved += [weights] if mask is None else [weights, mask]
        ctx.save_for_backward(parts, out, *saved)
        ctx.tiles, ctx.keep = tiles, keep
        return out.view(tokens, tripled // 3)

    @staticmethod
    def backward(ctx: Any, *grads):
        parts, out, *saved = ctx.saved_tensors
        grad = grads[0].reshape(out.shape)
        # The row sums of weights times their gradient follow from the output alone
        # (FlashAttention, Dao et al. 2022, appendix B.4). (tokens, heads, 1)
        row_sums = (grad * out).sum(-1, keepdim=True)
        grad = grad / ctx.keep
        shared = any(tile.before or tile.after for tile in ctx.tiles)
        d_parts = torch.zeros_like(parts) if shared else torch.empty_like(parts)
        remaining = iter(saved)
        for tile, queries, keys in _places(ctx.tiles):
            weights, mask = next(remaining), next(remaining) if ctx.keep < 1 else None
            gradients = _tile_gradients(
                _of_texts(parts, tile, queries, keys),
                _swapped(grad[queries], tile),
                _swapped(row_sums[queries], tile),
                weights,
                mask,
            )
            d_query, d_key, d_value = (_swapped(x, tile) for x in gradients)
            d_parts[queries, 0] = d_query
            if shared:  # a key is read by several tiles
                d_parts[keys, 1] += d_key
                d_parts[keys, 2] += d_value
            else:
                d_parts[keys, 1], d_parts[keys, 2] = d_key, d_value
        return d_parts.view(len(parts), -1), None, None, None, None


def _places(tiles: Iterable[Tile]) -> Iterator[tuple[Tile, slice, slice]]:
    """Each tile with the flat tokens that attend and those that are attended to."""
    start = 0
    for tile in tiles:
        end = start + tile.tokens * tile.texts
        yield tile, slice(start, end), slice(start - tile.before, end + tile.after)
        start = end


def _swapped(vectors: torch.Tensor, tile: Tile) -> torch.Tensor:
    """(texts * tokens, heads, n) of a tile as (texts * heads, tokens, n), and the other way."""
    return vectors.unflatten(0, (tile.texts, -1)).transpose(1, 2).flatten(0, 1)


def _of_texts(
    parts: torch.Tensor, tile: Tile, queries: slice, keys: slice
) -> tuple[torch.Tensor, ...]:
    """The tile's query (texts * heads, tile, head size), key and value (texts * heads, keys, head
    size); parts (tokens, 3, heads, head size)."""
    places = (queries, keys, keys)
    return tuple(_swapped(parts[at, which], tile) for which, at in enumerate(places))


def _attention_weights(query: torch.Tensor, key: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The softmax (texts * heads, tile, keys) of a tile, computed in fp32 at least, as torch's is
    on CPUs."""
    scale = query.shape[-1] ** -0.5
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    if tile.bias is not None:
        bias = tile.bias.to(scores.dtype)[:, None]
        scores.unflatten(0, (tile.texts, -1)).add_(bias)
    return scores.softmax(-1)


def _tile_gradients(
    parts: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    row_sums: torch.Tensor,
    weights: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of a tile's query, key and value, (texts * heads, tokens, head size) each as
    they and `grad`, that of its output, are."""
    query, key, value = parts
    dropped, d_scores = weights, torch.bmm(grad, value.transpose(1, 2))
    if mask is not None:
        dropped, d_scores = weights * mask, d_scores.mul_(mask)
    d_value = torch.bmm(dropped.transpose(1, 2), grad)
    d_scores.sub_(row_sums).mul_(weights)
    scale = query.shape[-1] ** -0.5
    d_query = torch.bmm(d_scores, key).mul_(scale)
    d_key = torch.bmm(d_scores.transpose(1, 2), query).mul_(scale)
    return d_query, d_key, d_value
