"""The encoder: ERNIE 2.0, BERT and RoBERTa are one architecture in different sizes.

    word + position + segment (+ task) embeddings -> LayerNorm -> dropout
    num_layers x (attention, add, LayerNorm; feed-forward, add, LayerNorm)   (post-LN)
    pooler: tanh of a linear map of a row, for heads that read whole texts

It runs on packed rows: a token attends to its own sequence only, whatever else is in the row.

Weights are initialised as BERT's and ERNIE's are (TruncatedNormal in both): matrices and embeddings
from a normal distribution with standard deviation `init_range`, truncated at two standard
deviations; biases 0, LayerNorm weights 1. They are drawn in module order from torch's generator, so
`torch.manual_seed` determines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from palm_ds.common.plugins import check_options
from palm_ds.model.attention.attention import AttentionPlan, attend, plan_attention
from palm_ds.model.config.activations import ACTIVATIONS
from palm_ds.model.config.config import PRESETS, EncoderConfig
from palm_ds.model.config.encoder_kinds import class_of_kind
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels, layer_norm
from palm_ds.model.ops.compiled import CompiledRegion, padded_positions
from palm_ds.model.ops.dropout import DropoutKeys, add_dropout, dropout, dropout_keys
from palm_ds.model.ops.fused_norm import Drop, FusedLayerNorm

__all__ = [
    "PRESETS",
    "Encoder",
    "EncoderConfig",
    "EncoderLayer",
    "Pooler",
    "encoder_class",
    "build_encoder",
    "init_weights",
    "gather_positions",
]

PLAIN = Kernels()


class EncoderLayer(nn.Module):
    """One encoder layer; each half ends in dropout, add, LayerNorm ("dan" in ERNIE's code)."""

    def __init__(self, config: EncoderConfig, kernels: Kernels):
        super().__init__()
        size, inner = config.hidden_size, config.feed_forward_size
        self.num_heads, self.activation = config.num_heads, ACTIVATIONS[config.activation]
        self.dropout_rate, self.attention_rate = config.dropout, config.attention_dropout
        self._keys: DropoutKeys | None = None
        self._at: torch.Tensor | None = None
        self._dropouts = 0
        self.register_forward_pre_hook(_begin_layer, with_kwargs=True)
        self.qkv = nn.Linear(size, 3 * size)
        self.project = nn.Linear(size, size)
        self.attention_norm = layer_norm(size, config.layer_norm_eps, kernels.layer_norm)
        self.expand = nn.Linear(size, inner)
        self.contract = nn.Linear(inner, size)
        self.output_norm = layer_norm(size, config.layer_norm_eps, kernels.layer_norm)

    def forward(
        self, x: torch.Tensor, plan: AttentionPlan, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns (rows, length, hidden), or (n, hidden) at the flat positions `at` (n,)."""
        return self.rest(x, self.attention(x, plan), at)

    def rest(
        self, x: torch.Tensor, attended: torch.Tensor, at: torch.Tensor | None
    ) -> torch.Tensor:
        """All that follows the attention."""
        x, attended = gather_positions(at, x, attended)
        x = self._add_norm(self.attention_norm, x, self.project(attended))
        return self._add_norm(self.output_norm, x, self.feed_forward(x))

    def _add_norm(self, norm: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """LayerNorm(x + dropout(y))."""
        overridden = type(self).residual_dropout is not EncoderLayer.residual_dropout
        if overridden or not isinstance(norm, FusedLayerNorm):
            return norm(self.residual_dropout(x, y))
        keys, rate = self._next_keys(y), self.dropout_rate if self.training else 0.0
        if rate and keys is None:
            return norm(x, dropout(y, rate, None))
        return norm(x, y, Drop(rate, keys) if rate and keys else None)

    def compile_in(self, region: CompiledRegion, *, whole: bool) -> None:
        """`whole`: with the attention, whose implementation must allow it."""
        if whole or type(self).forward is not EncoderLayer.forward:
            self.forward = region.wrap(self.forward)
        else:
            self.rest = region.wrap(self.rest)

    def attention(self, x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Multi-head attention before the output projection, (rows, length, hidden)."""
        rate = self.attention_rate if self.training else 0.0
        return attend(self.qkv(x), plan, num_heads=self.num_heads, dropout=rate)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """The feed-forward network, (..., hidden) -> (..., hidden)."""
        return self.contract(self.activation(self.expand(x)))  # inside: (..., intermediate)

    def residual_dropout(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x + dropout(y), (rows, length, hidden) or (n, hidden) at the positions `at`. Every call
        in a forward pass has its own masks."""
        keys = self._next_keys(y)
        return add_dropout(x, y, self.dropout_rate if self.training else 0.0, keys)

    def _next_keys(self, y: torch.Tensor) -> DropoutKeys | None:
        """The keys of the next dropout in this layer, for the rows of y."""
        self._dropouts += 1  # 0 is the attention
        return self.keys_at(self._dropouts, y)

    def keys_at(self, site: int, y: torch.Tensor) -> DropoutKeys | None:
        """The keys of a place in this layer, for the rows of y in this forward pass."""
        keys = None if self._keys is None else self._keys.site(site)
        if keys is not None and y.dim() == 2 and self._at is not None:
            keys = keys.select(self._at)
        return keys


def _begin_layer(layer: EncoderLayer, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Note what the dropout masks of a forward pass depend on. It comes with the plan, so that a
    pass that is repeated for the backward pass gets the same masks."""
    arguments = dict(zip(("x", "plan", "at"), positional, strict=False)) | named
    plan = arguments.get("plan")
    layer._keys = plan.keys if isinstance(plan, AttentionPlan) else None
    layer._at, layer._dropouts = arguments.get("at"), 0


def gather_positions(at: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The flat positions `at` (n,) of tensors (rows, length, any), each as (n, any); the tensors
    themselves if `at` is None."""
    return tensors if at is None else tuple(x.flatten(0, 1).index_select(0, at) for x in tensors)


class Pooler(nn.Module):
    """The input of heads that read whole texts: tanh of a linear map, (n, hidden) -> same."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(rows))


class Encoder(nn.Module):
    """Maps packed rows of tokens to one vector per token.

    `recompute` keeps only each layer's input for the backward pass and computes the rest again:
    less memory, a third more computation, identical numbers.

    A custom encoder is a subclass that overrides `layer`, or `forward` under the same contract. Its
    constructor may take more keywords, which a recipe sets in `backbone.options`. It must keep
    `word` and `pooler`, and use every parameter in every forward.
    """

    def __init__(self, config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False):
        super().__init__()
        assert config.vocab_size is not None, "vocab_size must be filled in from the tokenizer"
        self.config, self.kernels, self.recompute = config, kernels, recompute
        self.adapter_columns = 0  # of the widest input whose dropout is not the encoder's own
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_positions, config.hidden_size)
        self.segment = nn.Embedding(config.token_types, config.hidden_size)
        if config.task_types:
            self.task = nn.Embedding(config.task_types, config.hidden_size)
        self.norm = layer_norm(config.hidden_size, config.layer_norm_eps, kernels.layer_norm)
        self.layers = nn.ModuleList(self.layer(number) for number in range(config.num_layers))
        self.pooler = Pooler(config.hidden_size)
        init_weights(self, config.init_range)
        if kernels.compile == "on":
            self._compile()

    def _compile(self) -> None:
        region, whole = CompiledRegion("layers"), self.kernels.attention != "tiles"
        for layer in self.layers:
            if isinstance(layer, EncoderLayer):
                layer.compile_in(region, whole=whole)
            else:
                layer.forward = region.wrap(layer.forward)
        self._join = CompiledRegion("embeddings").wrap(self._join)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def layer(self, number: int) -> nn.Module:
        """Builds the layer `number` (from 0), which is called as `EncoderLayer` is; only the last
        one gets `at`."""
        return EncoderLayer(self.config, self.kernels)

    def forward(self, batch: Batch, at: torch.Tensor | None = None) -> torch.Tensor:
        """Returns (rows, length, hidden); vectors of padding are finite and meaningless. With flat
        positions `at` (n,) returns (n, hidden) and computes most of the last layer for these
        only."""
        keys = self._dropout_keys(batch)
        x = self._embed(batch, keys)
        compiled = self.kernels.compile == "on"
        plan = plan_attention(batch, self.kernels.attention, compiled=compiled, keys=keys)
        rows = at if at is None or not compiled else padded_positions(at, batch.input_ids.numel())
        for number, layer in enumerate(self.layers, 1):
            arguments = () if rows is None or number < len(self.layers) else (rows,)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, plan.for_layer(number), *arguments, use_reentrant=False)
            else:
                x = layer(x, plan.for_layer(number), *arguments)
        return x if at is None or not compiled else x[: len(at)]

    def read(self, batch: Batch, plans: Sequence[AttentionPlan]) -> torch.Tensor:
        """(rows, length, hidden) with an attention plan for each layer: a step of decoding."""
        x = self._embed(batch, None)
        for layer, plan in zip(self.layers, plans, strict=True):
            x = layer(x, plan)
        return x

    def _embed(self, batch: Batch, keys: DropoutKeys | None) -> torch.Tensor:
        positions = batch.position_ids + self.config.position_offset
        parts = [self.word(batch.input_ids), self.position(positions)]
        parts.append(self.segment(batch.token_type_ids))
        if self.config.task_types:
            parts.append(self.task(batch.task_ids))
        return self._join(parts, keys)

    def _join(self, parts: list[torch.Tensor], keys: DropoutKeys | None) -> torch.Tensor:
        """Sum, LayerNorm and dropout of the embeddings. The look-ups are not compiled with it:
        their gradients would be added up in no fixed order."""
        x = parts[0]
        for part in parts[1:]:  # ERNIE's order: word, position, segment, task
            x = x + part
        rate = self.config.dropout if self.training else 0.0
        if rate and keys and isinstance(self.norm, FusedLayerNorm):
            return self.norm(x, drop=Drop(rate, keys), after=True)
        return dropout(self.norm(x), rate, keys)

    def _dropout_keys(self, batch: Batch) -> DropoutKeys | None:
        """None if nothing is dropped, or torch draws what is."""
        config = self.config
        dropping = config.dropout or config.attention_dropout or self.adapter_columns
        if not self.training or not dropping or self.kernels.dropout != "counter":
            return None
        columns = max(config.hidden_size, self.adapter_columns, batch.input_ids.shape[1])
        return dropout_keys(batch, columns)


def encoder_class(config: EncoderConfig) -> type[Encoder]:
    """The class named by `backbone.kind`, or `Encoder`. Raises UserError if there is no such class
    or its constructor does not take these options."""
    if not config.kind:
        return Encoder
    found = class_of_kind(config.kind, Encoder)
    taken = ("kernels", "recompute")
    check_options(found, config.options, "backbone.options", base=Encoder, reserved=taken)
    return found


def build_encoder(
    config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False
) -> Encoder:
    """A newly initialised encoder of the configured class."""
    return encoder_class(config)(config, kernels, recompute=recompute, **config.options)


def init_weights(module: nn.Module, std: float, *, truncated: bool = True) -> None:
    """Initialise every linear map and embedding in `module`, in module order.

    Truncating a normal distribution at two standard deviations leaves 0.88 of its deviation. New
    heads of fine-tuning are not truncated, as in transformers: a smaller head learns more slowly,
    which shows in runs of a few epochs."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding) and truncated:
            nn.init.trunc_normal_(part.weight, std=std, a=-2 * std, b=2 * std)
        elif isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
