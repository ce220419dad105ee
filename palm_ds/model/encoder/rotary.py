"""Rotary positions: queries and keys turned by angles that grow with their positions (RoFormer, Su
et al. 2021, arXiv 2104.09864), so that their product depends on the distance alone."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import torch
from pydantic import Field
from torch import nn

RotaryBase: TypeAlias = Annotated[float, Field(gt=1)]
"""The base of a setting."""


class Rotary(nn.Module):
    """Turns pairs of dimensions: i and i + half, or with `neighbours` 2i and 2i + 1. A module
    without parameters, so that what it returns can be recorded."""

    def __init__(
        self,
        base: float,
        num_heads: int,
        kv_heads: int | None = None,
        *,
        neighbours: bool = False,
        factor: float = 1.0,
    ):
        """`kv_heads`: the heads of keys and of values; None: as many as of queries. `factor`:
        positions are divided by it."""
        super().__init__()
        self.base, self.neighbours, self.factor = base, neighbours, factor
        self.heads = num_heads, kv_heads or num_heads

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(rows, length, all heads) with the queries and keys turned by `positions` (rows,
        length)."""
        queries, keys = self.heads
        parts = qkv.unflatten(-1, (queries + 2 * keys, -1))  # (rows, length, heads, head size)
        turned = self._turned(parts[:, :, : queries + keys], positions)
        return torch.cat([turned, parts[:, :, queries + keys :]], 2).flatten(2)

    def _turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        steps = torch.arange(half, dtype=torch.float32, device=x.device)
        angles = positions[..., None].float() * (self.base ** (-steps / half) / self.factor)
        # (rows, length, 1, half), computed in fp32 whatever the model's type
        cos, sin = (f(angles)[:, :, None].to(x.dtype) for f in (torch.cos, torch.sin))
        if self.neighbours:
            a, b = x.unflatten(-1, (half, 2)).unbind(-1)
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
