"""MPNet (Song et al. 2020, arXiv 2004.09297): BERT's layers without token types, with positions
from 2 and numbers of distances that are added to the scores of attention in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


@dataclass(frozen=True, kw_only=True)
class MPNetOptions(Settings):
    """`backbone.options` of this encoder."""

    relative_buckets: Annotated[int, Field(ge=4, multiple_of=4)] = 32
    """Buckets of distances."""


class MPNet(TransformerEncoder):
    """The encoder of MPNet and most models of sentence-transformers."""

    hf = "mpnet"
    options_type: ClassVar[type | None] = MPNetOptions
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
            token_types=False,
            relative_buckets=cls.options_of(config).relative_buckets,
        )
