"""BERT with rotary positions instead of learned ones.

nomic_bert           NomicBert (Nussbaum et al. 2024, arXiv 2402.01613): gated feed-forward
                     networks, and no biases in its layers' linear maps
gte                  GTE (Zhang et al. 2024, arXiv 2407.19669): gated feed-forward networks,
                     whose first linear map has no bias
jina_embeddings_v3   jina-embeddings-v3 (Sturua et al. 2024, arXiv 2409.10173) without its
                     adapters: XLM-RoBERTa with rotary positions
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.positions import RotaryBase
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


@dataclass(frozen=True, kw_only=True)
class NomicBertOptions(Settings):
    """`backbone.options` of this encoder."""

    rotary_base: RotaryBase = 1000.0
    """Base of the rotary positions."""


class NomicBert(TransformerEncoder):
    """The encoder of nomic-bert-2048 and nomic-embed-text."""

    hf = "nomic_bert"
    options_type = NomicBertOptions
    defaults = {
        "activation": "silu",
        "max_positions": 2048,
        "token_types": 2,
        "task_types": 0,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        layer = LayerSpec(
            qkv_bias=False,
            attention_output_bias=False,
            intermediate_bias=False,
            output_bias=False,
            gated=True,
            rotary_base=cls.options_of(config).rotary_base,
        )
        return TransformerSpec(layers=(layer,) * config.num_layers, learned_positions=False)


@dataclass(frozen=True, kw_only=True)
class GteOptions(Settings):
    """`backbone.options` of this encoder."""

    rotary_base: RotaryBase = 160_000.0
    """Base of the rotary positions."""
    rotary_factor: Annotated[float, Field(ge=1)] = 1.0
    """Positions are divided by it before they turn queries and keys."""
    token_types: bool = True
    """Whether there is a token type embedding."""


class Gte(TransformerEncoder):
    """The encoder of gte-multilingual-base and gte-base-en-v1.5."""

    hf = "gte"
    options_type = GteOptions
    defaults = {
        "max_positions": 8192,
        "token_types": 1,
        "task_types": 0,
        "attention_dropout": 0.0,
    }

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        options: GteOptions = cls.options_of(config)
        layer = LayerSpec(
            intermediate_bias=False,
            gated=True,
            rotary_base=options.rotary_base,
            rotary_factor=options.rotary_factor,
        )
        return TransformerSpec(
            layers=(layer,) * config.num_layers,
            learned_positions=False,
            token_types=options.token_types,
        )


@dataclass(frozen=True, kw_only=True)
class JinaEmbeddingsV3Options(Settings):
    """`backbone.options` of this encoder."""

    rotary_base: RotaryBase = 20_000.0
    """Base of the rotary positions."""


class JinaEmbeddingsV3(TransformerEncoder):
    """The encoder of jina-embeddings-v3."""

    hf = "jina_embeddings_v3"
    options_type = JinaEmbeddingsV3Options
    defaults = {
        "max_positions": 8194,
        "token_types": 1,
        "task_types": 0,
        "layer_norm_eps": 1e-5,
        "pad": 1,
    }

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        layer = LayerSpec(rotary_base=cls.options_of(config).rotary_base)
        return TransformerSpec(layers=(layer,) * config.num_layers, learned_positions=False)
