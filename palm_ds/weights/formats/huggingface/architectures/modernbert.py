"""ModernBERT, Ettin and mmBERT: one model type in several sizes.

config.json has the keys that transformers 4.48 to 5 read: `global_attn_every_n_layers` and a rotary
base for each kind of layer. `layer_types` and `rope_parameters`, which transformers 5 writes, are
read too.

`head` is the transform of a masked-LM head and, in the classes that classify, what their classifier
reads of texts and tokens. transformers starts such a class with the head of a masked-LM folder; so
does an encoder here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from palm_ds.common.config import shorten
from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.modernbert import ModernBert, ModernBertOptions
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    HEAD_CLASSES,
    MASKED_WORDS,
    QUESTION_ANSWERING,
    Architecture,
    Family,
    Names,
    sizes_json,
)
from palm_ds.weights.formats.huggingface.check_config import (
    SHAPE_CHECKS,
    SHAPE_KEYS,
    above_0,
    check_only,
    rate,
    read_values,
    text,
    truth,
    whole,
)
from palm_ds.weights.formats.huggingface.rotary import rotary_base

_LAYER = {
    "attention_norm.weight": "attn_norm.weight",
    "qkv.weight": "attn.Wqkv.weight",
    "project.weight": "attn.Wo.weight",
    "output_norm.weight": "mlp_norm.weight",
    "expand.weight": "mlp.Wi.weight",
    "contract.weight": "mlp.Wo.weight",
}
_WHOLE, _LOCAL = "full_attention", "sliding_attention"
_DEFAULTS = ModernBertOptions()
_CHECKS = {
    **SHAPE_CHECKS,
    "max_position_embeddings": whole(1, 1_048_576),
    "local_attention": whole(2, 1_048_576),
    "global_attn_every_n_layers": whole(1, 1_000),
    **dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), rate),
    **dict.fromkeys(("norm_eps", "initializer_range"), above_0),
    **dict.fromkeys(("hidden_activation", "classifier_activation", "classifier_pooling"), text),
    **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), truth),
    **dict.fromkeys(("tie_word_embeddings", "decoder_bias"), truth),
}
_KEYS = {
    **SHAPE_KEYS,
    "max_position_embeddings": "max_positions",
    "norm_eps": "layer_norm_eps",
    "initializer_range": "init_range",
    "embedding_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "hidden_activation": "activation",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""{key of config.json: ours}"""
_CLASS_DEFAULTS = {
    "vocab_size": 50_368,
    "hidden_size": 768,
    "num_layers": 22,
    "num_heads": 12,
    "intermediate_size": 1152,
    "pad": 50_283,
}
_ONLY = {
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
}
"""Values that our encoder and its heads have."""


