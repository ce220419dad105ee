"""DistilBERT, whose tensors and keys of config.json have names of their own.

Its classes for whole texts have a linear map `pre_classifier` in front of the classifier; it is the
pooler of our encoder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from palm_ds.model.config.config import EncoderConfig
from palm_ds.weights.formats.huggingface.architecture import Family, Names
from palm_ds.weights.formats.huggingface.bert_like import BertLike
from palm_ds.weights.formats.huggingface.check_config import (
    USUAL_CHECKS,
    check_values,
    rate,
    text,
    whole,
)

_EPS = 1e-12
"""The eps of every norm, which config.json does not state."""
_LAYER = {
    "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "project": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "expand": "ffn.lin1",
    "contract": "ffn.lin2",
    "output_norm": "output_layer_norm",
}
_MASKED_LM = {
    "dense": "vocab_transform",
    "norm": "vocab_layer_norm",
    "bias": "vocab_projector.bias",
    "decoder": "vocab_projector.weight",
}
_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
"""{its key of config.json: BERT's}"""
_ALIASES = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
"""{BERT's key: its key}, where transformers takes either, BERT's first (`attribute_map`)."""
_SAME = (
    "vocab_size",
    "max_position_embeddings",
    "initializer_range",
    "pad_token_id",
    "tie_word_embeddings",
)
_CHECKS = {
    **dict.fromkeys(("dim", "hidden_dim"), whole(1, 1_048_576)),
    **dict.fromkeys(("n_layers", "n_heads"), whole(1, 1_024)),
    **dict.fromkeys(("dropout", "attention_dropout"), rate),
    **{alias: USUAL_CHECKS[alias] for alias in _ALIASES},
    "activation": text,
}
_CLASS_DEFAULTS = {"vocab_size": 30_522}


class DistilBertArchitecture(BertLike):
    """The architecture of `kind: distilbert`."""

    kind = "distilbert"
    families = {"distilbert": Family(class_prefix="DistilBert", tensor_prefix="distilbert")}
    layer = "transformer.layer"
    tables = BertLike.without("segment", "task")
    parts = _LAYER
    task_table = "position"
    tied = {_MASKED_LM["decoder"]: BertLike.words}
    heads = (
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector",
        "pre_classifier",
        "classifier",
        "qa_outputs",
    )
    masked_lm = ("vocab_transform.", "vocab_layer_norm.", "vocab_projector.")
    buffers = ("embeddings.position_ids",)
    run_keys = {
        **dict.fromkeys((*_KEYS, *_ALIASES, *_SAME)),
        **dict.fromkeys(("dropout", "attention_dropout", "initializer_range"), float),
        "tie_word_embeddings": bool,
    }

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        further: Names = {} if layout else {"backbone.pooler.dense": ("pre_classifier",)}
        return self.all_names(config, further, _MASKED_LM)

    def layout_of(self, kind: str, ending: str) -> str:
        """Only the classes for whole texts have a place for the pooler."""
        return "" if ending in ("ForSequenceClassification", "ForMultipleChoice") else "no pooler"

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        return "" if "pre_classifier.weight" in names else "no pooler"

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_values(about, _CHECKS, where)
        usual = {usual: about[its] for its, usual in _KEYS.items() if its in about}
        usual |= {alias: about[alias] for alias in _ALIASES if alias in about}
        same = {key: about[key] for key in _SAME if key in about}
        values = {**_CLASS_DEFAULTS, **same, **usual}
        return self.read_usual(values, where, layer_norm_eps=_EPS)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        usual = super().config_json(config, kind)
        return {
            **{key: usual[key] for key in _SAME},
            **{its: usual[key] for its, key in _KEYS.items()},
            "sinusoidal_pos_embds": False,
        }

    def family_of(self, config: EncoderConfig) -> str:
        return self.kind if config.layer_norm_eps == _EPS else ""

    def no_family(self, config: EncoderConfig) -> str:
        return (
            f"Hugging Face's DistilBert always has layer_norm_eps {_EPS}, but this encoder has "
            f"{config.layer_norm_eps}"
        )
