"""What Hugging Face would call the parts of throwaway.py: the second file of an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from palm_ds.model.config.config import EncoderConfig
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    MASKED_WORDS,
    Architecture,
    Family,
    Names,
    both_ends,
)

_LAYER = {
    "qkv.weight": ("attn.q.weight", "attn.k.weight", "attn.v.weight"),
    "project.weight": ("attn.o.weight",),
    "attention_norm.weight": ("norm1.weight",),
    "expand.weight": ("mlp.gate.weight", "mlp.up.weight"),
    "contract.weight": ("mlp.down.weight",),
    "output_norm.weight": ("norm2.weight",),
}
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "layer_norm_eps": "norm_eps",
}


class ThrowawayArchitecture(Architecture):
    kind = "tests.end_to_end.new_architecture.throwaway.Published"
    families: ClassVar[Mapping[str, Family]] = {
        "throwaway": Family(class_prefix="Throwaway", tensor_prefix="model")
    }
    words = "embed.weight"
    layer = "blocks"
    tied: ClassVar[Mapping[str, str]] = {"lm_head.decoder.weight": words}
    heads = ("lm_head", "classifier")
    masked_lm = ("lm_head.",)
    run_keys: ClassVar[Mapping[str, type | None]] = {}

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        names: Names = {
            "backbone.word.weight": (self.words,),
            "backbone.norm.weight": ("embed_norm.weight",),
            "backbone.final_norm.weight": ("final_norm.weight",),
            "backbone.pooler.dense": ("pooler",),
            f"heads.{MASKED_WORDS}.dense": ("lm_head.dense",),
            f"heads.{MASKED_WORDS}.norm.weight": ("lm_head.norm.weight",),
            f"heads.{MASKED_WORDS}.bias": ("lm_head.bias",),
            f"heads.{CLASSIFIER}.out": ("classifier",),
        }
        for i in range(config.num_layers):
            for ours, its in _LAYER.items():
                names[f"backbone.layers.{i}.{ours}"] = tuple(f"blocks.{i}.{x}" for x in its)
        return both_ends(names)

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        values = {ours: about[its] for ours, its in _KEYS.items()}
        values |= {"token_types": 1, "task_types": 0, "kind": self.kind}
        options = {"rotary_base": about["rope_theta"]}
        return EncoderConfig.from_dict({**values, "options": options}, where)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        values = {its: getattr(config, ours) for ours, its in _KEYS.items()}
        return {**values, "rope_theta": config.options.get("rotary_base", 10_000.0)}
