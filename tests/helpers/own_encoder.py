"""User-defined encoders, some of them invalid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import palm_ds as palm
from palm_ds.model.encoder.encoder import gather_positions


class PreNormLayer(palm.EncoderLayer):
    """Norms before each half, not after it."""

    def forward(self, x: Any, plan: Any, at: Any = None) -> torch.Tensor:
        x, seen = gather_positions(at, x, self.attention(self.attention_norm(x), plan))
        x = self.residual_dropout(x, self.project(seen))
        return self.residual_dropout(x, self.feed_forward(self.output_norm(x)))


class PreNorm(palm.TransformerEncoder):
    def __init__(self, config: Any, *rest: Any, scale: float = 1.0, **more: Any):
        super().__init__(config, *rest, **more)
        self.last = nn.LayerNorm(config.hidden_size)
        self.wide = nn.Parameter(torch.full((config.hidden_size, 3), 1e-3))
        self.scale = scale

    def layer(self, number: int) -> nn.Module:
        return PreNormLayer(self.config, self.kernels)

    def forward(self, batch: Any, at: Any = None) -> torch.Tensor:
        return self.last(super().forward(batch, at)) * self.scale + self.wide.sum(1)


class SeesAll(palm.TransformerEncoder):
    """Shows tokens what a task hides from them."""

    def forward(self, batch, at=None):
        return super().forward(replace(batch, visibility=None), at)


class Silent(palm.Encoder):
    """Says nothing of its costs."""

    def forward(self, batch: Any, at: Any = None) -> torch.Tensor:
        return gather_positions(at, self.word(batch.input_ids))[0]


class Idle(palm.TransformerEncoder):
    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.spare = nn.Linear(2, 2)


class Mean(palm.TransformerEncoder):
    """All texts of a row see one another."""

    def forward(self, batch: Any, at: Any = None) -> torch.Tensor:
        x = super().forward(batch)
        return gather_positions(at, x + x.mean(1, keepdim=True))[0]


class Deaf(palm.TransformerEncoder):
    """Knows no `at`."""

    def forward(self, batch: Any, at: Any = None) -> torch.Tensor:
        return super().forward(batch)


class Narrow(palm.TransformerEncoder):
    def forward(self, batch: Any, at: Any = None) -> torch.Tensor:
        return super().forward(batch, at)[..., :3]


class Endless(palm.TransformerEncoder):
    def forward(self, batch: Any, at: Any = None) -> torch.Tensor:
        return super().forward(batch, at) * float("inf")


class Failing(palm.TransformerEncoder):
    def forward(self, batch: Any, at: Any = None) -> torch.Tensor:
        raise KeyError("first\nsecond")
