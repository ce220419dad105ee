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
    REPLACED_TOKENS,
    SEGMENTS,
    Family,
    Names,
    both_ends,
    usual_config_json,
)
from palm_ds.weights.formats.huggingface.bert_like import (
    EMBEDDINGS,
    RUN_KEYS,
    BertLike,
    body_names,
    head_names,
    read_usual,
)
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
    families: ClassVar[Mapping[str, Family]] = {
        "electra": Family(
            class_prefix="Electra", tensor_prefix="electra", masked_lm_activation="gelu"
        )
    }
    task_table = SEGMENTS
    tied: ClassVar[Mapping[str, str]] = {_MASKED_LM["decoder"]: EMBEDDINGS["word.weight"]}
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
    run_keys: ClassVar[Mapping[str, type | None]] = {
        **RUN_KEYS,
        "embedding_size": None,
        "summary_type": None,
        "summary_activation": None,
        "summary_use_proj": bool,
    }

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        stems = body_names(self.layers_in_file(config))
        stems["backbone.widen"] = ("embeddings_project",)
        head = f"heads.{REPLACED_TOKENS}"
        stems[f"{head}.dense"] = ("discriminator_predictions.dense",)
        stems[f"{head}.out"] = ("discriminator_predictions.dense_prediction",)
        if layout:
            stems["backbone.pooler.dense"] = (layout,)
        own_dense = layout == _POOLERS["ForSequenceClassification"]
        classifier = "classifier.out_proj" if own_dense else "classifier"
        return both_ends({**stems, **head_names(_MASKED_LM, classifier)})

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
