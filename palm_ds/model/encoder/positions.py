"""Positions within attention: queries and keys turned by angles that grow with their positions
(RoFormer, Su et al. 2021, arXiv 2104.09864), so that their product depends on the distance alone,
or what a distance adds to each score.

    mpnet        a number of each head and bucket of distances (T5, Raffel et al. 2020)
    ernie_gram   likewise, with a bucket for what the first token sees, and one for the first token
                 as others see it
    disentangled q_i . K(R_ij) + k_j . Q(R_ij): vectors of distances, compared with what the tokens
                 contain (DeBERTa, He et al. 2021, arXiv 2006.03654)

Tokens of a text stand next to one another in a packed row, so the distance of two places is that of
their positions, and scores between texts are masked anyway: distances are the same for all rows.
Offsets of a row of n tokens are -(n - 1) ... n, of which a score has one. Only products and views
are computed from them, so that gradients are added up in a fixed order. Where the first token
matters, or tokens stand elsewhere than their positions say, as queries do, buckets are those of
pairs of positions instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias, cast

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F  # noqa: N812

RotaryBase: TypeAlias = Annotated[float, Field(gt=1)]
"""The base of a setting."""

Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of angles."""


class Rotary(nn.Module):
    """Turns pairs of dimensions: i and i + half, or with `neighbors` 2i and 2i + 1. A module
    without parameters, so that what it returns can be recorded."""

    def __init__(
        self,
        base: float,
        num_heads: int,
        kv_heads: int | None = None,
        *,
        neighbors: bool = False,
        factor: float = 1.0,
    ):
        """`kv_heads`: the heads of keys and of values; None: as many as of queries. `factor`:
        positions are divided by it."""
        super().__init__()
        self.base, self.neighbors, self.factor = base, neighbors, factor
        self.heads = num_heads, kv_heads or num_heads
        self._tables: tuple[tuple[float, ...], Rotation] | None = None

    @property
    def frequencies(self) -> tuple[float, float]:
        """Equal for all that turn by the same angles."""
        return self.base, self.factor

    def rotation(self, positions: torch.Tensor, head_size: int) -> Rotation:
        """The cosines and sines of the angles at `positions` (rows, length), (rows, length, 1,
        head_size / 2) each, in fp32 whatever the model's type. On a CPU that only predicts, of
        tables that are kept, and for both halves of a head: (rows, length, 1, head_size)."""
        on_cpu = positions.device.type == "cpu"
        if self.neighbors or not on_cpu or not torch.is_inference_mode_enabled():
            cos, sin = self._angles(positions, head_size)
        else:
            cos, sin = (F.embedding(positions, table) for table in self._kept(positions, head_size))
        return cos[:, :, None], sin[:, :, None]

    def _angles(self, positions: torch.Tensor, head_size: int) -> Rotation:
        """(..., head_size / 2) for positions (...)."""
        half = head_size // 2
        steps = torch.arange(half, dtype=torch.float32, device=positions.device)
        angles = positions[..., None].float() * (self.base ** (-steps / half) / self.factor)
        return torch.cos(angles), torch.sin(angles)

    def _kept(self, positions: torch.Tensor, head_size: int) -> Rotation:
        """Tables (longest, head_size) for all positions up to the largest that was met."""
        made_with, largest = (*self.frequencies, head_size), int(positions.max())
        if not self._tables or self._tables[0] != made_with or len(self._tables[1][0]) <= largest:
            every = torch.arange(2 << largest.bit_length(), device=positions.device)
            cos, sin = self._angles(every, head_size)
            self._tables = made_with, _for_both_halves(cos, sin)
        return self._tables[1]

    def forward(self, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """(rows, length, all heads) with the queries and keys turned by `rotation`."""
        queries, keys = self.heads
        parts = qkv.unflatten(-1, (queries + 2 * keys, -1))  # (rows, length, heads, head size)
        turning = parts[:, :, : queries + keys]
        if rotation[0].shape[-1] == parts.shape[-1]:
            _turn(turning, rotation)
            return qkv
        if not self.neighbors and not qkv.is_cuda:
            return cast("torch.Tensor", _Turned.apply(parts, queries + keys, *rotation)).flatten(2)
        turned = self._turned(turning, rotation)
        return torch.cat([turned, parts[:, :, queries + keys :]], 2).flatten(2)

    def _turned(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        cos, sin = (values.to(x.dtype) for values in rotation)
        if self.neighbors:
            a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _for_both_halves(cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    """(..., head size) of (..., head size / 2): what a vector is multiplied with, and what its
    halves, swapped, are."""
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


class _Turned(torch.autograd.Function):
    """The first heads turned, the others as they are. To the bit what autograd computes of the two
    halves, for which it would fill and add a gradient of full size each."""

    @staticmethod
    def forward(ctx, parts, heads, cos, sin):
        cos, sin = _for_both_halves(cos.to(parts.dtype), sin.to(parts.dtype))
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _turned_heads(parts, heads, cos, sin)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        return _turned_heads(grads[0], ctx.heads, cos, -sin), None, None, None


def _turned_heads(
    parts: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """parts (rows, length, all heads, head size) with the first `heads` turned."""
    turning, others = parts[:, :, :heads], parts[:, :, heads:]
    first, second = turning.chunk(2, -1)
    out = torch.cat([turning * cos, others], 2)
    out[:, :, :heads].add_(torch.cat([second, first], -1).mul_(sin))
    return out


def _turn(x: torch.Tensor, rotation: Rotation) -> None:
    """Turn x (rows, length, heads, head size) itself, in few passes over it."""
    cos, sin = (values.to(x.dtype) for values in rotation)
    other = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(other, sin)


def rotations(
    turning: Iterable[Rotary], positions: torch.Tensor, head_size: int
) -> dict[tuple[float, float], Rotation]:
    """{frequencies: rotation at `positions` (rows, length)}, one for all that turn alike."""
    distinct = {rotary.frequencies: rotary for rotary in turning}
    return {key: rotary.rotation(positions, head_size) for key, rotary in distinct.items()}


LONGEST = 128
"""The distance from which on all are in MPNet's last bucket."""


@dataclass(frozen=True, kw_only=True)
class Disentangled:
    """Values of disentangled attention."""

    content_to_position: bool = True
    position_to_content: bool = True
    buckets: int = 256
    """Rows of the table for each direction; 0: one for each distance."""
    longest: int = 512
    """The largest distance."""
    own_maps: bool = False
    """Whether distances have query and key matrices of their own, instead of those of tokens."""

    @property
    def span(self) -> int:
        """Rows of the table for each direction."""
        return self.buckets or self.longest

    @property
    def terms(self) -> int:
        """How many terms a score has beyond the usual one."""
        return self.content_to_position + self.position_to_content

    def places(self, length: int, device: torch.device) -> torch.Tensor:
        """(2, 2 length): the row of the table for each offset of a key from a query, and of a query
        from a key."""
        offset = offsets(length, device)
        distance = torch.stack([-offset, offset])  # the query's place minus the key's
        if self.buckets:
            distance = log_buckets(distance, self.buckets, self.longest)
        return (distance + self.span).clamp(0, 2 * self.span - 1)


def offsets(length: int, device: torch.device) -> torch.Tensor:
    """-(length - 1) ... length"""
    return torch.arange(2 * length, device=device) - (length - 1)


def skewed(scores: torch.Tensor) -> torch.Tensor:
    """(..., length, n - length): for each place i and j the score of i at the offset j - i, of
    scores (..., length, n) at the offsets from -(length - 1) on."""
    length, columns = scores.shape[-2:]
    flat = scores.flatten(-2)[..., length - 1 : length * columns - 1]
    return flat.unflatten(-1, (length, columns - 1))[..., : columns - length]


def mpnet_buckets(offset: torch.Tensor, buckets: int) -> torch.Tensor:
    """The bucket of each offset of a key from a query: half of them for keys behind it, of each
    half one half for single distances and the others growing as a logarithm."""
    half, exact = buckets // 2, buckets // 4
    size = offset.abs()
    steps = torch.log(size.float() / exact) / math.log(LONGEST / exact) * (half - exact)
    far = (exact + steps.clamp(min=0).long()).clamp(max=half - 1)
    return torch.where(size < exact, size, far) + (offset > 0) * half


def pair_offsets(positions: torch.Tensor) -> torch.Tensor:
    """(rows, length, length) of positions (rows, length): that of j minus that of i."""
    return positions[:, None, :] - positions[:, :, None]


GRAM_BUCKETS = 33
"""Rows of ERNIE-Gram's table: 16 for keys from the query on, 16 for those before it, one more."""
_SEEN_BY_FIRST, _FIRST_SEEN = 16, 32


def gram_buckets(positions: torch.Tensor) -> torch.Tensor:
    """(rows, length, length): ERNIE-Gram's bucket of each query i and key j, given the positions
    (rows, length). The sides are the reverse of MPNet's; then the first key's column is 32, and the
    first query's row 16, also where they meet (`_get_rel_pos_scaler` in ERNIE's code)."""
    first = positions == 0
    usual = mpnet_buckets(-pair_offsets(positions), GRAM_BUCKETS - 1)
    seen = torch.where(first[:, None, :], _FIRST_SEEN, usual)
    return torch.where(first[:, :, None], _SEEN_BY_FIRST, seen)


def log_buckets(distance: torch.Tensor, buckets: int, longest: int) -> torch.Tensor:
    """The bucket of each distance, with its sign: single distances up to half of `buckets`, then as
    a logarithm."""
    middle = buckets // 2
    size = distance.abs().clamp(min=middle - 1)
    scale = torch.log(torch.tensor((longest - 1) / middle))
    far = torch.ceil(torch.log(size / middle) / scale * (middle - 1)) + middle
    return torch.where(size <= middle, distance, far.long() * distance.sign())


def disentangled_bias(
    qkv: torch.Tensor,
    distances: tuple[torch.Tensor | None, torch.Tensor | None],
    places: torch.Tensor,
    num_heads: int,
    values: Disentangled,
    pairs: torch.Tensor | None = None,
) -> torch.Tensor:
    """What is added to the scores, (rows, heads, length, length). `qkv` (rows, length, 3 hidden) of
    the tokens; `distances`: their queries and keys, (2 span, hidden) each, None where no term needs
    them; `places`: `Disentangled.places`; `pairs` (rows, length, length): the offset of each pair
    of tokens, None where it is that of their places."""
    query, key, _ = _heads(qkv, num_heads)
    position_query, position_key = distances
    total: list[torch.Tensor] = []
    if position_key is not None:
        of_offsets = F.embedding(places[0], position_key)
        total.append(_of_pairs(query @ _per_head(of_offsets, num_heads), pairs))
    if position_query is not None:
        of_offsets = F.embedding(places[1], position_query)
        of_keys = _of_pairs(key @ _per_head(of_offsets, num_heads), pairs)
        total.append(of_keys.transpose(-1, -2))
    summed = total[0] if len(total) == 1 else total[0] + total[1]
    return summed * ((1 + values.terms) * query.shape[-1]) ** -0.5


def _of_pairs(scores: torch.Tensor, pairs: torch.Tensor | None) -> torch.Tensor:
    """`skewed` scores (rows, heads, length, 2 length), or those at the offsets of `pairs`."""
    if pairs is None:
        return skewed(scores)
    length = scores.shape[-2]
    at = (pairs + length - 1)[:, None].expand(-1, scores.shape[1], -1, -1)
    return scores.gather(-1, at)


def _heads(qkv: torch.Tensor, num_heads: int) -> list[torch.Tensor]:
    """Query, key and value, each (rows, heads, length, head size)."""
    return [x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in qkv.chunk(3, -1)]


def _per_head(vectors: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(heads, head size, n) of vectors (n, hidden)."""
    return vectors.unflatten(-1, (num_heads, -1)).permute(1, 2, 0)
