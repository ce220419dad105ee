"""An architecture of somebody's: norms before each half, rotary positions, a gated feed-forward
network, no biases."""

from __future__ import annotations

from dataclasses import dataclass

import palm_ds as palm
from palm_ds.model.config.config import EncoderConfig


@dataclass(frozen=True, kw_only=True)
class ThrowawayOptions:
    """`backbone.options`."""

    rotary_base: float = 10_000.0
    """Of the angles by which queries and keys are turned."""


class Throwaway(palm.TransformerEncoder):
    options_type = ThrowawayOptions

    @classmethod
    def spec(cls, config: EncoderConfig) -> palm.TransformerSpec:
        layer = palm.LayerSpec(
            norm_place="pre",
            norm="layer_norm_without_bias",
            qkv_bias=False,
            attention_output_bias=False,
            intermediate_bias=False,
            output_bias=False,
            gated=True,
            activation="gelu",
            rotary_base=cls.options_of(config).rotary_base,
        )
        return palm.TransformerSpec(
            layers=(layer,) * config.num_layers,
            learned_positions=False,
            token_types=False,
            norm="layer_norm_without_bias",
            final_norm=True,
        )


class Published(Throwaway):
    """The same, with names at Hugging Face (throwaway_hf.py)."""

    hf = "tests.end_to_end.new_architecture.throwaway_hf.ThrowawayArchitecture"
