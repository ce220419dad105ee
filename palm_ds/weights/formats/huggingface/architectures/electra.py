"""ELECTRA: discriminators and generators, with BERT's names.

A generator has a masked-LM head, a discriminator one that tells replaced tokens from others. Each
class that reads whole texts has its own linear map in front of the classifier; it is the pooler of
our encoder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.bert import Electra
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    HEAD_CLASSES,
    MASKED_WORDS,
    QUESTION_ANSWERING,
    REPLACED_TOKENS,
    SEGMENTS,
    Architecture,
    Family,
    Names,
    both_ends,
    usual_config_json,
)
from palm_ds.weights.formats.huggingface.bert_like import (
    EMBEDDINGS,
    LORA_MODULES,
    RUN_KEYS,
    body_names,
    read_usual,
)
from palm_ds.weights.formats.huggingface.check_config import check_only, check_values, whole

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


class ElectraArchitecture(Architecture):
    """The architecture of `kind: electra`."""

    kind = "electra"
    families: ClassVar[Mapping[str, Family]] = {
        "electra": Family(
            class_prefix="Electra", tensor_prefix="electra", masked_lm_activation="gelu"
        )
    }
    words = EMBEDDINGS["word.weight"]
    layer = "encoder.layer"
    task_table = SEGMENTS
    tied: ClassVar[Mapping[str, str]] = {"generator_lm_head.weight": words}
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
    classes = tuple(x for x in HEAD_CLASSES if x != "ForNextSentencePrediction")
    buffers = ("embeddings.position_ids", "embeddings.token_type_ids")
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    run_keys: ClassVar[Mapping[str, type | None]] = {
        **RUN_KEYS,
        "embedding_size": None,
        "summary_type": None,
        "summary_activation": None,
        "summary_use_proj": bool,
    }
    lora_modules: ClassVar[Mapping[str, str | tuple[str, ...]]] = LORA_MODULES

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        stems = body_names(self.layers_in_file(config))
        stems["backbone.widen"] = ("embeddings_project",)
        head = f"heads.{MASKED_WORDS}"
        stems[f"{head}.dense"] = ("generator_predictions.dense",)
        stems[f"{head}.norm"] = ("generator_predictions.LayerNorm",)
        stems[f"{head}.bias"] = ("generator_lm_head.bias",)
        stems[f"{head}.decoder"] = ("generator_lm_head.weight",)
        head = f"heads.{REPLACED_TOKENS}"
        stems[f"{head}.dense"] = ("discriminator_predictions.dense",)
        stems[f"{head}.out"] = ("discriminator_predictions.dense_prediction",)
        if layout:
            stems["backbone.pooler.dense"] = (layout,)
        own_dense = layout == _POOLERS["ForSequenceClassification"]
        stems[f"heads.{CLASSIFIER}.out"] = ("classifier.out_proj" if own_dense else "classifier",)
        stems[f"heads.{QUESTION_ANSWERING}.out"] = ("qa_outputs",)
        return both_ends(stems)

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
        return read_usual(values, self.kind, where, masked_lm_activation="gelu", options=options)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        return {
            **usual_config_json(config),
            "embedding_size": Electra.embedding_width(config),
            **{key: right[0] for key, right in _SUMMARY.items()},
        }
