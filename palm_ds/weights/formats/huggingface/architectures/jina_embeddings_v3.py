"""jina-embeddings-v3's folders as transformers has them, without adapters.

Files have the names of the hub, which transformers writes too; the names of its modules are read as
well. The heads are RoBERTa's: the classifier of texts has the pooler as its own dense layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.rotary_bert import JinaEmbeddingsV3, JinaEmbeddingsV3Options
from palm_ds.weights.formats.huggingface.architecture import Family, Names
from palm_ds.weights.formats.huggingface.bert_like import ROBERTA_MASKED_LM, tied_output
from palm_ds.weights.formats.huggingface.check_config import USUAL_CHECKS, USUAL_KEYS, read_values
from palm_ds.weights.formats.huggingface.rotary import LLAMA_MODULES, RotaryBert, rotary_base

_HUB = {
    "qkv": "mixer.Wqkv",
    "project": "mixer.out_proj",
    "attention_norm": "norm1",
    "expand": "mlp.fc1",
    "contract": "mlp.fc2",
    "output_norm": "norm2",
}
_NATIVE = {
    **_HUB,
    "qkv": tuple(f"self_attn.{x}_proj" for x in "qkv"),
    "project": "self_attn.o_proj",
    "attention_norm": "post_attention_layernorm",
    "output_norm": "post_mlp_layernorm",
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


class JinaEmbeddingsV3Architecture(RotaryBert):
    """The architecture of `kind: jina_embeddings_v3`."""

    kind = "jina_embeddings_v3"
    families = {
        "jina_embeddings_v3": Family(
            class_prefix="JinaEmbeddingsV3", tensor_prefix="roberta", masked_lm_activation="gelu"
        )
    }
    layer = "encoder.layers"
    hub_parts = _HUB
    native_parts = _NATIVE
    task_table = "segment"
    tied = tied_output(ROBERTA_MASKED_LM)
    heads = ("lm_head", "classifier", "qa_outputs")
    masked_lm = ("lm_head.",)
    classes = (*RotaryBert.classes, "ForQuestionAnswering")
    run_keys = {**dict.fromkeys(USUAL_CHECKS), **RotaryBert.run_keys}
    lora_modules = {**LLAMA_MODULES, "intermediate": "mlp.fc1", "output": "mlp.fc2"}

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        native, own_dense = _NATIVE_NAMES in layout, _OWN_DENSE in layout
        pooler = "classifier.dense" if own_dense else "pooler.dense"
        return self.all_names(
            config,
            ROBERTA_MASKED_LM,
            native=native,
            pooler="" if layout == _NO_POOLER else pooler,
            own_dense=own_dense,
            answers=True,
        )

    def layout_of(self, kind: str, ending: str) -> str:
        if ending == "ForSequenceClassification":
            return _OWN_DENSE
        return "" if ending == "Model" else _NO_POOLER

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        native = any(name.startswith("layers.") for name in names)
        own_dense = "classifier.out_proj.weight" in names
        return " ".join([_NATIVE_NAMES] * native + [_OWN_DENSE] * own_dense)

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        own = read_values(about, USUAL_KEYS, USUAL_CHECKS, where)
        values = {**JinaEmbeddingsV3.defaults, **_DEFAULTS, **own, "kind": self.kind}
        if own.get("activation", "gelu") != "gelu":
            values["head_activation"] = "gelu"
        base = rotary_base(about, where)
        if base not in (None, JinaEmbeddingsV3Options().rotary_base):
            values["options"] = {"rotary_base": base}
        return EncoderConfig.from_dict(values, where)
