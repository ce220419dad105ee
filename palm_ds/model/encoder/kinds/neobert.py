"""NeoBERT (Le Breton et al. 2025, arXiv 2502.19587): norms before each half, rotary positions that
turn neighboring dimensions, gated feed-forward networks, no biases in its layers.

    word (+ task) embeddings -> dropout -> layers -> norm

Masked-LM heads are output embeddings of their own with a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import unbiased_layer
from palm_ds.model.encoder.positions import RotaryBase
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


@dataclass(frozen=True, kw_only=True)
class NeoBertOptions(Settings):
    """`backbone.options` of this encoder."""

    rotary_base: RotaryBase = 10_000.0
    """Base of the rotary positions."""


class NeoBert(TransformerEncoder):
    """The encoder of NeoBERT."""

    hf = "neobert"
    options_type = NeoBertOptions
    defaults = {
        "activation": "silu",
        "max_positions": 4096,
        "token_types": 1,
        "task_types": 0,
        "layer_norm_eps": 1e-5,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        layer = unbiased_layer(
            "rms_norm",
            rotary_base=cls.options_of(config).rotary_base,
            rotary_neighbors=True,
        )
        return TransformerSpec(
            layers=(layer,) * config.num_layers,
            learned_positions=False,
            token_types=False,
            norm="rms_norm",
            embedding_norm=False,
            final_norm=True,
            head_transform=False,
            tied_output=False,
        )
