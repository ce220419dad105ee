"""Interface of encoders: vectors of the tokens of packed rows, and answers about itself.

    class MyEncoder(Encoder):     forward, flops, activations; word, pooler, layers
    backbone: {kind: bert}        a class in palm_ds/model/encoder/kinds
    backbone: {kind: my_module.MyEncoder}

The transformer (transformer.py) and the encoders over words (word_encoder.py) are its abstract
subclasses. Nobody else asks of which class an encoder is: what LoRA changes, what Muon
orthogonalizes, what a step costs and which other programs have such an encoder are methods here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.common.plugins import check_options
from palm_ds.model.attention.attention import AttentionPlan
from palm_ds.model.config.config import ACTIVATIONS, EncoderConfig
from palm_ds.model.config.encoder_kinds import class_of_kind
from palm_ds.model.encoder.regions import ReadsImages
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels, layer_norm
from palm_ds.model.ops.dropout import DropoutKeys, dropout_keys
from palm_ds.model.pooling import first_tokens

PLAIN = Kernels()
ROLES = ("query", "key", "value", "attention_output", "intermediate", "output")
"""What a matrix of a layer can be, in transformers' words."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A linear map that every layer has."""

    path: str
    """Of the module, in its layer."""
    roles: tuple[str, ...]
    """Some of ROLES; several are stacked."""
    stacked: tuple[int, ...] = (1,)
    """The shares of the rows of its weight that the matrices stacked in it have: (1, 1) for two of
    one height."""


@dataclass(frozen=True, kw_only=True)
class EncoderFlops:
    """Floating-point operations of all layers, forward and backward."""

    token: float
    """For each token."""
    pairs: Mapping[int | None, float] = field(default_factory=dict)
    """{window: for each pair of tokens of a sequence that are at most that many tokens apart};
    None: for all pairs."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The values that a layer keeps for each token until its backward pass, on average."""

    attention: float
    """In the layer's first half, dropout masks left out."""
    feed_forward: float
    """In the second half, which the last layer may compute for few tokens only."""
    heads: int = 0
    """Attention heads, each with one fp32 value."""
    widest: float
    """Values of the layer's inner tensors and their gradients that exist at the same time."""


