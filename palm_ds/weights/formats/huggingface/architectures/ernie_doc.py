"""ERNIE-Doc, which PaddleNLP has and transformers does not: names of its own, and no class with a
masked-LM head.

PaddleNLP's classes with a classifier call it `linear`, whatever it reads. Token types are what
ERNIE's static graph calls tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.ernie_doc import ErnieDoc
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    QUESTION_ANSWERING,
    Family,
    Names,
    both_ends,
    sizes_json,
)
from palm_ds.weights.formats.huggingface.bert_like import BertLike
from palm_ds.weights.formats.huggingface.check_config import check_only

_TABLES = {
    "word.weight": "embeddings.word_emb.weight",
    "position.weight": "embeddings.pos_emb.weight",
    "segment.weight": "embeddings.token_type_emb.weight",
    "norm": "embeddings.norms.0",
    "position_norm": "embeddings.norms.1",
    "segment_norm": "embeddings.norms.2",
    "pooler.dense": "pooler.dense",
}
_PARTS = {
    "qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "distance_map": "attn.r_proj",
    "type_map": "attn.t_proj",
    "project": "attn.out_proj",
    "attention_norm": "norm1",
    "expand": "ffn.linear1",
    "contract": "ffn.linear2",
    "output_norm": "norm2",
}
_VECTORS = {
    "content_bias": "attn.r_w_bias",
    "distance_bias": "attn.r_r_bias",
    "type_bias": "attn.r_t_bias",
}
_FIXED = {"cls_token_idx": -1, "normalize_before": False, "rel_pos_params_sharing": False}


class ErnieDocArchitecture(BertLike):
    """The architecture of `kind: ernie_doc`."""

    kind = "ernie_doc"
    families = {
        "ernie_doc": Family(
            class_prefix="ErnieDoc",
            tensor_prefix="ernie_doc",
            paddle_tokenizer="ErnieDocTokenizer",
            paddle_only=True,
            without_masked_lm=True,
        )
    }
    words = _TABLES["word.weight"]
    layer = "encoder.layers"
    tables = _TABLES
    parts = _PARTS
    tied = {}
    heads = ("linear",)
    masked_lm = ()
    classes = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    run_keys = {}
    lora_modules = {}

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        stems = self.body_names(config)
        stems[f"heads.{CLASSIFIER}.out"] = stems[f"heads.{QUESTION_ANSWERING}.out"] = ("linear",)
        return both_ends(stems) | self.layer_names(config, _VECTORS)

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_only(about, {key: (value, None) for key, value in _FIXED.items()}, where)
        options = {"memory_length": about.get("memory_len", 128)}
        return self.read_usual(about, where, options=options)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        return {
            **sizes_json(config),
            "hidden_act": config.activation,
            "hidden_dropout_prob": float(config.dropout),
            "attention_dropout_prob": float(config.attention_dropout),
            "relu_dropout": 0.0,
            "max_position_embeddings": config.max_positions,
            "task_type_vocab_size": config.token_types,
            "memory_len": ErnieDoc.memory_length(config),
            "initializer_range": float(config.init_range),
            "epsilon": float(config.layer_norm_eps),
            "pad_token_id": config.pad,
            **_FIXED,
        }
