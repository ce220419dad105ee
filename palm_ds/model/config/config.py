"""Encoder hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.config import check_keys, parse
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.settings import Rate, Settings, one_of
from palm_ds.model.config.encoder_kinds import defaults_of_kind, known_kinds
from palm_ds.model.config.presets import PRESETS, preset_values

_gelu_new = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "gelu_new": _gelu_new,
    # transformers' other names of these; a model keeps the one that its config.json has
    "gelu_python": F.gelu,
    "swish": F.silu,
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), _gelu_new
    ),
}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Settings):
    """Encoder hyperparameters."""

    vocab_size: PositiveInt | None = None
    """Rows of the token embedding. Default: the number of the tokenizer's tokens."""
    hidden_size: PositiveInt = 768
    """Size of the hidden states."""
    num_layers: PositiveInt = 12
    """Number of encoder layers."""
    num_heads: PositiveInt = 12
    """Attention heads per layer; must divide the hidden size."""
    intermediate_size: PositiveInt | None = None
    """Inner size of the feed-forward network. Default: 4 times the hidden size."""
    max_positions: PositiveInt = 512
    """Rows of the position embedding; in encoders without one, tokens of the longest text."""
    token_types: PositiveInt = 4
    """Rows of the token type (segment) embedding: the maximum number of texts in an example."""
    task_types: NonNegativeInt = 16
    """Rows of the task embedding (ERNIE 2.0); 0: no task embedding."""
    activation: Annotated[str, one_of(ACTIVATIONS)] = "gelu"
    """Activation of the feed-forward network and the masked-LM head: gelu, relu, silu or gelu_new
    (the tanh approximation), or another name of transformers for one of these, such as swish."""
    head_activation: Annotated[str, one_of(ACTIVATIONS, "")] = ""
    """Activation of the masked-LM head, if it differs from `activation` (RoBERTa: always gelu)."""
    layer_norm_eps: PositiveFloat = 1e-12
    """Epsilon of LayerNorm. ERNIE was trained with 1e-5."""
    dropout: Rate = 0.1
    """Dropout rate after the embeddings, the attention and the feed-forward network."""
    attention_dropout: Rate = 0.1
    """Dropout rate of the attention weights."""
    init_range: PositiveFloat = 0.02
    """Standard deviation of the normal distribution of initial weights, truncated at two standard
    deviations."""
    tie_word_embeddings: bool = True
    """Whether masked-LM heads use the token embeddings as output embeddings; `false`: each head has
    its own, as in some checkpoints."""
    position_offset: NonNegativeInt = 0
    """First row of the position embedding that is used (RoBERTa: 2)."""
    pad: NonNegativeInt = 0
    """Id of the padding token."""
    kind: str = "bert"
    """The architecture: `bert` (also ERNIE and RoBERTa), `modernbert` (also Ettin and mmBERT),
    `nomic_bert`, `electra`, `distilbert`, `albert`, `mpnet`, `deberta_v2`, `eurobert`, `neobert`,
    `gte`, `jina_embeddings_v3`, `ernie_gram`, `ernie_doc`, `unimo`, `ernie_vil`, `bag_of_words`,
    `cnn`, `bilstm`, or a custom one as `module.Class` (docs/model.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Hyperparameters of this `kind` alone (docs/model.md)."""

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
        """Reads hyperparameters (and `preset`). `strict`: values from JSON, where `"1"` is not a
        number. Raises UserError, starting with `where`, for unknown keys and wrong values."""
        own = dict(check_keys(values, {"preset", *cls.__dataclass_fields__}, where))
        if own.get("kind") == "":  # as weights were written before the transformer had a name
            del own["kind"]
        preset = own.pop("preset", None)
        if preset is not None and str(preset) not in PRESETS:  # a list is in no mapping
            raise UserError(f'{where}.preset: no "{preset}"{suggest(str(preset), PRESETS)}')
        defaults = preset_values(preset) if preset else defaults_of_kind(own.get("kind"))
        same_kind = own.get("kind", kind := defaults.get("kind")) == kind
        if same_kind and isinstance(given := own.get("options"), Mapping):
            own["options"] = {**defaults.get("options", {}), **given}
        return parse(cls, {**defaults, **own}, where, strict=strict)