class Encoder(ReadsImages, ABC):
    """Maps packed rows of tokens to one vector per token.

    `recompute` keeps only each layer's input for the backward pass and computes the rest again:
    less memory, a third more computation, identical numbers.

    A constructor sets `word`, `layers` and `pooler`, and initializes them. Every parameter must be
    used in every forward pass.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Hyperparameters that a recipe need not give, where they differ from EncoderConfig's."""
    options_type: ClassVar[type | None] = None
    """The dataclass of `backbone.options`; None: they are keywords of the constructor."""
    hf: ClassVar[str] = ""
    """The file of palm_ds/weights/formats/huggingface/architectures that says what Hugging Face
    calls its tensors, its values and the classes of its heads, or a class as `module.Class`;
    empty: it has no such encoder."""
    paddle: ClassVar[str] = ""
    """Likewise, if PaddleNLP has it but Hugging Face does not."""
    free_options: ClassVar[tuple[str, ...]] = ()
    """Options without weights of their own, such as what heads read: a run may start from weights
    with others."""
    takes_layers: ClassVar[bool] = False
    """Whether `init_layers` can choose among the layers of a larger one."""
    sharing_options: ClassVar[tuple[str, ...]] = ()
    """Options that say which layers have the same weights; `init_layers` may change them."""
    above_layers: ClassVar[tuple[str, ...]] = ("pooler",)
    """Modules that come after the last layer."""
    pools_tokens: ClassVar[bool] = False
    """Whether heads of tokens read vectors after the pooler, as those of whole texts do."""
    detects_in_context: ClassVar[bool] = False
    """Whether heads that detect replaced tokens also read the vector of a text's first token."""
    rope_options: ClassVar[tuple[str, str]] = ("rotary_base", "local_rotary_base")
    """The options of rotary bases: of layers that attend to whole texts, and of local ones."""

    word: nn.Embedding
    """The token embeddings, which masked-LM heads use as output embeddings."""
    pooler: nn.Module
    """Makes the input of heads that read whole texts from the vectors (n, hidden) of their first
    tokens."""
    layers: nn.ModuleList

    def __init__(self, config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False):
        super().__init__()
        assert config.vocab_size is not None, "vocab_size must be filled in from the tokenizer"
        self.config, self.kernels, self.recompute = config, kernels, recompute
        self.adapter_columns = 0  # of the widest input whose dropout is not the encoder's own

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @classmethod
    def rope_base(cls, config: EncoderConfig, *, local: bool = False) -> float | None:
        """The base of the rotary positions in layers that attend to whole texts, or in the local
        ones, which have a window; None: there are none."""
        return None

    def set_rope_base(self, base: float, *, local: bool = False) -> None:
        """Use another base in those layers from now on."""
        raise NotImplementedError(f"{type(self).__name__} has no rotary positions")

    @abstractmethod
    def forward(self, batch: Batch, at: torch.Tensor | None = None) -> torch.Tensor:
        """Returns (rows, length, hidden); vectors of padding are finite and meaningless. With flat
        positions `at` (n,) returns the vectors (n, hidden) there, and need not compute others. A
        vector depends on nothing outside its own text."""

    # ---- what heads read ----

    @property
    def averages_texts(self) -> bool:
        """Whether the pooler reads the mean of a text's vectors, instead of its first token's."""
        return False

    def pools(self, head: nn.Module) -> bool:
        """Whether a head reads vectors after the pooler; a user's may be any module."""
        return getattr(head, "pooled", False) or (
            self.pools_tokens and getattr(head, "classifies", False)
        )

    @property
    def pools_each_token(self) -> bool:
        """Whether that mean is of what the pooler makes of each token, instead of its input."""
        return False

    def pooled_texts(self, vectors: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The input of heads of whole texts (texts, hidden), of the vectors (texts, length, hidden)
        of one text each, whose tokens are `real` (texts, length)."""
        if self.pools_each_token:
            return self.text_rows(self.pooler(vectors), real)
        return self.pooler(self.text_rows(vectors, real))

    def text_rows(self, vectors: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The input of the pooler (texts, hidden), of the vectors (texts, length, hidden) of one
        text each, whose tokens are `real` (texts, length)."""
        if not self.averages_texts:
            return first_tokens(vectors, real)
        kept = torch.where(real.unsqueeze(-1), vectors, 0.0)
        return kept.sum(1) / real.sum(1, keepdim=True).clamp(min=1)

    def masked_lm_transform(self) -> tuple[nn.Linear, nn.Module] | None:
        """The linear map and the norm of masked-LM heads, whose output has the width of the token
        embeddings; None: heads read vectors as they are."""
        width, kernel = self.word.embedding_dim, self.kernels.layer_norm
        return nn.Linear(self.hidden_size, width), layer_norm(
            width, self.config.layer_norm_eps, kernel
        )

    @property
    def masked_lm_bias(self) -> bool:
        """Whether the output of masked-LM heads has a bias."""
        return True

    @classmethod
    def ties_words(cls, config: EncoderConfig) -> bool:
        """Whether the output embeddings of masked-LM heads can be the token embeddings."""
        return True

    # ---- what it costs ----

    @classmethod
    @abstractmethod
    def flops(cls, config: EncoderConfig) -> EncoderFlops:
        """Operations that its layers compute."""

    @classmethod
    @abstractmethod
    def activations(cls, config: EncoderConfig) -> Activations:
        """Activations that a layer keeps."""

    @classmethod
    def masked_lm_weights(cls, config: EncoderConfig) -> int:
        """Weights of a masked-LM head that a label's vector is multiplied with."""
        width = cls.embedding_width(config)
        return width * (config.hidden_size + (config.vocab_size or 0))

    @classmethod
    def least_parameters(cls, config: EncoderConfig, vocabulary: int) -> int:
        """The least number of parameters with a vocabulary of this size; 0: unknown."""
        return 0

    @classmethod
    def embedding_width(cls, config: EncoderConfig) -> int:
        """Width of the token embeddings."""
        return config.hidden_size

    @classmethod
    def first_input_width(cls, config: EncoderConfig) -> int:
        """Width of the vectors that the first layer reads."""
        return cls.embedding_width(config)

    @classmethod
    def has_token_types(cls, config: EncoderConfig) -> bool:
        """Whether texts of an example differ by more than what separates them."""
        return True

    @classmethod
    def has_positions(cls, config: EncoderConfig) -> bool:
        """Whether there is a position embedding, with `max_positions` rows."""
        return True

    @classmethod
    def fits_place(cls, source: EncoderConfig, layer: int, target: EncoderConfig, to: int) -> bool:
        """Whether `layers[layer]` of one encoder computes as `layers[to]` of another does, apart
        from sizes."""
        return True

    @classmethod
    def adds_to_scores(cls, config: EncoderConfig) -> bool:
        """Whether relative positions add to the scores of attention."""
        return False

    @classmethod
    def memory_length(cls, config: EncoderConfig) -> int:
        """Vectors of a document's earlier windows that each layer attends to, too; 0: none."""
        return 0

    # ---- what is in it ----

    @classmethod
    def matrices(cls, config: EncoderConfig) -> tuple[Matrix, ...]:
        """The linear maps of its layers that LoRA changes and oneDNN packs."""
        return ()

    @classmethod
    def is_specified(cls) -> bool:
        """Whether the answers are about this very class: each layer's output means the same in
        every program that has such an encoder, and costs what `flops` and `activations` return.
        False for a subclass that computes something of its own."""
        return False

    @classmethod
    def own_layers(cls, config: EncoderConfig) -> int:
        """The number of layers with weights of their own: the length of `layers`."""
        return config.num_layers

    @property
    def computed_layers(self) -> list[nn.Module]:
        """The layers in the order in which a forward pass computes them; one whose weights several
        share is there several times."""
        return list(self.layers)

    def hidden_module(self, number: int) -> nn.Module:
        """The module that returns the hidden state `number`, from 1: the output of a layer."""
        return self.computed_layers[number - 1]

    def qkv_module(self, number: int) -> nn.Module | None:
        """The module that returns the queries, keys and values (rows, length, 3 hidden) of the
        layer `number`, from 1, as attention compares them; None if there is none."""
        return None

    # ---- generating texts ----

    @property
    def generates(self) -> bool:
        """Whether it reads further tokens of a text without reading the text again (`read`)."""
        return False

    def read(self, batch: Batch, plans: Sequence[AttentionPlan]) -> torch.Tensor:
        """(rows, length, hidden) with an attention plan for each layer: a step of decoding."""
        raise NotImplementedError

    # ---- for subclasses ----

    @classmethod
    def options_of(cls, config: EncoderConfig) -> Any:
        """`backbone.options` as `options_type`, checked; None without such a type."""
        if cls.options_type is None:
            return None
        return parse(cls.options_type, dict(config.options), "backbone.options", strict=True)

    @classmethod
    def encoder_options(cls, config: EncoderConfig) -> dict[str, Any]:
        """The options that a run must have in common with the weights that it starts from, also
        where they are defaults."""
        options = cls.options_of(config)
        values = dict(config.options) if options is None else asdict(options)
        return {name: value for name, value in values.items() if name not in cls.free_options}

    def _dropout_keys(self, batch: Batch) -> DropoutKeys | None:
        """None if nothing is dropped, or torch draws what is."""
        config = self.config
        dropping = config.dropout or config.attention_dropout or self.adapter_columns
        if not self.training or not dropping or self.kernels.dropout != "counter":
            return None
        attended = batch.input_ids.shape[1] + self.memory_length(config)
        widest = max(config.hidden_size, self.word.embedding_dim, self.adapter_columns)
        return dropout_keys(batch, max(widest, attended))


class Pooler(nn.Module):
    """The input of heads that read whole texts: a linear map and tanh, or another activation, (n,
    hidden) -> the same, or (n, outputs)."""

    def __init__(self, hidden_size: int, activation: str = "tanh", outputs: int | None = None):
        super().__init__()
        self.activation = torch.tanh if activation == "tanh" else ACTIVATIONS[activation]
        self.dense = nn.Linear(hidden_size, outputs or hidden_size)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(rows))


