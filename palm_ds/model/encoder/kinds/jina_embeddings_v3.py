"""jina-embeddings-v3 (Sturua et al. 2024, arXiv 2409.10173) without its adapters: XLM-RoBERTa with
rotary positions."""

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
class JinaEmbeddingsV3Options(Settings):
    """`backbone.options` of this encoder."""

    rotary_base: RotaryBase = 20_000.0
    """Base of the rotary positions."""


class JinaEmbeddingsV3(TransformerEncoder):
    """The encoder of jina-embeddings-v3."""

    hf = "jina_embeddings_v3"
    options_type: ClassVar[type | None] = JinaEmbeddingsV3Options
    defaults: ClassVar[Mapping[str, Any]] = {
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
