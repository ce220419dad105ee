"""ELECTRA: discriminators and generators, with BERT's names.

A generator has a masked-LM head, a discriminator one that tells replaced tokens from others. Each
class that reads whole texts has its own linear map in front of the classifier; it is the pooler of
our encoder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.bert import Electra
from palm_ds.weights.formats.huggingface.architecture import REPLACED_TOKENS, Family, Names
from palm_ds.weights.formats.huggingface.bert_like import BertLike
from palm_ds.weights.formats.huggingface.check_config import check_only, check_values, whole

_MASKED_LM = {
    "dense": "generator_predictions.dense",
    "norm": "generator_predictions.LayerNorm",
    "bias": "generator_lm_head.bias",
    "decoder": "generator_lm_head.weight",
}
_POOLERS = {
    "ForSequenceClassification": "classifier.dense",
    "ForMultipleChoice": "sequence_summary.summary",
}
"""{class that reads whole texts: its pooler, which is the layout's name}"""
_SUMMARY: dict[str, tuple[Any, ...]] = {
    "summary_type": ("first",),
    "summary_use_proj": (True,),
    "summary_activation": ("gelu",),
}
"""The class for choices computes this before its classifier; no other class reads it."""
_CLASS_DEFAULTS = {
    "vocab_size": 30_522,
    "embedding_size": 128,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}


class ElectraArchitecture(BertLike):
    """The architecture of `kind: electra`."""

    kind = "electra"
    families = {
        "electra": Family(
            class_prefix="Electra", tensor_prefix="electra", masked_lm_activation="gelu"
        )
    }
    task_table = "segment"
    tied = {_MASKED_LM["decoder"]: BertLike.words}
    heads = (
        "generator_predictions",
        "generator_lm_head",
        "discriminator_predictions",
        "classifier",
        "sequence_summary",
        "qa_outputs",
    )
    detection = "ForPreTraining"
    masked_lm = ("generator_predictions.", "generator_lm_head.")
    buffers = ("embeddings.position_ids", "embeddings.token_type_ids")
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    run_keys = {
        **BertLike.run_keys,
        "embedding_size": None,
        "summary_type": None,
        "summary_activation": None,
        "summary_use_proj": bool,
    }

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        further: Names = {
            "backbone.widen": ("embeddings_project",),
            f"heads.{REPLACED_TOKENS}.dense": ("discriminator_predictions.dense",),
            f"heads.{REPLACED_TOKENS}.out": ("discriminator_predictions.dense_prediction",),
        }
        if layout:
            further["backbone.pooler.dense"] = (layout,)
        own_dense = layout == _POOLERS["ForSequenceClassification"]
        return self.all_names(config, further, _MASKED_LM, own_dense=own_dense)

    def layout_of(self, kind: str, ending: str) -> str:
        return _POOLERS.get(ending, "")

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        return next((x for x in _POOLERS.values() if f"{x}.weight" in names), "")

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_values(about, {"embedding_size": whole(1, 65_536)}, where)
        if any(name.endswith("ForMultipleChoice") for name in about.get("architectures") or ()):
            check_only(about, _SUMMARY, where)
        values = {**_CLASS_DEFAULTS, **about}
        size = values["embedding_size"]
        options = {} if size == values["hidden_size"] else {"embedding_size": size}
        return self.read_usual(values, where, masked_lm_activation="gelu", options=options)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        return {
            **super().config_json(config, kind),
            "embedding_size": Electra.embedding_width(config),
            **{key: right[0] for key, right in _SUMMARY.items()},
        }
