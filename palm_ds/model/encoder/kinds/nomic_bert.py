"""NomicBert (Nussbaum et al. 2024, arXiv 2402.01613): BERT with rotary positions, gated
feed-forward networks, and no biases in its layers' linear maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
    options_type: ClassVar[type | None] = NomicBertOptions
    defaults: ClassVar[Mapping[str, Any]] = {
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
