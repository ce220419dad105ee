"""DeBERTa v2 and v3, and mDeBERTa: BERT's names but for attention.

Masked-LM heads are read under Microsoft's names, `lm_predictions.lm_head`, and under those of
transformers' older class, `cls.predictions`. They are written under Microsoft's, with `legacy:
false`, without which transformers would build an untrained head instead. The head that tells
replaced tokens from others is read and written as `mask_predictions`, which transformers ignores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from palm_ds.common.config import shorten
from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.deberta_v2 import DebertaV2, DebertaV2Options
from palm_ds.weights.formats.huggingface.architecture import REPLACED_TOKENS, Family, Names
from palm_ds.weights.formats.huggingface.bert_like import MASKED_LM, BertLike, tied_output
from palm_ds.weights.formats.huggingface.check_config import check_values, text, truth, whole

_LAYER = {
    **BertLike.parts,
    "qkv": tuple(f"attention.self.{part}_proj" for part in ("query", "key", "value")),
}
_OWN_MAPS = {f"distance_{x}": f"attention.self.pos_{x}_proj" for x in ("query", "key")}
_MICROSOFTS = {
    "dense": "lm_predictions.lm_head.dense",
    "norm": "lm_predictions.lm_head.LayerNorm",
    "bias": "lm_predictions.lm_head.bias",
}
_DETECTION: Names = {
    f"heads.{REPLACED_TOKENS}.norm": ("mask_predictions.LayerNorm",),
    f"heads.{REPLACED_TOKENS}.dense": ("mask_predictions.dense",),
    f"heads.{REPLACED_TOKENS}.out": ("mask_predictions.classifier",),
}
_LEGACY = "legacy"
_TERMS = {"c2p": "content_to_position", "p2c": "position_to_content"}
_CLASS_DEFAULTS = {
    "vocab_size": 128_100,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-7,
    "relative_attention": False,
    "position_biased_input": True,
    "type_vocab_size": 0,
}
_SIZE = whole(-1, 1_048_576)
_CHECKS = {
    "hidden_size": whole(1, 65_536),
    "num_attention_heads": whole(1, 1_024),
    "position_buckets": _SIZE,
    "max_relative_positions": _SIZE,
    "conv_kernel_size": _SIZE,
    **dict.fromkeys(("conv_act", "norm_rel_ebd", "pooler_hidden_act"), text),
    **dict.fromkeys(("relative_attention", "position_biased_input", "share_att_key"), truth),
    "legacy": truth,
    "type_vocab_size": whole(0, 65_536),
}
_ONLY: dict[str, Any] = {
    "relative_attention": True,
    "pooler_hidden_act": "gelu",
    "conv_groups": 1,
}
"""Values that our encoder has, of keys that would change what it computes."""
_POSITIONS = BertLike.tables["position.weight"]


class DebertaV2Architecture(BertLike):
    """The architecture of `kind: deberta_v2`."""

    kind = "deberta_v2"
    families = {"deberta-v2": Family(class_prefix="DebertaV2", tensor_prefix="deberta")}
    tables = BertLike.without("task")
    parts = _LAYER
    task_table = "word"
    tied = tied_output(MASKED_LM)
    heads = ("lm_predictions", "mask_predictions", "cls", "pooler", "classifier", "qa_outputs")
    detection_beside = True
    masked_lm = ("lm_predictions.", "cls.predictions.")
    buffers = ("embeddings.position_ids",)
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    run_keys = {
        **BertLike.run_keys,
        **dict.fromkeys(_CHECKS),
        **dict.fromkeys(("relative_attention", "position_biased_input", "share_att_key"), bool),
        "legacy": bool,
        "pos_att_type": None,
        "conv_groups": None,
    }

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        further: Names = {
            "backbone.distance.weight": ("encoder.rel_embeddings.weight",),
            "backbone.distance_norm": ("encoder.LayerNorm",),
            **self.layer_names(config, _OWN_MAPS),
            "backbone.layers.0.convolution": ("encoder.conv.conv",),
            "backbone.layers.0.convolution_norm": ("encoder.conv.LayerNorm",),
        }
        if layout != _NO_POOLER:
            further["backbone.pooler.dense"] = ("pooler.dense",)
        masked_lm = MASKED_LM if layout == _LEGACY else _MICROSOFTS
        return self.all_names(config, further, masked_lm, heads=_DETECTION)

    def constants(self, config: EncoderConfig) -> tuple[str, ...]:
        read = DebertaV2.options_of(config).positions
        return self.buffers if read else (*self.buffers, _POSITIONS)

    def layout_of(self, kind: str, ending: str) -> str:
        """Only the classes for whole texts have a place for the pooler."""
        return "" if ending in ("ForSequenceClassification", "ForMultipleChoice") else _NO_POOLER

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        return _LEGACY if "cls.predictions.bias" in names else ""

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_values(about, _CHECKS, where)
        values = {**_CLASS_DEFAULTS, **about}
        _check(values, where)
        options = {x: y for x, y in _options(values, where).items() if y != _DEFAULTS[x]}
        types = max(values.pop("type_vocab_size"), 1)
        return self.read_usual(values, where, token_types=types, options=options)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        options: DebertaV2Options = DebertaV2.options_of(config)
        convolution = {
            "conv_kernel_size": options.convolution,
            "conv_act": options.convolution_activation,
        }
        return {
            **super().config_json(config, kind),
            **_ONLY,
            "pos_att_type": [x for x, ours in _TERMS.items() if getattr(options, ours)],
            "position_buckets": options.buckets or -1,
            "max_relative_positions": options.longest,
            "norm_rel_ebd": "layer_norm" if options.distance_norm else "none",
            "share_att_key": options.shared_maps,
            "position_biased_input": options.positions,
            "type_vocab_size": config.token_types if options.token_types else 0,
            **(convolution if options.convolution else {}),
            "legacy": False,
        }

    def family_of(self, config: EncoderConfig) -> str:
        return "deberta-v2" if config.tie_word_embeddings else ""

    def no_family(self, config: EncoderConfig) -> str:
        return (
            "Hugging Face's DebertaV2 has no masked-LM head with its own output embeddings; leave "
            "it out with untied_head: skip (--untied_head skip)"
        )


_NO_POOLER = "no pooler"
_DEFAULTS = asdict(DebertaV2Options())


def _check(values: Mapping[str, Any], where: str) -> None:
    """Raises UserError for what our encoder does not compute."""
    size = values["hidden_size"] // values["num_attention_heads"]
    only = {
        **_ONLY,
        "embedding_size": values["hidden_size"],
        "pooler_hidden_size": values["hidden_size"],
        "attention_head_size": size,
    }
    for key, right in only.items():
        given = values.get(key, right)
        if given != right:
            raise UserError(
                f"{where}: {key}: must be {printable(shorten(right))} here, got "
                f"{printable(shorten(given))}"
            )


def _options(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of DebertaV2Options."""
    stated = values.get("pos_att_type") or []
    named = stated.split("|") if isinstance(stated, str) else stated
    terms = {x.strip() for x in named if isinstance(x, str)} if isinstance(named, list) else {""}
    norm = values.get("norm_rel_ebd", "none")
    if not terms or not terms <= _TERMS.keys() or norm not in ("none", "layer_norm"):
        key = "pos_att_type" if norm in ("none", "layer_norm") else "norm_rel_ebd"
        right = "c2p, p2c or both" if key == "pos_att_type" else "layer_norm or none"
        shown = printable(shorten(values.get(key)))
        raise UserError(f"{where}: {key}: must be {right}, got {shown}")
    longest = values.get("max_relative_positions", -1)
    convolution = max(values.get("conv_kernel_size", 0), 0)
    activation = values.get("conv_act", "tanh") if convolution else "gelu"
    return {
        **{ours: x in terms for x, ours in _TERMS.items()},
        "buckets": max(values.get("position_buckets", -1), 0),
        "longest": longest if longest > 0 else values["max_position_embeddings"],
        "distance_norm": norm == "layer_norm",
        "shared_maps": bool(values.get("share_att_key", False)),
        "positions": bool(values["position_biased_input"]),
        "token_types": values["type_vocab_size"] > 0,
        "convolution": convolution,
        "convolution_activation": activation,
    }
