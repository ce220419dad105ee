"""NeoBERT's folders, under the names of its published checkpoint.

transformers has no such class: the hub's folder comes with code of its own, which is not needed
here. Query, key and value are one matrix there with the rows of one head after another, and
`intermediate_size` of config.json is three halves of the inner size, to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.neobert import NeoBert, NeoBertOptions
from palm_ds.weights.formats.contents import TensorEntry
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    MASKED_WORDS,
    Architecture,
    Entries,
    Family,
    Names,
    both_ends,
    sizes_json,
)
from palm_ds.weights.formats.huggingface.check_config import (
    SHAPE_CHECKS,
    above_0,
    check_only,
    rate,
    read_values,
    truth,
    whole,
)

_LAYER = {
    "attention_norm.weight": "attention_norm.weight",
    "qkv.weight": "qkv.weight",
    "project.weight": "wo.weight",
    "output_norm.weight": "ffn_norm.weight",
    "expand.weight": "ffn.w12.weight",
    "contract.weight": "ffn.w3.weight",
}
_UNPACKED_LAYER = {**_LAYER, "expand.weight": ("ffn.w1.weight", "ffn.w2.weight")}
_UNPACKED = "unpacked"
"""The layout of files whose gated matrix is two."""
_MASKED_LM = "masked LM"
"""The layout of a class that has no pooler."""
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_length": "max_positions",
    "norm_eps": "layer_norm_eps",
    "decoder_init_range": "init_range",
    "dropout": "dropout",
    "pad_token_id": "pad",
}
"""{key of config.json: ours}"""
_CHECKS = {
    **SHAPE_CHECKS,
    "max_length": whole(1, 1_048_576),
    **dict.fromkeys(("norm_eps", "decoder_init_range", "embedding_init_range"), above_0),
    "dropout": rate,
    **dict.fromkeys(("rms_norm", "rope", "ngpt"), truth),
}
_CLASS_DEFAULTS = {
    "vocab_size": 30_522,
    "num_layers": 28,
    "max_positions": 1024,
    "layer_norm_eps": 1e-6,
}
_ONLY: dict[str, tuple[Any, ...]] = {
    "rms_norm": (True,),
    "rope": (True,),
    "ngpt": (False,),
    "hidden_act": ("swiglu", "SwiGLU"),
}
"""Values that our encoder has."""
_MULTIPLE = 8


class NeoBertArchitecture(Architecture):
    """The architecture of `kind: neobert`."""

    kind = "neobert"
    families = {
        "neobert": Family(
            class_prefix="NeoBERT",
            tensor_prefix="model",
            class_names={"Model": "NeoBERT", "ForMaskedLM": "NeoBERTLMHead"},
        )
    }
    words = "encoder.weight"
    layer = "transformer_encoder"
    task_table = "word"
    tied = {}
    heads = ("decoder", "dense", "classifier")
    masked_lm = ("decoder.",)
    buffers = ("freqs_cis",)
    classes = ("ForSequenceClassification",)
    run_keys = {}

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        parts = _UNPACKED_LAYER if layout == _UNPACKED else _LAYER
        names: Names = {
            "backbone.word.weight": (self.words,),
            **self.layer_names(config, parts),
            "backbone.final_norm.weight": ("layer_norm.weight",),
            f"heads.{MASKED_WORDS}.decoder": ("decoder.weight",),
            f"heads.{MASKED_WORDS}.bias": ("decoder.bias",),
            f"heads.{CLASSIFIER}.out": ("classifier",),
        }
        if layout != _MASKED_LM:
            names["backbone.pooler.dense"] = ("dense",)
        return both_ends(names)

    def layout_of(self, kind: str, ending: str) -> str:
        return "" if ending == "ForSequenceClassification" else _MASKED_LM

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        return _UNPACKED if any(name.endswith("ffn.w1.weight") for name in names) else ""

    def arrange(self, entries: Entries, config: EncoderConfig) -> Entries:
        return _with_rows(entries, (config.num_heads, 3, -1), "rows by query, key and value")

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        own = read_values(about, _KEYS, _CHECKS, where)
        check_only(about, _ONLY, where)
        inner = 2 * about.get("intermediate_size", 3072) // 3
        own["intermediate_size"] = _MULTIPLE * -(-inner // _MULTIPLE)
        values = {**NeoBert.defaults, **_CLASS_DEFAULTS, **own, "kind": self.kind}
        return EncoderConfig.from_dict(values, where)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        return {
            **sizes_json(config),
            "dim_head": config.hidden_size // config.num_heads,
            "intermediate_size": -(-3 * config.feed_forward_size // 2),
            "max_length": config.max_positions,
            "embedding_init_range": float(config.init_range),
            "decoder_init_range": float(config.init_range),
            "classifier_init_range": float(config.init_range),
            "norm_eps": float(config.layer_norm_eps),
            "dropout": float(config.dropout),
            "pad_token_id": config.pad,
            "tie_word_embeddings": False,
        }

    def family_of(self, config: EncoderConfig) -> str:
        return "" if self.no_family(config) else self.kind

    def no_family(self, config: EncoderConfig) -> str:
        options: NeoBertOptions = NeoBert.options_of(config)
        if config.activation != "silu":
            return f"the published NeoBERT has silu, but this encoder has {config.activation}"
        if options.rotary_base != NeoBertOptions().rotary_base:
            return f"the published NeoBERT has the rotary base 10000, not {options.rotary_base:g}"
        if config.feed_forward_size % _MULTIPLE:
            return (
                f"the published NeoBERT has inner sizes that are multiples of {_MULTIPLE}, "
                f"not {config.feed_forward_size}"
            )
        return ""

    def reshape(
        self, kept: Entries, config: EncoderConfig, kind: str, task_id: int
    ) -> tuple[Entries, EncoderConfig, dict[str, str]]:
        shape = (3, config.num_heads, -1)
        by_head = _with_rows(kept, shape, "rows by head")
        return super().reshape(by_head, config, kind, task_id)


def _with_rows(entries: Entries, shape: tuple[int, int, int], how: str) -> Entries:
    """The entries with the rows of each `qkv`, seen in `shape`, in the order of its second part
    first."""

    def swapped(entry: TensorEntry) -> TensorEntry:
        def read() -> Any:
            values = entry.read()
            return values.unflatten(0, shape).transpose(0, 1).reshape(values.shape)

        return replace(entry, read=read, transform=how)

    return {x: swapped(y) if x.endswith(".qkv.weight") else y for x, y in entries.items()}
