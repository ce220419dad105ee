"""ALBERT (Lan et al. 2019, arXiv 1909.11942): BERT with narrow embeddings, and with layers that
share their weights.

    word + position + token type (+ task) embeddings -> LayerNorm -> dropout -> linear map
    num_layers x one layer, or one of several groups of layers
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


@dataclass(frozen=True, kw_only=True)
class AlbertOptions(Settings):
    """`backbone.options` of this encoder."""

    embedding_size: PositiveInt = 128
    """Width of the embeddings."""
    groups: PositiveInt = 1
    """Groups of layers with weights of their own; each computes an equal part of the depth."""
    layers_per_group: PositiveInt = 1
    """Layers of a group, which are computed one after another, again and again."""


class Albert(TransformerEncoder):
    """The encoder of ALBERT. `num_layers` is the depth: layers that are computed, not those that
    have weights."""

    hf = "albert"
    options_type = AlbertOptions
    sharing_options = ("groups", "layers_per_group")
    defaults = {
        "activation": "gelu_new",
        "token_types": 2,
        "task_types": 0,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        options: AlbertOptions = cls.options_of(config)
        return TransformerSpec(
            layers=(LayerSpec(),) * config.num_layers,
            shared=_shared(config.num_layers, options.groups, options.layers_per_group),
            embedding_size=options.embedding_size,
            always_widened=True,
        )


def _shared(depth: int, groups: int, of_group: int) -> tuple[int, ...]:
    """For each layer the number of the one that has its weights. Raises UserError for groups that
    would not be computed, or not as a whole."""
    rounds, rest = divmod(depth, of_group)
    if rest or groups > rounds:
        raise UserError(
            f"backbone.options: {groups} x {of_group} layers (groups, layers_per_group) do not fit "
            f"num_layers {depth}, which must be a multiple of {of_group} and at least "
            f"{groups * of_group}"
        )
    return tuple(
        int(turn / (rounds / groups)) * of_group + layer  # as transformers divides
        for turn in range(rounds)
        for layer in range(of_group)
    )
