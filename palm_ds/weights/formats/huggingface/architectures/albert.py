"""ALBERT, whose layers share their weights: a file has each group of layers once.

The pretraining class has a head for the order of two sentences, whose class 0 is the original
order. Ours is reversed, as in the task `sentence_order`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.albert import Albert, AlbertOptions
from palm_ds.weights.formats.contents import TensorEntry
from palm_ds.weights.formats.huggingface.architecture import SENTENCE_ORDER, Entries, Family, Names
from palm_ds.weights.formats.huggingface.bert_like import BertLike, tied_output
from palm_ds.weights.formats.huggingface.check_config import check_values, whole

_LAYER = {
    "qkv": ("attention.query", "attention.key", "attention.value"),
    "project": "attention.dense",
    "attention_norm": "attention.LayerNorm",
    "expand": "ffn",
    "contract": "ffn_output",
    "output_norm": "full_layer_layer_norm",
}
_MASKED_LM = {
    "dense": "predictions.dense",
    "norm": "predictions.LayerNorm",
    "bias": "predictions.bias",
    "decoder": "predictions.decoder.weight",
}
_GROUPS, _OF_GROUP = "num_hidden_groups", "inner_group_num"
_OPTIONS = {
    "embedding_size": "embedding_size",
    _GROUPS: "groups",
    _OF_GROUP: "layers_per_group",
}
"""{key of config.json: our option}"""
_CHECKS = {
    "embedding_size": whole(1, 65_536),
    _GROUPS: whole(1, 1_000),
    _OF_GROUP: whole(1, 100),
}
_CLASS_DEFAULTS = {
    "vocab_size": 30_000,
    "hidden_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 64,
    "intermediate_size": 16_384,
}


class AlbertArchitecture(BertLike):
    """The architecture of `kind: albert`."""

    kind = "albert"
    families = {
        "albert": Family(class_prefix="Albert", tensor_prefix="albert", pair_head=SENTENCE_ORDER)
    }
    layer = "encoder.albert_layer_groups"
    parts = _LAYER
    task_table = "segment"
    tied = tied_output(_MASKED_LM)
    heads = ("predictions", "sop_classifier", "classifier", "qa_outputs")
    masked_lm = ("predictions.",)
    buffers = ("embeddings.position_ids", "embeddings.token_type_ids")
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    run_keys = {**BertLike.run_keys, **dict.fromkeys(_OPTIONS)}

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        further: Names = {
            "backbone.widen": ("encoder.embedding_hidden_mapping_in",),
            "backbone.pooler.dense": ("pooler",),
            f"heads.{SENTENCE_ORDER}.out": ("sop_classifier.classifier",),
        }
        return self.all_names(config, further, _MASKED_LM)

    def layers_in_file(self, config: EncoderConfig) -> list[str]:
        options: AlbertOptions = Albert.options_of(config)
        return [
            f"{self.layer}.{group}.albert_layers.{layer}"
            for group in range(options.groups)
            for layer in range(options.layers_per_group)
        ]

    def arrange(self, entries: Entries, config: EncoderConfig) -> Entries:
        return _turned(entries)

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_values(about, _CHECKS, where)
        options = {ours: about[key] for key, ours in _OPTIONS.items() if key in about}
        options = {x: y for x, y in options.items() if y != _DEFAULTS[x]}
        config = self.read_usual({**_CLASS_DEFAULTS, **about}, where, options=options)
        return replace(config, num_layers=config.num_layers * about.get(_OF_GROUP, 1))

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        options = asdict(Albert.options_of(config))
        return {
            **super().config_json(config, kind),
            **{key: options[ours] for key, ours in _OPTIONS.items()},
            "num_hidden_layers": config.num_layers // options["layers_per_group"],
        }

    def reshape(
        self, kept: Entries, config: EncoderConfig, kind: str, task_id: int
    ) -> tuple[Entries, EncoderConfig, dict[str, str]]:
        return super().reshape(_turned(kept), config, kind, task_id)


_DEFAULTS = asdict(AlbertOptions())


def _turned(entries: Entries) -> Entries:
    """With the classes of the head for the order of sentences in reverse."""
    names = [f"heads.{SENTENCE_ORDER}.out.{end}" for end in ("weight", "bias")]
    return entries | {name: _reversed(entries[name]) for name in names if name in entries}


def _reversed(entry: TensorEntry) -> TensorEntry:
    def read() -> torch.Tensor:
        return entry.read().flip(0)

    return replace(entry, read=read, transform="classes reversed")
