"""Encoder hyperparameters under the names of ERNIE, PALM and Hugging Face.

read_encoder_config({"preset": "tiny"})                            own names alone
read_encoder_config({"num_hidden_layers": 2, "hidden_size": 48})   those of another program
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from palm_ds.common.config import check_keys
from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig

_ALIASES = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_positions",
    "type_vocab_size": "token_types",
    "sent_type_vocab_size": "token_types",  # wins over type_vocab_size, as in ERNIE's code
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "init_range",
    "pad_token_id": "pad",
}
_SHARED_KEYS = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "tie_word_embeddings",
}
"""Own keys that ERNIE or Hugging Face have too: they do not identify the origin of a config."""
_ROBERTA = ("roberta", "xlm-roberta", "camembert")
"""Model types whose positions are counted from pad + 1."""
_TASK_KEYS = ("task_type_vocab_size", "use_task_id", "use_task_emb")
_MUST_BE: dict[str, tuple[Any, ...]] = {  # the values of this architecture
    "model_type": ("bert", "ernie", *_ROBERTA),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
    "weight_sharing": (True,),
    "has_pooler": (True,),
    "rel_pos_size": (0, None),
}
_WITHOUT_EFFECT = set(
    """architectures auto_map bos_token_id chunk_size_feed_forward classifier_dropout cls_token_id
    do_sample dtype eos_token_id finetuning_task gradient_checkpointing id2label init_class
    is_encoder_decoder is_pairwise label2id mask_token_id max_seq_len max_seqlen name_or_path
    num_labels output_attentions output_hidden_states output_past pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type problem_type
    return_dict sep_token_id torch_dtype torchscript transformers_version unk_token_id use_cache
    _name_or_path""".split()  # noqa: SIM905  a list of quoted names is harder to read
)
FOREIGN_KEYS = {*_ALIASES, *_SHARED_KEYS, *_TASK_KEYS, *_MUST_BE, *_WITHOUT_EFFECT, "emb_size"}


def read_encoder_config(values: Mapping[str, Any], where: str = "backbone") -> EncoderConfig:
    """Reads palm_ds's own keys (and `preset`), or those of ERNIE, PALM and Hugging Face.

    A foreign mapping has its own defaults: two token types, no task embedding, and a LayerNorm eps
    of 1e-12 (Hugging Face: `model_type`), 1e-6 (PALM, which has a task embedding, but no key
    `use_task_id`) or 1e-5 (ERNIE). Raises UserError, starting with `where`, for unknown keys,
    contradicting keys, and other architectures.
    """
    known = {"preset", *(field.name for field in fields(EncoderConfig))}
    values = check_keys(values, known | FOREIGN_KEYS, where)
    own = {key: value for key, value in values.items() if key in known}
    foreign = {key: value for key, value in values.items() if key not in known}
    given = _translate(foreign, own.get("hidden_size"), where)
    if foreign.get("model_type") in _ROBERTA:
        given["position_offset"] = given.setdefault("pad", 1) + 1
        given |= {} if given.get("activation", "gelu") == "gelu" else {"head_activation": "gelu"}
    _check_agreement(own, given, where)
    bare = foreign and own.keys() <= _SHARED_KEYS
    defaults = _foreign_defaults(foreign) if bare else {}
    return EncoderConfig.from_dict({**defaults, **given, **own}, where)


def _translate(foreign: dict[str, Any], hidden_size: int | None, where: str) -> dict[str, Any]:
    """Translates foreign keys to the own ones."""
    for key, right in _MUST_BE.items():
        if key in foreign and foreign[key] not in right:
            names = " or ".join(map(repr, right))
            raise UserError(f"{where}.{key}: must be {names} here, got {foreign[key]!r}")
    if "emb_size" in foreign and foreign["emb_size"] != hidden_size:
        raise UserError(
            f"{where}.emb_size: must equal hidden_size, {hidden_size}, got {foreign['emb_size']!r}"
        )
    filled: dict[str, Any] = {}
    for key, name in _ALIASES.items():  # in this order: the last one wins
        if foreign.get(key) is not None:
            filled[name] = foreign[key]
    if any(key in foreign for key in _TASK_KEYS):
        wanted = foreign.get("use_task_id") or foreign.get("use_task_emb", _is_palms(foreign))
        filled["task_types"] = foreign.get("task_type_vocab_size", 3) if wanted else 0
    return filled


def _is_palms(foreign: dict[str, Any]) -> bool:
    """Whether it is PALM's config, whose encoder has a task embedding unless `use_task_emb` says
    no; ERNIE and Hugging Face state `use_task_id`."""
    stated = {"use_task_id", "model_type"} & foreign.keys()
    return "use_task_emb" in foreign or ("task_type_vocab_size" in foreign and not stated)


def _foreign_defaults(foreign: dict[str, Any]) -> dict[str, Any]:
    """The defaults of a foreign config, depending on its origin."""
    ernie_or_palm = 1e-6 if _is_palms(foreign) else 1e-5
    eps = 1e-12 if "model_type" in foreign else ernie_or_palm
    return {"token_types": 2, "task_types": 0, "layer_norm_eps": eps}


def _check_agreement(own: dict[str, Any], given: dict[str, Any], where: str) -> None:
    """Raises UserError if a value is given under two names and they differ."""
    for name, value in own.items():
        if name in given and given[name] != value:
            raise UserError(
                f"{where}.{name}: {value!r} contradicts {given[name]!r}, given under another name; "
                "give one of them"
            )
