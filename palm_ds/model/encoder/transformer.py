"""Transformer encoders: ERNIE 2.0, BERT and RoBERTa are one architecture in different sizes; others
differ in their TransformerSpec.

    word + position + segment (+ task) embeddings -> LayerNorm -> dropout
    num_layers x a layer (layer.py), for some architectures a LayerNorm after the last; layers may
    share their weights (ALBERT)
    pooler: tanh of a linear map of a row, for heads that read whole texts

It runs on packed rows: a token attends to its own sequence only, whatever else is in the row.

Weights are initialized as BERT's and ERNIE's are (TruncatedNormal in both): matrices and embeddings
from a normal distribution with standard deviation `init_range`, truncated at two standard
deviations; biases 0, LayerNorm weights 1. They are drawn in module order from torch's generator, so
`torch.manual_seed` determines them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from palm_ds.common.errors import UserError
from palm_ds.model.attention.attention import AttentionPlan, plan_attention
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import (
    PLAIN,
    Activations,
    Encoder,
    EncoderFlops,
    Matrix,
    Pooler,
    init_weights,
)
from palm_ds.model.encoder.layer import EncoderLayer, LayerSpec, NormKind, build_norm
from palm_ds.model.encoder.positions import (
    Disentangled,
    Rotary,
    gram_buckets,
    mpnet_buckets,
    offsets,
    pair_offsets,
    rotations,
    skewed,
)
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.ops.compiled import CompiledRegion, padded_positions
from palm_ds.model.ops.dropout import DropoutKeys, dropout, table_keys
from palm_ds.model.ops.fused_norm import Drop, FusedLayerNorm


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """Structure of a transformer, apart from its sizes; the defaults are BERT's."""

    layers: tuple[LayerSpec, ...]
    """In the order of computation."""
    shared: tuple[int, ...] = ()
    """For each layer the number, from 0, of the module that has its weights; empty: each has its
    own."""
    learned_positions: bool = True
    """Whether there is a position embedding."""
    token_types: bool = True
    """Whether there is a token type embedding."""
    norm: NormKind = "layer_norm"
    """Of the embeddings and after the last layer."""
    embedding_norm: bool = True
    embedding_size: int | None = None
    """Width of the embeddings and their norm, if narrower than the layers: a linear map widens
    them (ELECTRA)."""
    always_widened: bool = False
    """Whether there is that map also if they are as wide (ALBERT)."""
    final_norm: bool = False
    """Whether there is a norm after the last layer."""
    head_norm: NormKind = "layer_norm"
    """Of masked-LM heads."""
    head_bias: bool = True
    """Whether the linear map of masked-LM heads has a bias."""
    head_transform: bool = True
    """Whether masked-LM heads have a linear map, an activation and a norm before their output."""
    head_output_bias: bool = True
    """Whether the output of masked-LM heads has a bias."""
    tied_output: bool = True
    """Whether output embeddings can be the token embeddings."""
    relative_buckets: int = 0
    """Buckets of distances, each of which adds a number to the scores of a head (MPNet)."""
    relative_rule: Literal["mpnet", "ernie_gram"] = "mpnet"
    """Which bucket a query and a key have."""
    unread: tuple[str, ...] = ()
    """Tables that stay in the weights as they are, although nothing reads them: `segment`,
    `relative_bias`."""
    distance_norm: bool = True
    """Disentangled attention: whether the table of distances has a norm."""
    scaled_output_init: bool = False
    """Whether the matrices that add to the residual stream start smaller by sqrt(2 num_layers)."""
    pooler_activation: str = "tanh"
    """Of the linear map in front of heads that read whole texts."""

    def reads(self, table: str) -> bool:
        """Whether there is such a table, and it is read."""
        found = {"segment": self.token_types, "relative_bias": self.relative_buckets > 0}
        return found[table] and table not in self.unread

    @property
    def adds_to_scores(self) -> bool:
        """Whether relative positions add to the scores of attention."""
        return self.reads("relative_bias") or self.disentangled is not None

    @property
    def disentangled(self) -> Disentangled | None:
        """That of the layers, which share one table of distances."""
        return self.layers[0].disentangled

    @property
    def modules(self) -> tuple[int, ...]:
        """For each layer the number of the module that computes it."""
        return self.shared or tuple(range(len(self.layers)))

    @property
    def own_layers(self) -> tuple[LayerSpec, ...]:
        """Those with weights of their own, one for each module."""
        first = dict(zip(reversed(self.modules), reversed(self.layers), strict=True))
        return tuple(first[module] for module in sorted(first))

    def width(self, config: EncoderConfig) -> int:
        """Width of the embeddings."""
        return self.embedding_size or config.hidden_size

    def widens(self, config: EncoderConfig) -> bool:
        """Whether a linear map follows the embeddings."""
        return self.always_widened or self.width(config) != config.hidden_size

    def weights(self, config: EncoderConfig, *, once: bool = False) -> int:
        """Weights that a token is multiplied with; `once`: shared ones count once."""
        widened = self.width(config) * config.hidden_size if self.widens(config) else 0
        layers = self.own_layers if once else self.layers
        return widened + sum(layer.weights(config) for layer in layers)

    def flops(self, config: EncoderConfig) -> EncoderFlops:
        pairs: Counter[int | None] = Counter()
        for layer in self.layers:
            pairs[layer.window] += 6 * layer.products(config)
        return EncoderFlops(
            token=6.0 * self.weights(config), pairs={name: float(y) for name, y in pairs.items()}
        )

    def activations(self, config: EncoderConfig) -> Activations:
        """Attention: query, key and value, its output, the norm's input and output, the angles of a
        head. Feed-forward network: the activation's input and output, and if it is gated the
        product and what it is multiplied by; the norm's input and output."""
        size, inner, layers = config.hidden_size, config.feed_forward_size, self.layers
        gated = sum(layer.gated for layer in layers) / len(layers)
        turned = sum(layer.rotary_base is not None for layer in layers) / len(layers)
        return Activations(
            attention=6 * size + turned * (size // config.num_heads),
            feed_forward=(2 + 2 * gated) * inner + 2 * size,
            heads=config.num_heads,
            widest=(2 + gated) * inner + size,
        )

    def masked_lm_weights(self, config: EncoderConfig) -> int:
        """Weights that a masked-LM head multiplies a token with."""
        transform = config.hidden_size if self.head_transform else 0
        return self.width(config) * (transform + (config.vocab_size or 0))

    def parameters(self, config: EncoderConfig, vocabulary: int) -> int:
        """Parameters of the large tables and of all matrices."""
        rows = vocabulary + (config.max_positions if self.learned_positions else 0)
        return self.width(config) * rows + self.weights(config, once=True)

    def matrices(self, config: EncoderConfig) -> tuple[Matrix, ...]:
        """Matrices of a layer."""
        layer = self.layers[0]
        return (
            Matrix(path="qkv", roles=("query", "key", "value"), stacked=layer.qkv_sizes(config)),
            Matrix(path="project", roles=("attention_output",)),
            Matrix(path="expand", roles=("intermediate",), stacked=(1, 1) if layer.gated else (1,)),
            Matrix(path="contract", roles=("output",)),
        )


def _relative_bias(spec: TransformerSpec, table: nn.Embedding, batch: Batch) -> torch.Tensor:
    """(rows or 1, heads, length, length): what the distance of a query and a key adds to scores."""
    if spec.relative_rule == "mpnet" and not batch.displaced:  # the same for all rows
        length = batch.input_ids.shape[1]
        bucket = mpnet_buckets(offsets(length, table.weight.device), spec.relative_buckets)
        numbers = table(bucket).T[None, :, None]  # (1, heads, 1, offsets)
        return skewed(numbers.expand(-1, -1, length, -1))
    if spec.relative_rule == "mpnet":
        bucket = mpnet_buckets(pair_offsets(batch.position_ids), spec.relative_buckets)
    else:
        bucket = gram_buckets(batch.position_ids)
    return table(bucket).permute(0, 3, 1, 2)


class TransformerEncoder(Encoder):
    """An architecture is a subclass with its own `spec`; it may also override `layer`, or `forward`
    under the same contract. Without an `options_type` its constructor may take more keywords, which
    a recipe sets in `backbone.options`."""

    takes_layers = True
    above_layers = ("pooler", "final_norm")

    def __init__(self, config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False):
        super().__init__(config, kernels, recompute=recompute)
        assert config.vocab_size is not None
        spec = self.structure = self.spec(config)
        _check(config, spec)
        size = spec.width(config)
        self.word = nn.Embedding(config.vocab_size, size)
        if spec.learned_positions:
            self.position = nn.Embedding(config.max_positions, size)
        if spec.token_types:
            self.segment = nn.Embedding(config.token_types, size)
        if config.task_types:
            self.task = nn.Embedding(config.task_types, size)
        self.norm = self._norm(size) if spec.embedding_norm else nn.Identity()
        if spec.widens(config):
            self.widen = nn.Linear(size, config.hidden_size)
        if spec.relative_buckets:
            self.relative_bias = nn.Embedding(spec.relative_buckets, config.num_heads)
        if spec.disentangled:
            self.distance = nn.Embedding(2 * spec.disentangled.span, config.hidden_size)
            norm = spec.distance_norm
            self.distance_norm = self._norm(config.hidden_size) if norm else nn.Identity()
        self.layers = nn.ModuleList(self.layer(number) for number in range(len(spec.own_layers)))
        self._rotary = [module for module in self.layers.modules() if isinstance(module, Rotary)]
        if spec.final_norm:
            self.final_norm = self._norm(config.hidden_size)
        self.pooler = self.build_pooler()
        for table in spec.unread:
            self.get_submodule(table).requires_grad_(False)
        init_weights(self, config.init_range)
        if spec.scaled_output_init:
            _scale_outputs(self.layers, config.num_layers)
        if kernels.compile == "on":
            self._compile()

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        """The architecture with these hyperparameters."""
        return TransformerSpec(layers=(LayerSpec(),) * config.num_layers)

    def layer(self, number: int) -> nn.Module:
        """Builds `layers[number]`, which is called as `EncoderLayer` is; only the last call of a
        forward pass has `at`."""
        return EncoderLayer(self.config, self.kernels, self.structure.own_layers[number])

    def build_pooler(self) -> nn.Module:
        """Builds the module that makes the input of heads of whole texts."""
        return Pooler(self.hidden_size, self.structure.pooler_activation)

    def masked_lm_transform(self) -> tuple[nn.Linear, nn.Module] | None:
        spec, width = self.structure, self.word.embedding_dim
        if not spec.head_transform:
            return None
        norm = build_norm(spec.head_norm, width, self.config.layer_norm_eps, self.kernels)
        return nn.Linear(self.hidden_size, width, bias=spec.head_bias), norm

    @property
    def masked_lm_bias(self) -> bool:
        return self.structure.head_output_bias

    @classmethod
    def ties_words(cls, config: EncoderConfig) -> bool:
        return cls.spec(config).tied_output

    def _norm(self, size: int) -> nn.Module:
        return build_norm(self.structure.norm, size, self.config.layer_norm_eps, self.kernels)

    def _compile(self) -> None:
        region, whole = CompiledRegion("layers"), self.kernels.attention != "tiles"
        for layer in self.layers:
            if isinstance(layer, EncoderLayer):
                layer.compile_in(region, whole=whole)
            else:
                layer.forward = region.wrap(layer.forward)
        self._join = CompiledRegion("embeddings").wrap(self._join)

    def forward(self, batch: Batch, at: torch.Tensor | None = None) -> torch.Tensor:
        """Computes most of the last layer for the positions `at` only."""
        keys = self._dropout_keys(batch)
        x = self._embed(batch, keys)
        compiled = self.kernels.compile == "on"
        plan = plan_attention(batch, self.kernels.attention, compiled=compiled, keys=keys)
        plan = self._with_distances(self._with_rotations(plan, batch), batch, keys)
        rows = at if at is None or not compiled else padded_positions(at, batch.input_ids.numel())
        layers = self.computed_layers
        plans = plan.for_layers(len(layers))
        for number, (layer, own) in enumerate(zip(layers, plans, strict=True), 1):
            arguments = () if rows is None or number < len(layers) else (rows,)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, own, *arguments, use_reentrant=False)
            else:
                x = layer(x, own, *arguments)
        if self.structure.final_norm:
            x = self.final_norm(x)
        return x if at is None or not compiled else x[: len(at)]

    def read(self, batch: Batch, plans: Sequence[AttentionPlan]) -> torch.Tensor:
        x = self._embed(batch, None)
        for layer, plan in zip(self.computed_layers, plans, strict=True):
            x = layer(x, self._with_rotations(plan, batch))
        return self.final_norm(x) if self.structure.final_norm else x

    def _with_rotations(self, plan: AttentionPlan, batch: Batch) -> AttentionPlan:
        """The plan with what turns queries and keys, if a layer does."""
        size = self.config.hidden_size // self.config.num_heads
        turned = rotations(self._rotary, batch.position_ids, size) if self._rotary else {}
        return replace(plan, rotations=turned)

    def _with_distances(
        self, plan: AttentionPlan, batch: Batch, keys: DropoutKeys | None
    ) -> AttentionPlan:
        """The plan with what relative positions add to scores, or are compared with."""
        spec, length, device = self.structure, batch.input_ids.shape[1], batch.input_ids.device
        if spec.disentangled:
            table = self.distance_norm(self.distance.weight)[None]
            return replace(
                plan,
                distances=(table, spec.disentangled.places(length, device)),
                offsets=pair_offsets(batch.position_ids) if batch.displaced else None,
                distance_keys=keys and table_keys(batch, keys, table.shape[1]),
            )
        if not spec.reads("relative_bias"):
            return plan
        # it follows the positions, so that no token is displaced
        return replace(plan, bias=_relative_bias(spec, self.relative_bias, batch), displaced=False)

    def _embed(self, batch: Batch, keys: DropoutKeys | None) -> torch.Tensor:
        parts = [self.word(batch.input_ids)]
        if self.structure.learned_positions:
            parts.append(self.position(batch.position_ids + self.config.position_offset))
        if self.structure.reads("segment"):
            parts.append(self.segment(batch.token_type_ids))
        if self.config.task_types:
            parts.append(self.task(batch.task_ids))
        x = self._join(parts, keys)
        return self.widen(x) if self.structure.widens(self.config) else x

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

    # ---- answers ----

    @classmethod
    def flops(cls, config: EncoderConfig) -> EncoderFlops:
        """Those of `spec`, also for a subclass with layers of its own."""
        return cls.spec(config).flops(config)

    @classmethod
    def activations(cls, config: EncoderConfig) -> Activations:
        return cls.spec(config).activations(config)

    @classmethod
    def masked_lm_weights(cls, config: EncoderConfig) -> int:
        return cls.spec(config).masked_lm_weights(config)

    @classmethod
    def least_parameters(cls, config: EncoderConfig, vocabulary: int) -> int:
        return cls.spec(config).parameters(config, vocabulary) if cls.is_specified() else 0

    @classmethod
    def embedding_width(cls, config: EncoderConfig) -> int:
        return cls.spec(config).width(config)

    @classmethod
    def first_input_width(cls, config: EncoderConfig) -> int:
        return config.hidden_size

    @classmethod
    def rope_base(cls, config: EncoderConfig, *, local: bool = False) -> float | None:
        layers = (layer for layer in cls.spec(config).layers if (layer.window is not None) == local)
        return next((x.rotary_base for x in layers if x.rotary_base is not None), None)

    def set_rope_base(self, base: float, *, local: bool = False) -> None:
        for layer, spec in zip(self.layers, self.structure.own_layers, strict=True):
            if (spec.window is not None) == local and isinstance(rotary := layer.rotary, Rotary):
                rotary.base = base

    @classmethod
    def has_token_types(cls, config: EncoderConfig) -> bool:
        return cls.spec(config).reads("segment")

    @classmethod
    def has_positions(cls, config: EncoderConfig) -> bool:
        return cls.spec(config).learned_positions

    @classmethod
    def adds_to_scores(cls, config: EncoderConfig) -> bool:
        return cls.spec(config).adds_to_scores

    @classmethod
    def fits_place(cls, source: EncoderConfig, layer: int, target: EncoderConfig, to: int) -> bool:
        return cls.spec(source).own_layers[layer] == cls.spec(target).own_layers[to]

    @classmethod
    def own_layers(cls, config: EncoderConfig) -> int:
        return len(cls.spec(config).own_layers)

    @property
    def computed_layers(self) -> list[nn.Module]:
        return [self.layers[number] for number in self.structure.modules]

    @classmethod
    def matrices(cls, config: EncoderConfig) -> tuple[Matrix, ...]:
        """Those of EncoderLayer; a subclass whose layers have others says so itself."""
        return cls.spec(config).matrices(config)

    @classmethod
    def is_specified(cls) -> bool:
        """No subclass with layers or a forward pass of its own."""
        base = TransformerEncoder
        return cls.layer is base.layer and cls.forward is base.forward

    def hidden_module(self, number: int) -> nn.Module:
        """The last hidden state is the encoder's output."""
        last = self.structure.final_norm and number == len(self.computed_layers)
        return self.final_norm if last else self.computed_layers[number - 1]

    def qkv_module(self, number: int) -> nn.Module | None:
        layer = self.computed_layers[number - 1]
        if not isinstance(layer, EncoderLayer):
            return None
        return layer.repeated or layer.rotary or layer.qkv

    @property
    def generates(self) -> bool:
        """Not with a forward pass of its own, nor with windows or relative positions, which caches
        do not have."""
        whole = all(layer.window is None for layer in self.structure.layers)
        return (
            whole
            and not self.adds_to_scores(self.config)
            and type(self).forward is TransformerEncoder.forward
        )


