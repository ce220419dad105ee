"""Encoder hyperparameters, with the aliases of ERNIE, PALM and Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.config import check_keys, parse
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.settings import Rate, Settings, one_of
from palm_ds.model.config.encoder_kinds import defaults_of_kind, known_kinds
from palm_ds.model.config.presets import PRESETS, preset_values

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Settings):
    """Encoder hyperparameters."""

    vocab_size: PositiveInt | None = None
    """Rows of the token embedding; None means as many as the tokenizer has tokens."""
    hidden_size: PositiveInt = 768
    """Hidden size."""
    num_layers: PositiveInt = 12
    """Number of encoder layers."""
    num_heads: PositiveInt = 12
    """Attention heads per layer; must divide the hidden size."""
    intermediate_size: PositiveInt | None = None
    """Inner size of the feed-forward network; None means 4 times the hidden size."""
    max_positions: PositiveInt = 512
    """Rows of the position embedding; without one, tokens of the longest text."""
    token_types: PositiveInt = 4
    """Rows of the token type (segment) embedding: the number of texts in an example."""
    task_types: NonNegativeInt = 16
    """Rows of the task embedding (ERNIE 2.0); 0 means no task embedding."""
    activation: Annotated[str, one_of(ACTIVATIONS)] = "gelu"
    """Activation of the feed-forward network and the masked-LM head: gelu, relu, silu or
    gelu_new."""
    head_activation: Annotated[str, one_of(ACTIVATIONS, "")] = ""
    """Activation of the masked-LM head, if another than `activation` (RoBERTa: always gelu)."""
    layer_norm_eps: PositiveFloat = 1e-12
    """Epsilon of LayerNorm. ERNIE was trained with 1e-5."""
    dropout: Rate = 0.1
    """Dropout rate after the embeddings, the attention and the feed-forward network."""
    attention_dropout: Rate = 0.1
    """Dropout rate of the attention weights."""
    init_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights, truncated at two standard deviations."""
    tie_word_embeddings: bool = True
    """Whether masked-LM heads use the token embeddings as output embeddings; `false`: each has a
    matrix of its own (as in some checkpoints)."""
    position_offset: NonNegativeInt = 0
    """First row of the position embedding that is used (RoBERTa: 2)."""
    pad: NonNegativeInt = 0
    """Id of the padding token."""
    kind: str = "bert"
    """The architecture: `bert` (also ERNIE and RoBERTa), `modernbert` (also Ettin and mmBERT),
    `nomic_bert`, `bag_of_words`, `cnn`, `bilstm`, or a custom one as `module.Class`
    (docs/model.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """The values of an architecture that others do not have."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"num_heads: {self.num_heads} does not divide the hidden_size {self.hidden_size}; "
                f"use a divisor of {self.hidden_size}"
            )
        if self.position_offset >= self.max_positions:
            raise UserError(
                f"position_offset: {self.position_offset} must be below max_positions, "
                f"{self.max_positions}"
            )
        if self.vocab_size is not None and self.pad >= self.vocab_size:
            raise UserError(f"pad: {self.pad} must be below vocab_size, {self.vocab_size}")
        if "." not in self.kind and self.kind not in known_kinds():
            near = suggest(self.kind, known_kinds())
            raise UserError(
                f'kind: no encoder "{self.kind}"{near} (or module.Class; `preset` names a size)'
            )

    @property
    def feed_forward_size(self) -> int:
        """Inner size of the feed-forward network."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def max_length(self) -> int:
        """Tokens of the longest example that the encoder can read."""
        return self.max_positions - self.position_offset

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], where: str = "backbone", *, strict: bool = False
    ) -> EncoderConfig:
        """Reads palm_ds's own keys (and `preset`), or those of ERNIE, PALM and Hugging Face.

        A foreign mapping has its own defaults: two token types, no task embedding, and a LayerNorm
        eps of 1e-12 (Hugging Face: `model_type`), 1e-6 (PALM, which has a task embedding, but no
        key `use_task_id`) or 1e-5 (ERNIE). `strict`: values from JSON, where `"1"` is not a number.
        Raises UserError, starting with `where`, for unknown keys, contradicting keys, and other
        architectures.
        """
        known = {"preset", *cls.__dataclass_fields__}
        values = check_keys(values, known | FOREIGN_KEYS, where)
        own = {key: value for key, value in values.items() if key in known}
        if own.get("kind") == "":  # as weights were written before the transformer had a name
            del own["kind"]
        foreign = {key: value for key, value in values.items() if key not in known}
        preset = own.pop("preset", None)
        if preset is not None and str(preset) not in PRESETS:  # a list is in no mapping
            raise UserError(f'{where}.preset: no "{preset}"{suggest(str(preset), PRESETS)}')
        given = _translate(foreign, own.get("hidden_size"), where)
        bare = preset is None and own.keys() <= _SHARED_KEYS
        defaults = preset_values(preset) if preset else defaults_of_kind(own.get("kind"))
        defaults = _foreign_defaults(foreign) if foreign and bare else defaults
        if foreign.get("model_type") in _ROBERTA:
            given["position_offset"] = given.setdefault("pad", 1) + 1
            given |= (
                {} if given.get("activation", "gelu") == "gelu" else {"head_activation": "gelu"}
            )
        _check_agreement(own, given, where)
        return parse(cls, {**defaults, **given, **own}, where, strict=strict)


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


def _translate(foreign: dict[str, Any], hidden_size: int | None, where: str) -> dict[str, Any]:
    """Translates foreign keys to the own ones."""
    for key, right in _MUST_BE.items():
        if key in foreign and foreign[key] not in right:
            names = " or ".join(map(repr, right))
            raise UserError(f"{where}.{key}: must be {names} here, got {foreign[key]!r}")
    if "emb_size" in foreign and foreign["emb_size"] != hidden_size:
        raise UserError(f"{where}.emb_size: must equal hidden_size")
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
