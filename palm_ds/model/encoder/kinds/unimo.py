"""UNIMO's text side (Li et al. 2021, arXiv 2012.15409): BERT's layers, and ReLU instead of tanh in
front of heads that read whole texts.

The English models read images and texts in one stream; here they read texts, as in ERNIE's code for
tasks without images: RoBERTa's positions and no token types (`token_types: 1`, without a table).
The Chinese UNIMO-text, which only PaddleNLP has, adds token types and counts positions from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


class Unimo(TransformerEncoder):
    """The encoder of UNIMO and UNIMO-text."""

    paddle = "unimo"
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_positions": 514,
        "position_offset": 2,
        "pad": 1,
        "token_types": 1,
        "task_types": 0,
        "layer_norm_eps": 1e-5,
    }

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        return TransformerSpec(
            layers=(LayerSpec(),) * config.num_layers,
            token_types=config.token_types > 1,
            pooler_activation="relu",
        )
