"""Checks the values of another program's config.json, under its own names.

Programs write these files: a number as text, NaN, null or an absurd size means that the file is
damaged or hostile. Recipes, which users write in YAML, are read by `read_encoder_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from palm_ds.common.config import shorten
from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable

Check: TypeAlias = Callable[[object], str]
"""Returns what was expected of a value, or "" if it is valid."""
MAX_LABELS = 1_000_000
_SIZES = {  # the least and the most
    "vocab_size": (1, 10_000_000),
    "hidden_size": (1, 65_536),
    "emb_size": (1, 65_536),
    "num_hidden_layers": (1, 1_000),
    "num_attention_heads": (1, 1_024),
    "intermediate_size": (1, 1_048_576),
    "max_position_embeddings": (1, 1_048_576),
    "type_vocab_size": (1, 65_536),
    "sent_type_vocab_size": (1, 65_536),
    "task_type_vocab_size": (0, 65_536),
    "num_labels": (0, MAX_LABELS),
    "pad_token_id": (0, 10_000_000),
}
_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
_ABOVE_0 = ("layer_norm_eps", "initializer_range")
_BOOLEAN_KEYS = (
    "use_task_id",
    "use_task_emb",
    "is_decoder",
    "add_cross_attention",
    "tie_word_embeddings",
    "weight_sharing",
    "has_pooler",
)
_TEXTS = ("model_type", "hidden_act", "position_embedding_type", "problem_type")
_MAY_BE_NULL = ("pad_token_id", "classifier_dropout", "problem_type", "id2label", "label2id")


def check_foreign_values(values: Mapping[str, Any], where: str) -> None:
    """Raises UserError, with `where` and the key, for a value of BERT, ERNIE or PALM that no
    program writes."""
    check_values(values, _CHECKS, where)


def check_labels(values: Mapping[str, Any], where: str) -> None:
    """The same for what every architecture has: its type and the names of its classes."""
    check_values(values, _SHARED_CHECKS, where)


def check_values(values: Mapping[str, Any], checks: Mapping[str, Check], where: str) -> None:
    """Raises UserError, with `where` and the key, for a value that its check refuses."""
    for key, value in values.items():
        check = checks.get(key)
        if check is None or (value is None and key in _MAY_BE_NULL):
            continue
        if expected := check(value):
            shown = printable(shorten(value))
            raise UserError(f"{where}: {key}: expected {expected}, got {shown}")


def read_values(
    values: Mapping[str, Any], keys: Mapping[str, str], checks: Mapping[str, Check], where: str
) -> dict[str, Any]:
    """The values that are stated, under our names; `keys`: {key there: ours}. Raises UserError as
    `check_values` does."""
    check_values(values, checks, where)
    return {ours: values[key] for key, ours in keys.items() if values.get(key) is not None}


def check_only(values: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raises UserError, with `where` and the key, for a value other than the ones that our encoder
    has, of keys that would change what it computes."""
    for key, right in only.items():
        if key in values and values[key] not in right:
            given = printable(shorten(values[key]))
            raise UserError(f"{where}: {key}: must be {right[0]!r} here, got {given}")


# ---- kinds of values ----


def whole(least: int, most: int) -> Check:
    """A whole number in this range."""
    return partial(_whole, least, most)


def _whole(least: int, most: int, value: object) -> str:
    fine = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    return "" if fine else f"a whole number from {least} to {most:,}"


def rate(value: object) -> str:
    return "" if _is_share(value) and value != 1 else "a number of at least 0 and below 1"


def above_0(value: object) -> str:
    return "" if _is_share(value) and value != 0 else "a number above 0 and at most 1"


def truth(value: object) -> str:
    return "" if isinstance(value, int) and value in (0, 1) else "true or false"


def text(value: object) -> str:
    return "" if isinstance(value, str) else "text"


def _labels(value: object) -> str:
    if isinstance(value, dict) and len(value) <= MAX_LABELS and all(map(_names, value.items())):
        return ""
    return 'the names of the classes by number, such as {"0": "no", "1": "yes"}'


def _names(item: tuple[str, object]) -> bool:
    number, name = item
    return number.isascii() and number.isdecimal() and isinstance(name, str)


def _numbers(value: object) -> str:
    if isinstance(value, dict) and all(type(item) is int for item in value.values()):
        return ""
    return 'the numbers of the classes by name, such as {"no": 0, "yes": 1}'


def _is_share(value: object) -> bool:
    """Whether it is a number from 0 to 1; NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


_SHARED_CHECKS: dict[str, Check] = {
    "model_type": text,
    "problem_type": text,
    "num_labels": whole(*_SIZES["num_labels"]),
    "classifier_dropout": rate,
    "id2label": _labels,
    "label2id": _numbers,
}
_CHECKS: dict[str, Check] = {
    **{key: whole(*limits) for key, limits in _SIZES.items()},
    **dict.fromkeys(_RATES, rate),
    **dict.fromkeys(_ABOVE_0, above_0),
    **dict.fromkeys(_BOOLEAN_KEYS, truth),
    **dict.fromkeys(_TEXTS, text),
    **_SHARED_CHECKS,
}

USUAL_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "max_position_embeddings": "max_positions",
    "type_vocab_size": "token_types",
    "initializer_range": "init_range",
    "layer_norm_eps": "layer_norm_eps",
    "pad_token_id": "pad",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""{BERT's key in config.json, as many families have it: ours}"""
USUAL_CHECKS = {key: _CHECKS[key] for key in USUAL_KEYS}
_SHAPE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "pad_token_id"),
)
SHAPE_KEYS = {key: USUAL_KEYS[key] for key in _SHAPE}
"""Those of USUAL_KEYS that families have whose other keys differ from BERT's."""
SHAPE_CHECKS = {key: USUAL_CHECKS[key] for key in _SHAPE}