def refuse_task_types(config: EncoderConfig) -> None:
    """Raises UserError for an encoder without a task embedding whose configuration has one."""
    if config.task_types:
        raise UserError(
            f"backbone.task_types: {config.task_types}, but {config.kind} has no task embedding; "
            "set 0"
        )


def with_rope_bases(config: EncoderConfig, bases: Sequence[float | None]) -> EncoderConfig:
    """The configuration with other bases of rotary positions: in layers that attend to whole texts,
    and in the local ones; None: its own."""
    names = encoder_class(config).rope_options
    changed = {name: base for name, base in zip(names, bases, strict=True) if base is not None}
    return replace(config, options={**config.options, **changed}) if changed else config


def has_windows(config: EncoderConfig) -> bool:
    """Whether tokens of some layers attend to their neighbors alone."""
    return any(window is not None for window in encoder_class(config).flops(config).pairs)


def memory_shape(config: EncoderConfig) -> tuple[int, int, int]:
    """(layers, memory, hidden) of what an encoder remembers of a document."""
    return config.num_layers, encoder_class(config).memory_length(config), config.hidden_size


def encoder_class(config: EncoderConfig) -> type[Encoder]:
    """The class named by `backbone.kind`. Raises UserError if there is no such class, or it does
    not take these options."""
    cls = class_of_kind(config.kind, Encoder)
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise UserError(
            f"backbone.kind: {config.kind} does not define {', '.join(missing)}; a subclass of "
            "palm.TransformerEncoder has them, and one of palm.Encoder defines them itself"
        )
    if cls.options_type is not None:
        cls.options_of(config)
    else:
        taken = ("kernels", "recompute")
        check_options(cls, config.options, "backbone.options", base=Encoder, reserved=taken)
    return cls


def build_encoder(
    config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False
) -> Encoder:
    """A newly initialized encoder of the configured class."""
    cls = encoder_class(config)
    keywords = {} if cls.options_type is not None else config.options
    return cls(config, kernels, recompute=recompute, **keywords)


def gather_positions(at: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The flat positions `at` (n,) of tensors (rows, length, any), each as (n, any); the tensors
    themselves if `at` is None."""
    return (
        tensors
        if at is None
        else tuple(tensor.flatten(0, 1).index_select(0, at) for tensor in tensors)
    )


def init_weights(module: nn.Module, std: float, *, truncated: bool = True) -> None:
    """Initialize every linear map and embedding in `module`, in module order.

    Truncating a normal distribution at two standard deviations leaves 0.88 of its deviation. New
    heads of fine-tuning are not truncated, as in transformers: a smaller head learns more slowly,
    which shows in runs of a few epochs."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding) and truncated:
            nn.init.trunc_normal_(part.weight, std=std, a=-2 * std, b=2 * std)
        elif isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
