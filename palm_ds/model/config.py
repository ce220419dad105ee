"""The numbers of an encoder, and how ERNIE, PALM and Hugging Face call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from palm_ds.common.config import check_keys, parse
from palm_ds.common.errors import UserError, suggest
from palm_ds.model.activations import ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The numbers of an encoder."""

    vocab_size: int | None = None
    """Rows of the token embedding; None means as many as the tokenizer has tokens."""
    hidden_size: int = 768
    """Hidden size."""
    num_layers: int = 12
    """Number of encoder layers."""
    num_heads: int = 12
    """Attention heads per layer; must divide the hidden size."""
    intermediate_size: int | None = None
    """Inner size of the feed-forward network; None means 4 times the hidden size."""
    max_positions: int = 512
    """Rows of the position embedding."""
    token_types: int = 4
    """Rows of the token type (segment) embedding: how many texts of one example are told apart."""
    task_types: int = 16
    """Rows of the task embedding (ERNIE 2.0); 0 means no task embedding."""
    activation: str = "gelu"
    """Of the feed-forward part and the masked-word head: gelu, relu or gelu_new."""
    layer_norm_eps: float = 1e-12
    """Epsilon of LayerNorm. ERNIE was trained with 1e-5."""
    dropout: float = 0.1
    """After the embeddings, the attention and the feed-forward part."""
    attention_dropout: float = 0.1
    """Inside the attention."""
    init_range: float = 0.02
    """Standard deviation of the first weights, cut at two of them."""
    position_offset: int = 0
    """First row of the position table in use (RoBERTa: 2)."""
    pad: int = 0
    """Id of the padding token."""
    kind: str = ""
    """`module.Class`: an encoder of one's own, with these numbers (docs/model.md); empty: the one
    here."""
    options: dict[str, Any] = field(default_factory=dict)
    """With `kind`: further keywords of its constructor."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "max_positions", "token_types"):
            _check(name, getattr(self, name), 1, None)
        for name in ("task_types", "position_offset", "pad"):
            _check(name, getattr(self, name), 0, None)
        for name in ("vocab_size", "intermediate_size"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), 1, None)
        for name in ("dropout", "attention_dropout"):
            _check(name, getattr(self, name), 0, 1)
        if self.layer_norm_eps <= 0 or self.init_range <= 0:
            name = "layer_norm_eps" if self.layer_norm_eps <= 0 else "init_range"
            raise UserError(f"{name}: must be above 0, got {getattr(self, name)}")
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"num_heads: {self.num_heads} heads cannot share a hidden_size of "
                f"{self.hidden_size} evenly; take a divisor of {self.hidden_size}"
            )
        if self.activation not in ACTIVATIONS:
            raise UserError(
                f'activation: no "{self.activation}"{suggest(self.activation, ACTIVATIONS)}'
            )
        if self.position_offset >= self.max_positions:
            raise UserError(
                f"position_offset: {self.position_offset} leaves none of the {self.max_positions} "
                f"rows of max_positions"
            )
        if self.vocab_size is not None and self.pad >= self.vocab_size:
            raise UserError(f"pad: id {self.pad} is not in a vocabulary of {self.vocab_size}")
        if self.kind and "." not in self.kind:
            raise UserError(f'kind: "{self.kind}" is no module.Class (numbers are a `preset`)')
        if self.options and not self.kind:
            raise UserError("options: are those of a `kind`, a class of one's own")

    @property
    def feed_forward_size(self) -> int:
        """The inner size of the feed-forward network."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def max_length(self) -> int:
        """Tokens of the longest example it can read."""
        return self.max_positions - self.position_offset

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "backbone") -> EncoderConfig:
        """From our own keys (and `preset`), or the keys of ERNIE, PALM and Hugging Face configs.

        Earlier names of our keys (`width`, `layers`, `heads`, ...) are understood too. Foreign
        mappings bring their own defaults: two token types, no task embedding, and a LayerNorm eps
        of 1e-12 (Hugging Face: a `model_type`), 1e-6 (PALM: `use_task_emb`) or 1e-5 (ERNIE).
        Raises UserError for unknown keys, keys that contradict one another, and architectures that
        are not this one; `where` begins its message.
        """
        known = {"preset", *cls.__dataclass_fields__}
        values = check_keys(_current_names(values, where), known | FOREIGN_KEYS, where)
        own = {key: value for key, value in values.items() if key in known}
        foreign = {key: value for key, value in values.items() if key not in known}
        preset = own.pop("preset", None)
        if preset is not None and preset not in PRESETS:
            raise UserError(f'{where}.preset: no "{preset}"{suggest(str(preset), PRESETS)}')
        given = _translate(foreign, own.get("hidden_size"), where)
        bare = preset is None and own.keys() <= _SHARED_KEYS
        usual = _usual(foreign) if foreign and bare else PRESETS.get(preset or "", {})
        if foreign.get("model_type") == "roberta":
            given["position_offset"] = given.setdefault("pad", 1) + 1
        _check_agreement(own, given, where)
        return parse(cls, {**usual, **given, **own}, where)


def _check(name: str, value: float, least: int, below: int | None) -> None:
    if value < least or (below is not None and value >= below):
        limit = f"at least {least}" + ("" if below is None else f" and below {below}")
        raise UserError(f"{name}: must be {limit}, got {value}")