class ModernBertArchitecture(Architecture):
    """The architecture of `kind: modernbert`."""

    kind = "modernbert"
    families = {
        "modernbert": Family(
            class_prefix="ModernBert", tensor_prefix="model", states_head_activation=True
        )
    }
    words = "embeddings.tok_embeddings.weight"
    layer = "layers"
    task_table = "word"
    tied = {"decoder.weight": words}
    shared = {
        f"backbone.pooler.{part}.weight": f"heads.{MASKED_WORDS}.{part}.weight"
        for part in ("dense", "norm")
    }
    classes = tuple(x for x in HEAD_CLASSES if x != "ForNextSentencePrediction")
    heads = ("head", "decoder", "classifier")
    masked_lm = ("head.", "decoder.")
    merged_dropouts = ("mlp_dropout",)
    published_ids = ("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id")
    run_keys = {
        **dict.fromkeys(_CHECKS),
        **dict.fromkeys(("norm_eps", "initializer_range"), float),
        **dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), float),
        **dict.fromkeys((*_ONLY, "tie_word_embeddings"), bool),
        **dict.fromkeys(("global_rope_theta", "local_rope_theta"), float),
        **dict.fromkeys(("layer_types", "rope_parameters")),
    }
    lora_modules = {
        **dict.fromkeys(("query", "key", "value"), "attn.Wqkv"),
        "attention_output": "attn.Wo",
        "intermediate": "mlp.Wi",
        "output": "mlp.Wo",
    }

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        names: Names = {
            "backbone.word.weight": (self.words,),
            "backbone.norm.weight": ("embeddings.norm.weight",),
            **self.layer_names(config, _LAYER),
            "backbone.final_norm.weight": ("final_norm.weight",),
        }
        if not layout:
            names[f"heads.{MASKED_WORDS}.dense.weight"] = ("head.dense.weight",)
            names[f"heads.{MASKED_WORDS}.norm.weight"] = ("head.norm.weight",)
            names[f"heads.{MASKED_WORDS}.bias"] = ("decoder.bias",)
            names[f"heads.{MASKED_WORDS}.decoder"] = ("decoder.weight",)
            return names
        names["backbone.pooler.dense.weight"] = ("head.dense.weight",)
        names["backbone.pooler.norm.weight"] = ("head.norm.weight",)
        for end in ("weight", "bias"):
            names[f"heads.{layout}.out.{end}"] = (f"classifier.{end}",)
        return names

    def layout_of(self, kind: str, ending: str) -> str:
        """The head that has the name `classifier`; none in a masked-LM model."""
        if ending == "ForQuestionAnswering":
            return QUESTION_ANSWERING
        classifies = ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice")
        return CLASSIFIER if ending in classifies else ""

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        if "classifier.weight" not in names:
            return ""
        asks = architecture.endswith("ForQuestionAnswering")
        return QUESTION_ANSWERING if asks else CLASSIFIER

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        own = read_values(about, _KEYS, _CHECKS, where)
        for key, value in _ONLY.items():
            if about.get(key, value) != value:
                raise UserError(f"{where}: {key}: must be {value} here, got {about[key]!r}")
        if "pad_token_id" in about:
            own.setdefault("pad", 0)  # of null: any token, since padding is not attended to
        head = about.get("classifier_activation", "gelu")
        if head != own.get("activation", "gelu"):
            own["head_activation"] = head
        usual = asdict(_DEFAULTS)
        options = {key: x for key, x in _options(about, where).items() if x != usual[key]}
        defaults = {**ModernBert.defaults, **_CLASS_DEFAULTS}
        return EncoderConfig.from_dict(
            {**defaults, **own, "kind": self.kind, "options": options}, where
        )

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        options: ModernBertOptions = ModernBert.options_of(config)
        return {
            **sizes_json(config),
            "intermediate_size": config.feed_forward_size,
            "hidden_activation": config.activation,
            "classifier_activation": config.head_activation or config.activation,
            "classifier_pooling": options.text_pooling,
            "embedding_dropout": float(config.dropout),
            "attention_dropout": float(config.attention_dropout),
            "mlp_dropout": float(config.dropout),
            "max_position_embeddings": config.max_positions,
            "initializer_range": float(config.init_range),
            "initializer_cutoff_factor": 2.0,
            "norm_eps": float(config.layer_norm_eps),
            "layer_norm_eps": float(config.layer_norm_eps),
            "global_attn_every_n_layers": options.global_every,
            "local_attention": 2 * options.window,
            "global_rope_theta": float(options.global_rotary_base),
            "local_rope_theta": float(options.local_rotary_base),
            "pad_token_id": config.pad,
            "tie_word_embeddings": config.tie_word_embeddings,
            **_ONLY,
        }


def _options(about: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All values of ModernBertOptions that config.json states. Raises UserError."""
    pooling = about.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise UserError(f"{where}: classifier_pooling: must be cls or mean, got {pooling!r}")
    window = about.get("local_attention", 2 * _DEFAULTS.window)
    check_only(about, {"sliding_window": (window // 2,)}, where)
    bases = {
        "global_rotary_base": rotary_base(about, where, "global_rope_theta", layers=_WHOLE),
        "local_rotary_base": rotary_base(about, where, "local_rope_theta", layers=_LOCAL),
    }
    return {
        "global_every": _global_every(about, where),
        "window": window // 2,
        "text_pooling": pooling,
        **{key: value for key, value in bases.items() if value is not None},
    }


def _global_every(about: Mapping[str, Any], where: str) -> int:
    """The period of the layers that attend to whole texts."""
    stated = about.get("global_attn_every_n_layers", _DEFAULTS.global_every)
    kinds = about.get("layer_types")
    if kinds is None:
        return stated
    layers = about.get("num_hidden_layers", _CLASS_DEFAULTS["num_layers"])
    for every in (stated, *range(1, layers + 1)):
        if kinds == [_LOCAL if number % every else _WHOLE for number in range(layers)]:
            return every
    raise UserError(
        f"{where}: layer_types: must be {_WHOLE} for the first layer of each period and "
        f"{_LOCAL} for the others, {layers} in all, got {printable(shorten(kinds))}"
    )
