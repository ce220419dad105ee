"""jina-embeddings-v3's folders as transformers has them, without adapters.

Files have the names of the hub, which transformers writes too; the names of its modules are read as
well. The heads are RoBERTa's: the classifier of texts has the pooler as its own dense layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.rotary_bert import JinaEmbeddingsV3, JinaEmbeddingsV3Options
from palm_ds.weights.formats.huggingface.architecture import (
    SEGMENTS,
    Architecture,
    Family,
    Names,
    both_ends,
    usual_config_json,
)
from palm_ds.weights.formats.huggingface.bert_like import ROBERTA_MASKED_LM, head_names, tied_output
from palm_ds.weights.formats.huggingface.check_config import USUAL_CHECKS, USUAL_KEYS, check_values
from palm_ds.weights.formats.huggingface.rotary import ATTENTION_MODULES, RUN_KEYS, rotary_base

_HUB = {
    "qkv": ("mixer.Wqkv",),
    "project": ("mixer.out_proj",),
    "attention_norm": ("norm1",),
    "expand": ("mlp.fc1",),
    "contract": ("mlp.fc2",),
    "output_norm": ("norm2",),
}
_NATIVE = {
    **_HUB,
    "qkv": tuple(f"self_attn.{x}_proj" for x in "qkv"),
    "project": ("self_attn.o_proj",),
    "attention_norm": ("post_attention_layernorm",),
    "output_norm": ("post_mlp_layernorm",),
}
_NATIVE_NAMES, _OWN_DENSE, _NO_POOLER = "native", "own dense", "no pooler"
"""Layouts; a file may have the first two together."""
_DEFAULTS = {
    "vocab_size": 250_002,
    "hidden_size": 1024,
    "num_layers": 24,
    "num_heads": 16,
    "intermediate_size": 4096,
}


class JinaEmbeddingsV3Architecture(Architecture):
    """The architecture of `kind: jina_embeddings_v3`."""

    kind = "jina_embeddings_v3"
    families: ClassVar[Mapping[str, Family]] = {
        "jina_embeddings_v3": Family(
            class_prefix="JinaEmbeddingsV3", tensor_prefix="roberta", masked_lm_activation="gelu"
        )
    }
    words = "embeddings.word_embeddings.weight"
    layer = "encoder.layers"
    task_table = SEGMENTS
    tied: ClassVar[Mapping[str, str]] = tied_output(ROBERTA_MASKED_LM)
    heads = ("lm_head", "classifier", "qa_outputs")
    masked_lm = ("lm_head.",)
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    classes = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    run_keys: ClassVar[Mapping[str, type | None]] = {
        **dict.fromkeys(USUAL_CHECKS),
        **RUN_KEYS,
    }

    lora_layer = "layers"
    lora_modules: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        **ATTENTION_MODULES,
        "intermediate": "mlp.fc1",
        "output": "mlp.fc2",
    }

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        native, own_dense = _NATIVE_NAMES in layout, _OWN_DENSE in layout
        stems: Names = {
            "backbone.word.weight": (self.words,),
            "backbone.segment.weight": ("embeddings.token_type_embeddings.weight",),
            "backbone.norm": ("embeddings.LayerNorm" if native else "emb_ln",),
        }
        prefix = "layers" if native else self.layer
        for i in range(config.num_layers):
            for ours, hf in (_NATIVE if native else _HUB).items():
                stems[f"backbone.layers.{i}.{ours}"] = tuple(f"{prefix}.{i}.{x}" for x in hf)
        if layout != _NO_POOLER:
            stems["backbone.pooler.dense"] = ("classifier.dense" if own_dense else "pooler.dense",)
        classifier = "classifier.out_proj" if own_dense else "classifier"
        return both_ends({**stems, **head_names(ROBERTA_MASKED_LM, classifier)})

    def layout_of(self, kind: str, ending: str) -> str:
        if ending == "ForSequenceClassification":
            return _OWN_DENSE
        return "" if ending == "Model" else _NO_POOLER

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        native = any(name.startswith("layers.") for name in names)
        own_dense = "classifier.out_proj.weight" in names
        return " ".join([_NATIVE_NAMES] * native + [_OWN_DENSE] * own_dense)

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_values(about, USUAL_CHECKS, where)
        own = {ours: about[key] for key, ours in USUAL_KEYS.items() if about.get(key) is not None}
        values = {**JinaEmbeddingsV3.defaults, **_DEFAULTS, **own, "kind": self.kind}
        if own.get("activation", "gelu") != "gelu":
            values["head_activation"] = "gelu"
        base = rotary_base(about, where)
        if base not in (None, JinaEmbeddingsV3Options().rotary_base):
            values["options"] = {"rotary_base": base}
        return EncoderConfig.from_dict(values, where)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        options: JinaEmbeddingsV3Options = JinaEmbeddingsV3.options_of(config)
        rotary = {"rope_type": "default", "rope_theta": float(options.rotary_base)}
        return {**usual_config_json(config), "rope_parameters": rotary}
