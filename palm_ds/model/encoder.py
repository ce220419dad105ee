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

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from palm_ds.common.plugins import check_options, find_class
from palm_ds.model.activations import ACTIVATIONS
from palm_ds.model.attention import AttentionPlan, attend, plan_attention
from palm_ds.model.batch import Batch
from palm_ds.model.config import PRESETS, EncoderConfig
from palm_ds.model.kernels import Kernels, add_dropout, layer_norm

__all__ = [
    "PRESETS",
    "Encoder",
    "EncoderConfig",
    "EncoderLayer",
    "Pooler",
    "encoder_class",
    "build_encoder",
    "init_weights",
    "gather_positions",
]

PLAIN = Kernels()


class EncoderLayer(nn.Module):
    """One encoder layer: each half ends in dropout, add, LayerNorm ("dan" in ERNIE's code)."""

    def __init__(self, config: EncoderConfig, kernels: Kernels):
        super().__init__()
        width = config.hidden_size
        self.num_heads, self.activation = config.num_heads, ACTIVATIONS[config.activation]
        self.dropout_rate, self.attention_rate = config.dropout, config.attention_dropout
        self.dropout_form = kernels.dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.attention_norm = layer_norm(width, config.layer_norm_eps, kernels.layer_norm)
        self.expand = nn.Linear(width, config.feed_forward_size)
        self.contract = nn.Linear(config.feed_forward_size, width)
        self.output_norm = layer_norm(width, config.layer_norm_eps, kernels.layer_norm)

    def forward(
        self, x: torch.Tensor, plan: AttentionPlan, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(rows, length, hidden); or (n, hidden), of the flat positions `at` (n,) alone."""
        x, seen = gather_positions(at, x, self.attention(x, plan))
        x = self.attention_norm(self.residual_dropout(x, self.project(seen)))
        return self.output_norm(self.residual_dropout(x, self.feed_forward(x)))

    def attention(self, x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """(rows, length, hidden): what each token sees of its block, before `project`."""
        rate = self.attention_rate if self.training else 0.0
        return attend(self.qkv(x), plan, num_heads=self.num_heads, dropout=rate)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """The feed-forward part, (..., width) -> (..., width)."""
        return self.contract(self.activation(self.expand(x)))  # within: (..., intermediate)

    def residual_dropout(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x + dropout(y)."""
        return add_dropout(x, y, self.dropout_rate if self.training else 0.0, self.dropout_form)


def gather_positions(at: torch.Tensor | None, *each: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of tensors (rows, length, any) the flat positions `at` (n,), as (n, any); all, without."""
    return each if at is None else tuple(x.flatten(0, 1).index_select(0, at) for x in each)


class Pooler(nn.Module):
    """What a head of whole texts reads: tanh of a linear map, (n, hidden) -> (n, hidden)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(rows))


class Encoder(nn.Module):
    """Packed rows of ids to a vector for every token.

    `recompute` keeps only each layer's input for the backward pass and computes the rest again:
    less memory, a third more work, the same numbers.

    A subclass has layers of its own (`layer`) or a forward of its own, under the same contract; its
    constructor takes further keywords, a recipe's `backbone.options`. It keeps `word` and `pooler`,
    and every parameter takes part in every forward.
    """

    def __init__(self, config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False):
        super().__init__()
        assert config.vocab_size is not None, "vocab_size is filled from the tokenizer before"
        self.config, self.kernels, self.recompute = config, kernels, recompute
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_positions, config.hidden_size)
        self.segment = nn.Embedding(config.token_types, config.hidden_size)
        if config.task_types:
            self.task = nn.Embedding(config.task_types, config.hidden_size)
        self.norm = layer_norm(config.hidden_size, config.layer_norm_eps, kernels.layer_norm)
        self.layers = nn.ModuleList(self.layer(number) for number in range(config.num_layers))
        self.pooler = Pooler(config.hidden_size)
        init_weights(self, config.init_range)
        if kernels.compile == "on":
            for layer in self.layers:
                layer.compile()

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def layer(self, number: int) -> nn.Module:
        """The layer of a number from 0, called as `EncoderLayer` is; only the last gets `at`."""
        return EncoderLayer(self.config, self.kernels)

    def forward(self, batch: Batch, at: torch.Tensor | None = None) -> torch.Tensor:
        """(rows, length, hidden). What stands at padding is finite and means nothing. With flat
        positions `at` (n,): (n, hidden) of those, and most of the last layer for no others."""
        x = self._embed(batch)
        compiled = self.kernels.compile == "on"
        plan = plan_attention(batch, self.kernels.attention, compiled=compiled)
        for number, layer in enumerate(self.layers, 1):
            of = () if at is None or number < len(self.layers) else (at,)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, plan, *of, use_reentrant=False)
            else:
                x = layer(x, plan, *of)
        return x

    def _embed(self, batch: Batch) -> torch.Tensor:
        # ERNIE's order of summation: word, position, segment, task.
        x = self.word(batch.ids) + self.position(batch.positions + self.config.position_offset)
        x = x + self.segment(batch.segments)
        if self.config.task_types:
            x = x + self.task(batch.task_ids)
        return F.dropout(self.norm(x), self.config.dropout, self.training)


def encoder_class(config: EncoderConfig) -> type[Encoder]:
    """The encoder of a recipe: `backbone.kind`, or the one here. Raises UserError where there is no
    such class, or it has no such options."""
    if not config.kind:
        return Encoder
    found = find_class(config.kind, Encoder, "backbone.kind")
    taken = ("kernels", "recompute")
    check_options(found, config.options, "backbone.options", base=Encoder, taken=taken)
    return found


def build_encoder(
    config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False
) -> Encoder:
    """An encoder with first weights, of the class that the numbers are for."""
    return encoder_class(config)(config, kernels, recompute=recompute, **config.options)


def init_weights(module: nn.Module, deviation: float) -> None:
    """The first weights of every linear map and embedding within, in module order."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(part.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