PRESETS: dict[str, dict[str, Any]] = {
    # The published sizes; the vocabulary is the tokenizer's. ERNIE: the configs of its `repro`
    # branch and of its released archives; PaddleNLP lists the same numbers. 1.0 is Chinese; 2.0 in
    # Chinese has relu. Tiny has ERNIE 1.0's two token types and no task embedding.
    "ernie-1.0-base": dict(
        activation="relu", max_positions=513, token_types=2, task_types=0, layer_norm_eps=1e-5
    ),
    "ernie-2.0-base": dict(layer_norm_eps=1e-5),
    "ernie-2.0-large": dict(hidden_size=1024, num_layers=24, num_heads=16, layer_norm_eps=1e-5),
    "ernie-2.0-base-zh": dict(activation="relu", max_positions=513, layer_norm_eps=1e-5),
    "ernie-2.0-large-zh": dict(
        hidden_size=1024, num_layers=24, num_heads=16, activation="relu", layer_norm_eps=1e-5
    ),
    "ernie-tiny": dict(
        hidden_size=1024,
        num_layers=3,
        num_heads=16,
        activation="relu",
        max_positions=600,
        token_types=2,
        task_types=0,
        layer_norm_eps=1e-5,
    ),
    "bert-base": dict(token_types=2, task_types=0),
    "bert-large": dict(hidden_size=1024, num_layers=24, num_heads=16, token_types=2, task_types=0),
    "roberta-base": dict(
        max_positions=514,
        position_offset=2,
        pad=1,
        token_types=1,
        task_types=0,
        layer_norm_eps=1e-5,
    ),
    "roberta-large": dict(
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        max_positions=514,
        position_offset=2,
        pad=1,
        token_types=1,
        task_types=0,
        layer_norm_eps=1e-5,
    ),
    # ERNIE 2.0's shape in sizes for a CPU.
    "tiny": dict(hidden_size=128, num_layers=2, num_heads=2, layer_norm_eps=1e-5),
    "mini": dict(hidden_size=256, num_layers=2, num_heads=4, layer_norm_eps=1e-5),
    "small": dict(hidden_size=256, num_layers=4, num_heads=4, layer_norm_eps=1e-5),
    "medium": dict(hidden_size=512, num_layers=8, num_heads=8, layer_norm_eps=1e-5),
}

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
_EARLIER = {  # what recipes and weights called them before 0.1.0
    "width": "hidden_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "ffn": "intermediate_size",
    "positions": "max_positions",
    "segments": "token_types",
    "task_slots": "task_types",
    "eps": "layer_norm_eps",
}
_SHARED_KEYS = {"vocab_size", "hidden_size", "intermediate_size", "layer_norm_eps"}
"""Keys of ours that ERNIE or Hugging Face call the same: they do not tell whose config it is."""
_TASK_KEYS = ("task_type_vocab_size", "use_task_id", "use_task_emb")
_MUST_BE: dict[str, tuple[Any, ...]] = {  # the values that are this architecture
    "model_type": ("bert", "ernie", "roberta"),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
    "tie_word_embeddings": (True,),
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
    _name_or_path""".split()  # noqa: SIM905  a wall of quotes reads worse
)
FOREIGN_KEYS = {*_ALIASES, *_SHARED_KEYS, *_TASK_KEYS, *_MUST_BE, *_WITHOUT_EFFECT, "emb_size"}


def _current_names(values: object, where: str) -> object:
    """A mapping with earlier names of our keys replaced by today's; anything else as it is."""
    if not isinstance(values, Mapping):
        return values
    for earlier, name in _EARLIER.items():
        if earlier in values and values.get(name, values[earlier]) != values[earlier]:
            raise UserError(
                f"{where}.{earlier}: {values[earlier]!r} contradicts {name}: {values[name]!r}; "
                f"they are one setting, give {name} alone"
            )
    return {_EARLIER.get(key, key): value for key, value in values.items()}


def _translate(foreign: dict[str, Any], hidden_size: int | None, where: str) -> dict[str, Any]:
    """Foreign keys in our words."""
    for key, right in _MUST_BE.items():
        if key in foreign and foreign[key] not in right:
            names = " or ".join(map(repr, right))
            raise UserError(f"{where}.{key}: only {names} is this encoder, got {foreign[key]!r}")
    if "emb_size" in foreign and foreign["emb_size"] != hidden_size:
        raise UserError(f"{where}.emb_size: must equal hidden_size in this encoder")
    filled: dict[str, Any] = {}
    for key, name in _ALIASES.items():  # in their order: the later wins
        if foreign.get(key) is not None:
            filled[name] = foreign[key]
    if any(key in foreign for key in _TASK_KEYS):
        wanted = foreign.get("use_task_id") or foreign.get("use_task_emb")
        filled["task_types"] = foreign.get("task_type_vocab_size", 3) if wanted else 0
    return filled


def _usual(foreign: dict[str, Any]) -> dict[str, Any]:
    """What a config that leaves it out means, by where it comes from."""
    ernie_or_palm = 1e-6 if "use_task_emb" in foreign else 1e-5
    eps = 1e-12 if "model_type" in foreign else ernie_or_palm
    return {"token_types": 2, "task_types": 0, "layer_norm_eps": eps}


def _check_agreement(own: dict[str, Any], given: dict[str, Any], where: str) -> None:
    """A number may be said twice, in our word and a foreign one, but not differently."""
    for name, value in own.items():
        if name in given and given[name] != value:
            raise UserError(
                f"{where}.{name}: {value!r} contradicts the {given[name]!r} that the same mapping "
                f"gives under another name"
            )
