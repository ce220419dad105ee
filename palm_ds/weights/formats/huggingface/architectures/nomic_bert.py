"""NomicBert: nomic-bert-2048, nomic-embed-text and what is trained from them.

Files have the names of the hub, which transformers writes too: query, key and value in one matrix,
the halves of a gated layer in two. The names of its modules are read as well, and both forms of
config.json: `n_embd`, ... of the hub's code, and `hidden_size`, ... of transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.rotary_bert import NomicBert, NomicBertOptions
from palm_ds.weights.formats.huggingface.architecture import Family, Names
from palm_ds.weights.formats.huggingface.bert_like import tied_output
from palm_ds.weights.formats.huggingface.check_config import (
    above_0,
    check_only,
    check_values,
    rate,
    text,
    truth,
    whole,
)
from palm_ds.weights.formats.huggingface.rotary import RotaryBert, rotary_base

_HUB = {
    "qkv.weight": "attn.Wqkv.weight",
    "project.weight": "attn.out_proj.weight",
    "attention_norm": "norm1",
    "expand.weight": ("mlp.fc12.weight", "mlp.fc11.weight"),  # activated, multiplier
    "contract.weight": "mlp.fc2.weight",
    "output_norm": "norm2",
}
_NATIVE = {
    "qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "project.weight": "self_attn.o_proj.weight",
    "attention_norm": "post_attention_layernorm",
    "expand.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "contract.weight": "mlp.down_proj.weight",
    "output_norm": "post_mlp_layernorm",
}
_MASKED_LM = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.layer_norm",
    "bias": "cls.predictions.bias",
    "decoder": "cls.predictions.decoder.weight",
}
_KEYS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "token_types": ("type_vocab_size",),
    "layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon"),
    "init_range": ("initializer_range",),
    "dropout": ("hidden_dropout_prob", "resid_pdrop"),
    "attention_dropout": ("attention_probs_dropout_prob", "attn_pdrop"),
    "pad": ("pad_token_id",),
    "tie_word_embeddings": ("tie_word_embeddings",),
}
"""{our key: its names in config.json}"""
_POSITIONS = ("max_position_embeddings", "max_trained_positions", "n_positions")
_SIZES = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "token_types")
_RATES = ("dropout", "attention_dropout")
_CHECKS = {
    "vocab_size": whole(1, 10_000_000),
    "pad_token_id": whole(0, 10_000_000),
    **{key: whole(1, 1_048_576) for name in _SIZES for key in _KEYS[name]},
    **dict.fromkeys(_POSITIONS, whole(1, 1_048_576)),
    **{key: rate for name in _RATES for key in _KEYS[name]},
    **{key: above_0 for name in ("layer_norm_eps", "init_range") for key in _KEYS[name]},
    **dict.fromkeys(("hidden_act", "activation_function"), text),
    "tie_word_embeddings": truth,
}
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "activation_function": ("swiglu",),
    "prenorm": (False,),
    "parallel_block": (False,),
    "use_rms_norm": (False, None),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "causal": (False,),
    "num_experts": (None, 0),
}
"""Values that our encoder has, of keys that would change what it computes."""
_DEFAULTS = {"vocab_size": 30_528, "num_layers": 12, "num_heads": 12, "intermediate_size": 3072}


class NomicBertArchitecture(RotaryBert):
    """The architecture of `kind: nomic_bert`."""

    kind = "nomic_bert"
    families = {
        "nomic_bert": Family(
            class_prefix="NomicBert", tensor_prefix="nomic_bert", masked_lm_activation="silu"
        )
    }
    merged_dropouts = ("embd_pdrop",)
    layer = "encoder.layers"
    hub_parts = _HUB
    native_parts = _NATIVE
    task_table = "segment"
    other_prefixes = ("bert.",)
    tied = tied_output(_MASKED_LM)
    heads = ("cls", "classifier")
    masked_lm = ("cls.predictions.",)
    run_keys = {
        **dict.fromkeys(key for key in _CHECKS if key != "activation_function"),
        **RotaryBert.run_keys,
    }

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        native = layout == "native"
        return self.all_names(config, _MASKED_LM, native=native, pooler="pooler.dense")

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        return "native" if any(name.startswith("layers.") for name in names) else ""

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_values(about, _CHECKS, where)
        check_only(about, _ONLY, where)
        own = {
            ours: about[key]
            for ours, keys in _KEYS.items()
            for key in reversed(keys)
            if about.get(key) is not None
        }
        key = next((x for x in ("rope_theta", "rotary_emb_base") if x in about), "")
        base = rotary_base(about, where, key)
        options = {} if base in (None, NomicBertOptions().rotary_base) else {"rotary_base": base}
        values = {**NomicBert.defaults, **_DEFAULTS, "max_positions": _positions(about), **own}
        return EncoderConfig.from_dict({**values, "kind": self.kind, "options": options}, where)

    def family_of(self, config: EncoderConfig) -> str:
        return self.kind if config.activation == "silu" else ""

    def no_family(self, config: EncoderConfig) -> str:
        return f"Hugging Face's NomicBert has silu, but this encoder has {config.activation}"


def _positions(about: Mapping[str, Any]) -> int:
    """The longest text that is computed as in training: beyond that the hub's code turns queries
    and keys by other angles."""
    stated = [about[key] for key in _POSITIONS if about.get(key) is not None]
    return min(stated, default=NomicBert.defaults["max_positions"])
