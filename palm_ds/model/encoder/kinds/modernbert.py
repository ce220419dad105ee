"""ModernBERT (Warner et al. 2024, arXiv 2412.13663), also in the sizes of Ettin and mmBERT: norms
before each half, rotary positions, gated feed-forward networks, no biases, and local attention in
all layers but every third.

    word (+ task) embeddings -> norm -> dropout -> layers -> norm

Heads that classify read vectors after one more linear map, activation and norm, tokens as well as
whole texts; those of texts read their first token's vector or the mean of all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import nn

from palm_ds.common.settings import Settings
from palm_ds.model.config.config import ACTIVATIONS, EncoderConfig
from palm_ds.model.encoder.layer import build_norm, unbiased_layer
from palm_ds.model.encoder.positions import RotaryBase
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec
from palm_ds.model.kernels import Kernels


@dataclass(frozen=True, kw_only=True)
class ModernBertOptions(Settings):
    """`backbone.options` of this encoder."""

    global_every: PositiveInt = 3
    """Layers of a period, of which the first attends to whole texts."""
    window: PositiveInt = 64
    """Tokens on each side that a token attends to in the other layers."""
    global_rotary_base: RotaryBase = 160_000.0
    """Base of the rotary positions in layers that attend to whole texts."""
    local_rotary_base: RotaryBase = 10_000.0
    """Base of the rotary positions in the other layers."""
    text_pooling: Literal["cls", "mean"] = "cls"
    """What heads of whole texts read: the vector of their first token or the mean of all."""


class PredictionHead(nn.Module):
    """The input of heads that classify: linear map, activation and norm, (n, hidden) -> same."""

    def __init__(self, config: EncoderConfig, kernels: Kernels):
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.activation = ACTIVATIONS[config.head_activation or config.activation]
        self.dense = nn.Linear(size, size, bias=False)
        self.norm = build_norm("layer_norm_without_bias", size, eps, kernels)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(self.activation(self.dense(rows)))


class ModernBert(TransformerEncoder):
    """The encoder of ModernBERT, Ettin and mmBERT."""

    hf = "modernbert"
    options_type = ModernBertOptions
    free_options = ("text_pooling",)
    pools_tokens = True
    rope_options = ("global_rotary_base", "local_rotary_base")
    defaults = {
        "max_positions": 8192,
        "token_types": 1,
        "task_types": 0,
        "layer_norm_eps": 1e-5,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        options: ModernBertOptions = cls.options_of(config)
        local = unbiased_layer(
            "layer_norm_without_bias",
            rotary_base=options.local_rotary_base,
            window=options.window,
        )
        whole = replace(local, window=None, rotary_base=options.global_rotary_base)
        every = options.global_every
        layers = [local if number % every else whole for number in range(config.num_layers)]
        return TransformerSpec(
            layers=(replace(layers[0], attention_norm=False), *layers[1:]),
            learned_positions=False,
            token_types=False,
            norm="layer_norm_without_bias",
            final_norm=True,
            head_norm="layer_norm_without_bias",
            head_bias=False,
            scaled_output_init=True,
        )

    @cached_property
    def _text_pooling(self) -> str:
        return self.options_of(self.config).text_pooling

    @property
    def averages_texts(self) -> bool:
        return self._text_pooling == "mean"

    def build_pooler(self) -> nn.Module:
        return PredictionHead(self.config, self.kernels)
