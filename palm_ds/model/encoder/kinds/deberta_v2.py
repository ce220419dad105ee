"""DeBERTa v2 and v3 (He et al. 2021, arXiv 2006.03654 and 2111.09543): BERT's layers with
disentangled attention, mostly without token types and absolute positions.

    word (+ position) (+ token type) (+ task) embeddings -> LayerNorm -> dropout
    score of i and j = (q_i . k_j + q_i . K(R_ij) + k_j . Q(R_ij)) / sqrt(3 head size)

R is one table of distances for all layers; K and Q are each layer's maps of tokens, or maps of
their own. The largest models of v2 add a convolution over the embeddings to the first layer's
output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, NonNegativeInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings, one_of
from palm_ds.model.config.config import ACTIVATIONS, EncoderConfig
from palm_ds.model.encoder.layer import Convolution, LayerSpec
from palm_ds.model.encoder.positions import Disentangled
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


@dataclass(frozen=True, kw_only=True)
class DebertaV2Options(Settings):
    """`backbone.options` of this encoder."""

    content_to_position: bool = True
    """Whether what a token contains is compared with where others are."""
    position_to_content: bool = True
    """Whether where a token is is compared with what others contain."""
    buckets: Annotated[int, Field(ge=0, multiple_of=2)] = 256
    """Rows of the table of distances for each direction; 0: one for each distance."""
    longest: int = 512
    """The largest distance."""
    distance_norm: bool = True
    """Whether the table of distances has a LayerNorm."""
    shared_maps: bool = True
    """Whether distances go through the query and key matrices of tokens; `false`: through
    others."""
    positions: bool = False
    """Whether there is a position embedding as well."""
    token_types: bool = False
    """Whether there is a token type embedding."""
    convolution: NonNegativeInt = 0
    """Tokens that the convolution beside the first layer sees, an odd number; 0: none."""
    convolution_activation: Annotated[str, one_of(ACTIVATIONS)] = "gelu"
    """Activation of the convolution."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.content_to_position or self.position_to_content):
            raise UserError(
                "backbone.options: content_to_position and position_to_content are both false; "
                "set one of them"
            )
        if self.longest < max(self.buckets // 2 + 2, 1):
            raise UserError(
                "backbone.options: buckets must be at most 2 (longest - 2), got "
                f"buckets {self.buckets} and longest {self.longest}"
            )
        if self.convolution and not self.convolution % 2:
            raise UserError(
                f"backbone.options.convolution: must be 0 or odd, got {self.convolution}"
            )


class DebertaV2(TransformerEncoder):
    """The encoder of DeBERTa v2, v3 and mDeBERTa."""

    hf = "deberta_v2"
    options_type = DebertaV2Options
    defaults = {
        "token_types": 1,
        "task_types": 0,
        "layer_norm_eps": 1e-7,
    }
    detects_in_context = True

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        options: DebertaV2Options = cls.options_of(config)
        layer = LayerSpec(
            disentangled=Disentangled(
                content_to_position=options.content_to_position,
                position_to_content=options.position_to_content,
                buckets=options.buckets,
                longest=options.longest,
                own_maps=not options.shared_maps,
            )
        )
        first = layer
        if options.convolution:
            made = Convolution(options.convolution, options.convolution_activation)
            first = replace(layer, convolution=made)
        return TransformerSpec(
            layers=(first, *(layer,) * (config.num_layers - 1)),
            learned_positions=options.positions,
            token_types=options.token_types,
            distance_norm=options.distance_norm,
            pooler_activation="gelu",
        )
