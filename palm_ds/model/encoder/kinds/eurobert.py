"""EuroBERT (Boizard et al. 2025, arXiv 2503.05500): Llama's layers with attention in both
directions: norms before each half, rotary positions, gated feed-forward networks, no biases, and
heads of keys and values that several heads of queries share.

    word (+ task) embeddings -> dropout -> layers -> norm

Masked-LM heads are output embeddings of their own and nothing else. Heads of whole texts read a
linear map and its activation: of the first token, of the mean, or (`late`) of each, averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import unbiased_layer
from palm_ds.model.encoder.positions import RotaryBase
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


@dataclass(frozen=True, kw_only=True)
class EuroBertOptions(Settings):
    """`backbone.options` of this encoder."""

    kv_heads: PositiveInt | None = None
    """Heads of keys and values, a divisor of `num_heads`; null: as many."""
    rotary_base: RotaryBase = 250_000.0
    """Base of the rotary positions."""
    text_pooling: Literal["late", "cls", "mean"] = "late"
    """What heads of whole texts read: what the pooler makes of every token, averaged, or of the
    first token's vector or the mean of all."""


class TextTransform(nn.Module):
    """The input of heads that read whole texts: GELU of a linear map, (n, hidden) -> same."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.dense(rows))


class EuroBert(TransformerEncoder):
    """The encoder of EuroBERT."""

    hf = "eurobert"
    options_type = EuroBertOptions
    free_options = ("text_pooling",)
    defaults = {
        "activation": "silu",
        "max_positions": 8192,
        "token_types": 1,
        "task_types": 0,
        "layer_norm_eps": 1e-5,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        options: EuroBertOptions = cls.options_of(config)
        layer = unbiased_layer(
            "rms_norm",
            rotary_base=options.rotary_base,
            kv_heads=options.kv_heads,
        )
        return TransformerSpec(
            layers=(layer,) * config.num_layers,
            learned_positions=False,
            token_types=False,
            norm="rms_norm",
            embedding_norm=False,
            final_norm=True,
            head_transform=False,
            head_output_bias=False,
            tied_output=False,
        )

    @cached_property
    def _text_pooling(self) -> str:
        return self.options_of(self.config).text_pooling

    @property
    def averages_texts(self) -> bool:
        return self._text_pooling != "cls"

    @property
    def pools_each_token(self) -> bool:
        return self._text_pooling == "late"

    def build_pooler(self) -> nn.Module:
        return TextTransform(self.hidden_size)
