"""ELECTRA (Clark et al. 2020, arXiv 2003.10555): BERT's layers over embeddings that may be
narrower, and GELU instead of tanh in front of heads that read whole texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import PositiveInt

from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


@dataclass(frozen=True, kw_only=True)
class ElectraOptions(Settings):
    """`backbone.options` of this encoder."""

    embedding_size: PositiveInt | None = None
    """Width of the embeddings; None: the hidden size."""


class Electra(TransformerEncoder):
    """The encoder of ELECTRA's discriminators and generators."""

    hf = "electra"
    options_type: ClassVar[type | None] = ElectraOptions
    defaults: ClassVar[Mapping[str, Any]] = {"token_types": 2, "task_types": 0}

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        return TransformerSpec(
            layers=(LayerSpec(),) * config.num_layers,
            embedding_size=cls.options_of(config).embedding_size,
            pooler_activation="gelu",
        )
