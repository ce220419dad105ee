"""GTE (Zhang et al. 2024, arXiv 2407.19669): BERT with rotary positions and gated feed-forward
networks, whose first linear map has no bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.positions import RotaryBase
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


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
    options_type: ClassVar[type | None] = GteOptions
    defaults: ClassVar[Mapping[str, Any]] = {
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
