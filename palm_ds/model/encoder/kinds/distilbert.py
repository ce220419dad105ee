"""DistilBERT (Sanh et al. 2019, arXiv 1910.01108): BERT's layers without token types, and ReLU
instead of tanh in front of heads that read whole texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


class DistilBert(TransformerEncoder):
    """The encoder of DistilBERT, of six layers."""

    hf = "distilbert"
    defaults: ClassVar[Mapping[str, Any]] = {"num_layers": 6, "token_types": 1, "task_types": 0}

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        return TransformerSpec(
            layers=(LayerSpec(),) * config.num_layers,
            token_types=False,
            pooler_activation="relu",
        )
