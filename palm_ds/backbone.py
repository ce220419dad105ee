"""The encoder: ERNIE 2.0, BERT and RoBERTa are one shape with different numbers.

    word + position + segment (+ task) embeddings -> LayerNorm -> dropout
    layers x (attention within the block, add, LayerNorm; feed-forward, add, LayerNorm)   (post-LN)
    pooler: tanh of a linear map of a row, for heads that read whole texts

It runs on packed rows: a token sees the tokens of its own block, whatever else is in its row.

Weights start as BERT's and ERNIE's do: matrices and embeddings from a normal distribution of
deviation `init_range`, cut at two deviations; biases 0, LayerNorm scales 1. They are drawn in
module order from torch's generator, so that `torch.manual_seed` decides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from palm_ds.errors import UserError, suggest
from palm_ds.example import Batch, Vocabulary
from palm_ds.kernels import Kernels, attend, layer_norm, plan_attention

ACTIVATIONS = {
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The numbers of an encoder."""

    vocab_size: int | None = None  # rows of the word table; none: as many as the tokenizer has words
    width: int = 768  # numbers a token is
    layers: int = 12
    heads: int = 12  # of attention, in each layer
    ffn: int | None = None  # width inside the feed-forward part; none: 4 * width
    positions: int = 512  # rows of the position table
    segments: int = 4  # rows of the segment table
    task_slots: int = 16  # rows of the task table; 0: no task embedding
    activation: str = "gelu"  # gelu, relu or gelu_new; of the feed-forward part
    eps: float = 1e-12  # of LayerNorm
    dropout: float = 0.1
    attention_dropout: float = 0.1
    init_range: float = 0.02  # deviation of the first weights
    position_offset: int = 0  # first row of the position table in use (RoBERTa: 2)
    pad: int = 0  # id of the padding token

    @property
    def inner(self) -> int:
        return self.ffn if self.ffn is not None else 4 * self.width

    @property
    def longest(self) -> int:
        """Tokens the longest text may have."""
        return self.positions - self.position_offset


PRESETS: dict[str, dict[str, Any]] = {
    "ernie-2.0-base": dict(eps=1e-5),
    "tiny": dict(width=128, layers=2, heads=2),
    "small": dict(width=256, layers=4, heads=4),
}


class Layer(nn.Module):
    """One encoder layer, post-LN: dropout, add, LayerNorm ("dan" in ERNIE's code)."""

    def __init__(self, config: BackboneConfig, kernels: Kernels):
        super().__init__()
        width = config.width
        self.heads, self.activation = config.heads, ACTIVATIONS[config.activation]
        self.dropout, self.attention_dropout = config.dropout, config.attention_dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.attention_norm = layer_norm(width, config.eps, kernels)
        self.expand = nn.Linear(width, config.inner)
        self.contract = nn.Linear(config.inner, width)
        self.output_norm = layer_norm(width, config.eps, kernels)

    def forward(self, x: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        attended = self.project(attend(self.qkv(x), plan, heads=self.heads, dropout=dropout))
        x = self.attention_norm(x + F.dropout(attended, self.dropout, self.training))
        y = self.contract(self.activation(self.expand(x)))
        return self.output_norm(x + F.dropout(y, self.dropout, self.training))


class Pooler(nn.Module):
    """What a head of whole texts reads: tanh of a linear map, (n, width) -> (n, width)."""

    def __init__(self, width: int):
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(rows))


class Backbone(nn.Module):
    """Packed rows of ids to a vector for every token."""

    def __init__(
        self,
        config: BackboneConfig,
        kernels: Kernels = Kernels(),  # noqa: B008  frozen
        *,
        recompute: bool = False,
    ):
        super().__init__()
        assert config.vocab_size is not None, "fill vocab_size from the tokenizer first"
        self.config, self.kernels, self.recompute = config, kernels, recompute
        self.word = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.positions, config.width)
        self.segment = nn.Embedding(config.segments, config.width)
        if config.task_slots:
            self.task = nn.Embedding(config.task_slots, config.width)
        self.norm = layer_norm(config.width, config.eps, kernels)
        self.layers = nn.ModuleList(Layer(config, kernels) for _ in range(config.layers))
        self.pooler = Pooler(config.width)
        initialise(self, config.init_range)

    @property
    def width(self) -> int:
        return self.config.width

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.embed(batch)  # (rows, length, width)
        plan = plan_attention(batch, self.kernels)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, plan, use_reentrant=False)
            else:
                x = layer(x, plan)
        return x

    def embed(self, batch: Batch) -> torch.Tensor:
        x = self.word(batch.ids)
        x = x + self.position(batch.positions + self.config.position_offset)
        x = x + self.segment(batch.segments)
        if self.config.task_slots:
            x = x + self.task(batch.task_ids)
        return F.dropout(self.norm(x), self.config.dropout, self.training)


def initialise(module: nn.Module, deviation: float) -> None:
    """The first weights of every linear map, embedding and LayerNorm within, in module order."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(part.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
