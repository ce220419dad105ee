"""Rotary positions in config.json: their base and its scaling, under the keys of transformers 5 or
earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from palm_ds.common.config import shorten
from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.weights.formats.huggingface.architecture import (
    Architecture,
    Names,
    both_ends,
    head_names,
    usual_config_json,
)

LLAMA_MODULES: Mapping[str, str | tuple[str, ...]] = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "intermediate": ("mlp.gate_proj", "mlp.up_proj"),
    "output": "mlp.down_proj",
}
"""`Architecture.lora_modules` of layers with Llama's names in transformers."""
_SCALED = ("rope_parameters", "rope_scaling")


class RotaryBert(Architecture):
    """BERT with rotary positions. Files have the names of the hub, which transformers writes too;
    the names of its modules, `native` ones, are read as well."""

    words = "embeddings.word_embeddings.weight"
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    classes = ("ForSequenceClassification", "ForTokenClassification")
    run_keys = {
        **dict.fromkeys(("layer_norm_eps", "initializer_range"), float),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), float),
        "tie_word_embeddings": bool,
        **dict.fromkeys(("rope_parameters", "rope_scaling")),
        "rope_theta": float,
    }
    lora_layer = "layers"
    lora_modules = LLAMA_MODULES
    hub_norm: ClassVar[str] = "emb_ln"
    """The norm of the embeddings in a file with the hub's names."""
    hub_parts: ClassVar[Mapping[str, str | tuple[str, ...]]]
    native_parts: ClassVar[Mapping[str, str | tuple[str, ...]]]

    def all_names(
        self,
        config: EncoderConfig,
        masked_lm: Mapping[str, str],
        *,
        native: bool,
        pooler: str,
        own_dense: bool = False,
        answers: bool = False,
    ) -> Names:
        """`names`: with those of its modules if `native`, a pooler of this name, if it has one, and
        heads (`head_names`)."""
        layers = [f"layers.{i}" for i in range(config.num_layers)]
        names: Names = {
            "backbone.word.weight": (self.words,),
            "backbone.segment.weight": ("embeddings.token_type_embeddings.weight",),
            "backbone.norm": ("embeddings.LayerNorm" if native else self.hub_norm,),
            **(
                self.layer_names(config, self.native_parts, layers)
                if native
                else self.layer_names(config, self.hub_parts)
            ),
        }
        if pooler:
            names["backbone.pooler.dense"] = (pooler,)
        heads = head_names(masked_lm, own_dense=own_dense, answers=answers)
        return both_ends({**names, **heads})

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        base = encoder_class(config).options_of(config).rotary_base
        return {**usual_config_json(config), "rope_parameters": default_rotary(base)}


def default_rotary(base: float) -> dict[str, Any]:
    """`rope_parameters` of positions that are not scaled."""
    return {"rope_type": "default", "rope_theta": float(base)}


def rotary_base(
    about: Mapping[str, Any], where: str, key: str = "rope_theta", *, layers: str = ""
) -> float | None:
    """The base in `rope_parameters`, there under `layers` if each kind of layer has its own, else
    that under `key`; None if none is stated. Raises UserError, starting with `where`, for a scaled
    one."""
    base, inside = about.get(key), "rope_parameters"
    stated = about.get(inside)
    if layers and isinstance(stated, Mapping):
        stated, inside = stated.get(layers), f"{inside}.{layers}"
    if isinstance(stated, Mapping):
        if (kind := _kind(stated)) != "default":
            given = printable(shorten(kind))
            raise UserError(f"{where}: {inside}.rope_type: must be default here, got {given}")
        base, key = stated.get("rope_theta", base), f"{inside}.rope_theta"
    if about.get("rope_scaling") is not None:
        scaling = printable(shorten(about["rope_scaling"]))
        raise UserError(f"{where}: rope_scaling: must be null here, got {scaling}")
    if base is None:
        return None
    if isinstance(base, bool) or not isinstance(base, int | float) or not 1 < base < 1e12:
        shown = printable(shorten(base))
        raise UserError(f"{where}: {key}: expected a number above 1, got {shown}")
    return float(base)


def scaled_rotary(
    about: Mapping[str, Any], where: str, head_size: int
) -> tuple[float | None, float]:
    """(base, None if none is stated; factor that positions are divided by). Raises UserError,
    starting with `where`, unless it is scaled by `linear` (positions alone) or `ntk` (as the hub's
    GTE and vLLM compute it: a larger base, and positions)."""
    key = next((x for x in _SCALED if isinstance(about.get(x), Mapping)), "")
    stated = about[key] if key else {}
    kind = _kind(stated)
    if kind not in ("linear", "ntk"):
        return rotary_base(about, where), 1.0
    factor, mixed = stated.get("factor"), stated.get("mixed_b")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < 1e6:
        given = printable(shorten(factor))
        raise UserError(f"{where}: {key}.factor: expected a number of at least 1, got {given}")
    if mixed is not None:
        given = printable(shorten(mixed))
        raise UserError(f"{where}: {key}.mixed_b: must be null here, got {given}")
    plain = {"rope_theta": stated.get("rope_theta", about.get("rope_theta"))}
    base = rotary_base(plain, where)
    if kind == "linear":
        return base, float(factor)
    return (base or 10_000.0) * factor, float(factor) ** (2 / head_size)


def _kind(stated: Mapping[str, Any]) -> Any:
    """The kind of scaling, under its key or the one that older configs have."""
    return stated.get("rope_type", stated.get("type", "default"))
