"""Rotary positions in config.json: their base and its scaling, under the keys of transformers 5 or
earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palm_ds.common.config import shorten
from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable

RUN_KEYS: Mapping[str, type | None] = {
    **dict.fromkeys(("layer_norm_eps", "initializer_range"), float),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), float),
    "tie_word_embeddings": bool,
    **dict.fromkeys(("rope_parameters", "rope_scaling")),
    "rope_theta": float,
}
"""Of families with BERT's keys and rotary positions: `Architecture.run_keys` beyond sizes."""
ATTENTION_MODULES: Mapping[str, str | tuple[str, ...]] = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
}
"""Transformers' names of a layer's attention in these families, as in Llama."""
LLAMA_MODULES: Mapping[str, str | tuple[str, ...]] = {
    **ATTENTION_MODULES,
    "intermediate": ("mlp.gate_proj", "mlp.up_proj"),
    "output": "mlp.down_proj",
}
"""The same with a gated feed-forward network."""
_SCALED = ("rope_parameters", "rope_scaling")


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