@torch.no_grad()
def _scale_outputs(layers: Iterable[nn.Module], depth: int) -> None:
    for layer in layers:
        for name in ("project", "contract"):
            weight = layer.get_parameter(f"{name}.weight")
            weight /= (2 * depth) ** 0.5


def _check(config: EncoderConfig, spec: TransformerSpec) -> None:
    """Raises UserError for hyperparameters that this architecture cannot have."""
    if not spec.token_types and config.token_types > 1:
        raise UserError(
            f"backbone.token_types: {config.token_types}, but {config.kind} has no token type "
            "embedding; set 1"
        )
    if not spec.learned_positions and config.position_offset:
        raise UserError(
            f"backbone.position_offset: {config.position_offset}, but {config.kind} has no "
            "position embedding; set 0"
        )
    if config.tie_word_embeddings and not spec.tied_output:
        raise UserError(
            f"backbone.tie_word_embeddings: true, but masked-LM heads of {config.kind} have output "
            "embeddings of their own; set false"
        )
    for kv_heads in {layer.kv_heads for layer in spec.layers}:
        if kv_heads is not None and (kv_heads < 1 or config.num_heads % kv_heads):
            raise UserError(
                f"backbone.options.kv_heads: {kv_heads} does not divide num_heads, "
                f"{config.num_heads}"
            )
    if any(layer.rotary_base is not None for layer in spec.layers) and (
        config.hidden_size // config.num_heads % 2
    ):
        raise UserError(
            f"backbone.num_heads: heads of {config.hidden_size // config.num_heads} values, but "
            f"{config.kind} turns them in pairs; use an even head size"
        )
