"""GTE's folders: `gte` of transformers, and `new`, which the hub's own code calls it.

Files of both have the names of the hub, which transformers writes too: query, key and value in one
matrix, and the halves of a gated layer in one, the multiplier first. The names of transformers'
modules are read as well. The pooler belongs to the class that classifies texts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.rotary_bert import Gte, GteOptions
from palm_ds.weights.formats.contents import TensorEntry
from palm_ds.weights.formats.huggingface.architecture import Entries, Family, Names, fold_task_into
from palm_ds.weights.formats.huggingface.check_config import (
    USUAL_CHECKS,
    USUAL_KEYS,
    check_only,
    read_values,
    whole,
)
from palm_ds.weights.formats.huggingface.rotary import RotaryBert, scaled_rotary

_HUB = {
    "qkv": "attention.qkv_proj",
    "project": "attention.o_proj",
    "attention_norm": "attn_ln",
    "expand.weight": "mlp.up_gate_proj.weight",  # multiplier, activated
    "contract": "mlp.down_proj",
    "output_norm": "mlp_ln",
}
_NATIVE = {
    "qkv": tuple(f"self_attn.{x}_proj" for x in "qkv"),
    "project": "self_attn.o_proj",
    "attention_norm": "post_attention_layernorm",
    "expand.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),  # activated, multiplier
    "contract": "mlp.down_proj",
    "output_norm": "post_mlp_layernorm",
}
_STACKED_GATE = ".up_gate_proj."
_NATIVE_NAMES, _NO_POOLER = "native", "no pooler"
"""Layouts."""
_CHECKS = {**USUAL_CHECKS, "type_vocab_size": whole(0, 65_536)}
_ONLY: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "layer_norm_type": ("layer_norm",),
    "pack_qkv": (True,),
    "logn_attention_scale": (False,),
    "logn_attention_clip1": (False,),
}
"""Values that our encoder has, of keys that would change what the hub's code computes."""
_DEFAULTS = {"vocab_size": 250_048, "pad": 1}


class GteArchitecture(RotaryBert):
    """The architecture of `kind: gte`."""

    kind = "gte"
    families = {
        "gte": Family(class_prefix="Gte", tensor_prefix="gte", masked_lm_activation="gelu"),
        "new": Family(class_prefix="New", tensor_prefix="new", masked_lm_activation="gelu"),
    }
    layer = "encoder.layer"
    hub_norm = "embeddings.LayerNorm"
    hub_parts = _HUB
    native_parts = _NATIVE
    other_prefixes = ("new.", "gte.")
    tied = {"lm_head.decoder.weight": RotaryBert.words}
    heads = ("lm_head", "classifier")
    masked_lm = ("lm_head.",)
    run_keys = {**dict.fromkeys(_CHECKS), **RotaryBert.run_keys}

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        native = layout == _NATIVE_NAMES
        masked_lm = {
            "dense": "lm_head.dense",
            "norm": "lm_head.layer_norm" if native else "lm_head.norm",
            "bias": "lm_head.decoder.bias",
            "decoder": "lm_head.decoder.weight",
        }
        pooler = "" if layout == _NO_POOLER else "pooler.dense"
        return self.all_names(config, masked_lm, native=native, pooler=pooler)

    def layout_of(self, kind: str, ending: str) -> str:
        return "" if ending == "ForSequenceClassification" else _NO_POOLER

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        return _NATIVE_NAMES if any(name.startswith("layers.") for name in names) else ""

    def arrange(self, entries: Entries, config: EncoderConfig) -> Entries:
        return {
            ours: _swapped(entry) if _STACKED_GATE in entry.source_names[0] else entry
            for ours, entry in entries.items()
        }

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        own = read_values(about, USUAL_KEYS, _CHECKS, where)
        check_only(about, _ONLY, where)
        types = own.get("token_types", 1)
        values = {**Gte.defaults, **_DEFAULTS, **own, "kind": self.kind}
        values["token_types"] = max(types, 1)
        if own.get("activation", "gelu") != "gelu":
            values["head_activation"] = "gelu"
        config = EncoderConfig.from_dict(values, where)
        base, factor = scaled_rotary(about, where, config.hidden_size // config.num_heads)
        stated = {
            "rotary_base": base or (10_000.0 if about["model_type"] == "new" else None),
            "rotary_factor": factor,
            "token_types": types > 0,
        }
        usual = asdict(GteOptions())
        options = {x: y for x, y in stated.items() if y not in (None, usual[x])}
        return EncoderConfig.from_dict({**values, "options": options}, where)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        options: GteOptions = Gte.options_of(config)
        about = super().config_json(config, kind)
        if options.rotary_factor != 1:
            scaling = {"rope_type": "linear", "factor": float(options.rotary_factor)}
            about["rope_parameters"] |= scaling
        return {**about, "type_vocab_size": config.token_types if options.token_types else 0}

    def check_family(self, kind: str, config: EncoderConfig) -> str:
        if kind == "new":
            return "family: new can only be read; write gte, which transformers opens"
        return super().check_family(kind, config)

    def family_of(self, config: EncoderConfig) -> str:
        """Also with a task embedding: a row of it is folded into the token types, or into the token
        embeddings if there are none."""
        return self.kind

    def reshape(
        self, kept: Entries, config: EncoderConfig, kind: str, task_id: int
    ) -> tuple[Entries, EncoderConfig, dict[str, str]]:
        swapped = {name: _swapped(y) if ".expand." in name else y for name, y in kept.items()}
        table = "segment" if Gte.has_token_types(config) else "word"
        return fold_task_into(swapped, config, task_id, table)


def _swapped(entry: TensorEntry) -> TensorEntry:
    """With the halves of its rows swapped."""

    def read() -> Any:
        values = entry.read()
        return values.roll(len(values) // 2, 0)

    return replace(entry, read=read, transform="halves swapped")
