"""EuroBERT's folders, under the names of the hub, which are transformers' own.

Query, key and value, and the halves of a gated layer, are matrices of their own there. `dense` of a
class that classifies texts is palm_ds's pooler. The classifier of tokens reads them as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from palm_ds.common.config import shorten
from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.eurobert import EuroBert, EuroBertOptions
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    MASKED_WORDS,
    Architecture,
    Family,
    Names,
    both_ends,
    sizes_json,
)
from palm_ds.weights.formats.huggingface.check_config import (
    SHAPE_CHECKS,
    SHAPE_KEYS,
    above_0,
    rate,
    read_values,
    text,
    truth,
    whole,
)
from palm_ds.weights.formats.huggingface.rotary import LLAMA_MODULES, default_rotary, rotary_base

_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "project.weight": "self_attn.o_proj.weight",
    "output_norm.weight": "post_attention_layernorm.weight",
    "expand.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),  # activated, multiplier
    "contract.weight": "mlp.down_proj.weight",
}
_KEYS = {
    **SHAPE_KEYS,
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "layer_norm_eps",
    "initializer_range": "init_range",
    "attention_dropout": "attention_dropout",
    "hidden_act": "activation",
}
"""{key of config.json: ours}"""
_CHECKS = {
    **SHAPE_CHECKS,
    "max_position_embeddings": whole(1, 1_048_576),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), above_0),
    "attention_dropout": rate,
    **dict.fromkeys(("hidden_act", "classifier_pooling"), text),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), truth),
}
_CLASS_DEFAULTS = {"vocab_size": 128_256, "intermediate_size": 3072, "pad": 128_001}
_CLASS_BASE = 10_000.0
"""The rotary base of a config.json that states none."""
_TEXTS = "texts"
"""The layout of a class that classifies texts, which alone has the pooler."""
_POOLINGS = {"late": "late", "bos": "cls", "mean": "mean"}
"""{classifier_pooling: ours}"""


class EuroBertArchitecture(Architecture):
    """The architecture of `kind: eurobert`."""

    kind = "eurobert"
    families = {"eurobert": Family(class_prefix="EuroBert", tensor_prefix="model")}
    words = "embed_tokens.weight"
    layer = "layers"
    task_table = "word"
    tied = {}
    heads = ("lm_head", "dense", "classifier")
    masked_lm = ("lm_head.",)
    classes = ("ForSequenceClassification", "ForTokenClassification")
    published_ids = ("bos_token_id", "eos_token_id")
    run_keys = {
        **dict.fromkeys((*_CHECKS, "num_key_value_heads", "head_dim", "rope_parameters")),
        **dict.fromkeys(("rms_norm_eps", "initializer_range", "attention_dropout"), float),
        **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), bool),
        "rope_theta": float,
    }
    lora_modules = LLAMA_MODULES

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        names: Names = {
            "backbone.word.weight": (self.words,),
            **self.layer_names(config, _LAYER),
            "backbone.final_norm.weight": ("norm.weight",),
            f"heads.{MASKED_WORDS}.decoder": ("lm_head.weight",),
            f"heads.{CLASSIFIER}.out": ("classifier",),
        }
        if layout == _TEXTS:
            names["backbone.pooler.dense"] = ("dense",)
        return both_ends(names)

    def layout_of(self, kind: str, ending: str) -> str:
        return _TEXTS if ending == "ForSequenceClassification" else ""

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        return _TEXTS if "dense.weight" in names else ""

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        own = read_values(about, _KEYS, _CHECKS, where)
        for key in ("attention_bias", "mlp_bias"):
            if about.get(key):
                raise UserError(f"{where}: {key}: must be false here, got true")
        named = about.get("architectures") or [""]
        if about.get("tie_word_embeddings") and named[0].endswith("ForMaskedLM"):
            raise UserError(f"{where}: tie_word_embeddings: must be false here, got true")
        if "pad_token_id" in about:
            own.setdefault("pad", 0)  # of null: any token, since padding is not attended to
        values = {**EuroBert.defaults, **_CLASS_DEFAULTS, **own, "kind": self.kind}
        config = EncoderConfig.from_dict(values, where)
        size = config.hidden_size // config.num_heads
        if about.get("head_dim") not in (None, size):
            given = printable(shorten(about["head_dim"]))
            raise UserError(f"{where}: head_dim: must be {size} here, got {given}")
        options = _options(about, config.num_heads, where)
        return EncoderConfig.from_dict({**values, "options": options}, where)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        options: EuroBertOptions = EuroBert.options_of(config)
        written = {ours: key for key, ours in _POOLINGS.items()}
        return {
            **sizes_json(config),
            "num_key_value_heads": options.kv_heads or config.num_heads,
            "head_dim": config.hidden_size // config.num_heads,
            "intermediate_size": config.feed_forward_size,
            "hidden_act": config.activation,
            "max_position_embeddings": config.max_positions,
            "initializer_range": float(config.init_range),
            "rms_norm_eps": float(config.layer_norm_eps),
            "attention_dropout": float(config.attention_dropout),
            "attention_bias": False,
            "mlp_bias": False,
            "classifier_pooling": written[options.text_pooling],
            "rope_theta": float(options.rotary_base),
            "rope_parameters": default_rotary(options.rotary_base),
            "pad_token_id": config.pad,
            "tie_word_embeddings": False,
        }


def _options(about: Mapping[str, Any], num_heads: int, where: str) -> dict[str, Any]:
    """The values of EuroBertOptions that config.json states and that are not the defaults."""
    kv_heads = about.get("num_key_value_heads")
    if kv_heads is not None and (expected := whole(1, num_heads)(kv_heads)):
        given = printable(shorten(kv_heads))
        raise UserError(f"{where}: num_key_value_heads: expected {expected}, got {given}")
    if kv_heads and num_heads % kv_heads:
        raise UserError(
            f"{where}: num_key_value_heads: {kv_heads} does not divide num_attention_heads, "
            f"{num_heads}"
        )
    pooling = about.get("classifier_pooling", "late")
    if pooling not in _POOLINGS:
        raise UserError(f"{where}: classifier_pooling: must be late, bos or mean, got {pooling!r}")
    stated = {
        "kv_heads": None if kv_heads == num_heads else kv_heads,
        "rotary_base": rotary_base(about, where) or _CLASS_BASE,
        "text_pooling": _POOLINGS[pooling],
    }
    usual = asdict(EuroBertOptions())
    return {key: value for key, value in stated.items() if value != usual[key]}
