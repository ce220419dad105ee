"""One layer of a transformer, and what distinguishes the layers of one architecture from another's.

    post (BERT)         x = norm(x + attention(x));  x = norm(x + feed_forward(x))
    pre (ModernBERT)    x = x + attention(norm(x));  x = x + feed_forward(norm(x))

A LayerSpec is what differs; its defaults are BERT's. Sizes, rates and eps are the configuration's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.attention.attention import AttentionPlan, attend
from palm_ds.model.config.config import ACTIVATIONS, EncoderConfig
from palm_ds.model.encoder.encoder import gather_positions
from palm_ds.model.encoder.positions import Disentangled, Rotary, disentangled_bias
from palm_ds.model.kernels import Kernels, layer_norm
from palm_ds.model.ops.compiled import CompiledRegion
from palm_ds.model.ops.dropout import DropoutKeys, add_dropout, dropout
from palm_ds.model.ops.fused_norm import Drop, FusedLayerNorm
from palm_ds.model.ops.packed_linear import PackedLinear


@dataclass(frozen=True)
class Convolution:
    """A convolution over the input of a layer, which is added to its output (DeBERTa v2)."""

    tokens: int
    """Tokens that it sees, an odd number."""
    activation: str


_Distances = tuple[torch.Tensor | None, torch.Tensor | None]
NormKind = Literal["layer_norm", "layer_norm_without_bias", "rms_norm"]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Structure of a layer, apart from its sizes."""

    norm_place: Literal["post", "pre"] = "post"
    """After each half and its residual connection, or before each half."""
    norm: NormKind = "layer_norm"
    attention_norm: bool = True
    """`pre`: False leaves out the norm before the attention (ModernBERT's first layer)."""
    qkv_bias: bool = True
    attention_output_bias: bool = True
    intermediate_bias: bool = True
    output_bias: bool = True
    gated: bool = False
    """The feed-forward network multiplies its activated values by as many others (GLU, Shazeer
    2020, arXiv 2002.05202); `expand` returns both, the activated ones first."""
    activation: str = ""
    """Empty: the configuration's."""
    rotary_base: float | None = None
    """Queries and keys are turned by their positions (rotary.py); None: they are not."""
    rotary_factor: float = 1.0
    """Rotary: positions are divided by it."""
    rotary_neighbors: bool = False
    """Rotary: turns dimension 2i with 2i + 1 (NeoBERT), instead of i with i + half."""
    disentangled: Disentangled | None = None
    """Vectors of distances take part in the scores (positions.py); None: they do not."""
    convolution: Convolution | None = None
    """Only with disentangled attention, whose forms have a mask."""
    kv_heads: int | None = None
    """Heads of keys and values, each for as many consecutive heads of queries (Ainslie et al. 2023,
    arXiv 2305.13245); None: one for each."""
    window: int | None = None
    """Tokens that a token attends to on each side; None: all of its text."""

    def weights(self, config: EncoderConfig) -> int:
        """Weights that a token is multiplied with, without biases."""
        size, inner = config.hidden_size, config.feed_forward_size
        seen = self.convolution.tokens if self.convolution else 0
        attention = sum(self.qkv_sizes(config)) + size
        return size * (attention + seen * size + (3 if self.gated else 2) * inner)

    def qkv_sizes(self, config: EncoderConfig) -> tuple[int, int, int]:
        """The widths of queries, keys and values."""
        heads = self.kv_heads or config.num_heads
        narrow = config.hidden_size // config.num_heads * heads
        return config.hidden_size, narrow, narrow

    def products(self, config: EncoderConfig) -> int:
        """Weights and values that a pair of tokens is multiplied with: query and key, weight and
        value, and a term of distances with both offsets of the pair."""
        terms = self.disentangled.terms if self.disentangled else 0
        return (2 + 2 * terms) * config.hidden_size


def unbiased_layer(norm: NormKind, **own: Any) -> LayerSpec:
    """A layer with a norm before each half, a gated feed-forward network and no biases, as in Llama
    and ModernBERT; `own`: other values."""
    return LayerSpec(
        norm_place="pre",
        norm=norm,
        qkv_bias=False,
        attention_output_bias=False,
        intermediate_bias=False,
        output_bias=False,
        gated=True,
        **own,
    )


def build_norm(kind: NormKind, size: int, eps: float, kernels: Kernels) -> nn.Module:
    """A norm over `size` values."""
    if kind == "layer_norm":
        return layer_norm(size, eps, kernels.layer_norm)
    return nn.RMSNorm(size, eps=eps) if kind == "rms_norm" else nn.LayerNorm(size, eps, bias=False)


class RepeatedHeads(nn.Module):
    """Repeats the heads of keys and values for the heads of queries that share them. A module
    without parameters, so that what it returns can be recorded."""

    def __init__(self, num_heads: int, kv_heads: int):
        super().__init__()
        self.num_heads, self.kv_heads = num_heads, kv_heads

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        """(rows, length, hidden of all heads) -> (rows, length, 3 hidden)"""
        heads = qkv.unflatten(-1, (self.num_heads + 2 * self.kv_heads, -1))
        query, narrow = heads.split((self.num_heads, 2 * self.kv_heads), -2)
        each = self.num_heads // self.kv_heads
        repeated = narrow.unsqueeze(-2).expand(*narrow.shape[:-1], each, narrow.shape[-1])
        return torch.cat([query, repeated.flatten(-3, -2)], -2).flatten(-2)


class EncoderLayer(nn.Module):
    """One encoder layer; with `post`, each half ends in dropout, add, norm ("dan" in ERNIE's
    code)."""

    def __init__(self, config: EncoderConfig, kernels: Kernels, spec: LayerSpec = LayerSpec()):
        super().__init__()
        size, inner = config.hidden_size, config.feed_forward_size
        self.spec, self.num_heads = spec, config.num_heads
        self.activation = ACTIVATIONS[spec.activation or config.activation]
        self.dropout_rate, self.attention_rate = config.dropout, config.attention_dropout
        self._keys: DropoutKeys | None = None
        self._at: torch.Tensor | None = None
        self._dropouts = 0
        self.reads_distances = False
        self.register_forward_pre_hook(_begin_layer, with_kwargs=True)
        self.qkv = nn.Linear(size, sum(spec.qkv_sizes(config)), bias=spec.qkv_bias)
        if (values := spec.disentangled) and values.own_maps:
            self.distance_query = nn.Linear(size, size) if values.position_to_content else None
            self.distance_key = nn.Linear(size, size) if values.content_to_position else None
        kv_heads = spec.kv_heads or config.num_heads
        self.rotary: Rotary | None = None
        if spec.rotary_base is not None:
            self.rotary = Rotary(
                spec.rotary_base,
                config.num_heads,
                kv_heads,
                neighbors=spec.rotary_neighbors,
                factor=spec.rotary_factor,
            )
        self.repeated: RepeatedHeads | None = None
        if kv_heads != config.num_heads:
            self.repeated = RepeatedHeads(config.num_heads, kv_heads)
        self.project = nn.Linear(size, size, bias=spec.attention_output_bias)
        self.attention_norm = self._norm(config, kernels) if spec.attention_norm else nn.Identity()
        expanded = (2 if spec.gated else 1) * inner
        self.expand = nn.Linear(size, expanded, bias=spec.intermediate_bias)
        self.contract = nn.Linear(inner, size, bias=spec.output_bias)
        self.output_norm = self._norm(config, kernels)
        if spec.convolution:
            self.convolution = nn.Conv1d(size, size, spec.convolution.tokens)
            nn.init.normal_(self.convolution.weight, std=config.init_range)
            nn.init.zeros_(self.convolution.get_parameter("bias"))
            self.convolution_norm = self._norm(config, kernels)

    def _norm(self, config: EncoderConfig, kernels: Kernels) -> nn.Module:
        return build_norm(self.spec.norm, config.hidden_size, config.layer_norm_eps, kernels)

    def forward(
        self, x: torch.Tensor, plan: AttentionPlan, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns (rows, length, hidden), or (n, hidden) at the flat positions `at` (n,)."""
        pre = self.spec.norm_place == "pre"
        attended = self.attention(self.attention_norm(x) if pre else x, plan)
        out = self.after_attention(x, attended, at)
        return self._convolved(x, out, plan, at) if self.spec.convolution else out

    def _convolved(
        self, x: torch.Tensor, out: torch.Tensor, plan: AttentionPlan, at: torch.Tensor | None
    ) -> torch.Tensor:
        """The output with the convolution of the layer's input x, in which tokens of other texts
        count as zeros."""
        assert plan.mask is not None and self.spec.convolution is not None
        half = self.spec.convolution.tokens // 2
        total = self.convolution.get_parameter("bias").expand_as(x)
        for offset in range(-half, half + 1):
            near = x if not offset else F.pad(x, (0, 0, half, half))[:, half + offset :]
            weight = self.convolution.weight[:, :, half + offset]
            seen = near[:, : x.shape[1]] * _same_text(plan.mask, offset)
            total = total + F.linear(seen, weight)
        (total,) = gather_positions(at, total)
        rate = self.dropout_rate if self.training else 0.0
        dropped = dropout(total, rate, self._next_keys(total))
        activation = ACTIVATIONS[self.spec.convolution.activation]
        return self.convolution_norm(out + activation(dropped))

    def after_attention(
        self, x: torch.Tensor, attended: torch.Tensor, at: torch.Tensor | None
    ) -> torch.Tensor:
        """The rest of the layer, for its input x and the attention's output."""
        x, attended = gather_positions(at, x, attended)
        if self.spec.norm_place == "pre":
            x = self.residual_dropout(x, self.project(attended))
            return self.residual_dropout(x, self.feed_forward(self.output_norm(x)))
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
            self.after_attention = region.wrap(self.after_attention)

    def attention(self, x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Multi-head attention before the output projection, (rows, length, hidden)."""
        rate = self.attention_rate if self.training else 0.0
        distances = self._distances(plan)
        qkv = self.qkv(x)
        if distances is not None:
            qkv, plan = self._with_distances(qkv, distances, plan)
        if self.rotary is not None:
            qkv = self.rotary(qkv, plan.rotations[self.rotary.frequencies])
        if self.repeated is not None:
            qkv = self.repeated(qkv)
        return attend(qkv, plan, num_heads=self.num_heads, dropout=rate, window=self.spec.window)

    def _distances(self, plan: AttentionPlan) -> _Distances | None:
        """The queries and keys of distances. LoRA's dropout, whose masks belong to tokens, leaves
        the vectors of distances whole."""
        values, keys = self.spec.disentangled, plan.distance_keys
        if plan.distances is None or values is None:
            return None
        table = dropout(plan.distances[0], self.dropout_rate if self.training else 0.0, keys)
        if values.own_maps:
            maps = self.distance_query, self.distance_key
            query, key = (None if made is None else made(table)[0] for made in maps)
            return query, key
        self.reads_distances = True
        query, key, _ = self.qkv(table)[0].chunk(3, -1)
        self.reads_distances = False
        return (
            query if values.position_to_content else None,
            key if values.content_to_position else None,
        )

    def _with_distances(
        self, qkv: torch.Tensor, distances: _Distances, plan: AttentionPlan
    ) -> tuple[torch.Tensor, AttentionPlan]:
        """Queries that are scaled for a sum of several terms, and the terms of distances."""
        assert plan.distances is not None and self.spec.disentangled is not None
        values, places = self.spec.disentangled, plan.distances[1]
        bias = disentangled_bias(qkv, distances, places, self.num_heads, values, plan.offsets)
        query, rest = qkv.tensor_split([qkv.shape[-1] // 3], -1)
        scaled = query * (1 + values.terms) ** -0.5
        return torch.cat([scaled, rest], -1), replace(plan, bias=bias)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """The feed-forward network, (..., hidden) -> (..., hidden)."""
        if not self.spec.gated:
            return self.contract(self.activation(self.expand(x)))
        if isinstance(self.expand, PackedLinear):
            activated, multiplier = self.expand.parts(x)
            return self.contract(self.activation(activated).mul_(multiplier))
        activated, multiplier = self.expand(x).chunk(2, -1)  # (..., intermediate) each
        return self.contract(self.activation(activated) * multiplier)

    def residual_dropout(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x + dropout(y), (rows, length, hidden) or (n, hidden) at the positions `at`. Every call
        in a forward pass has its own masks."""
        if not self.training:
            return x + y
        return add_dropout(x, y, self.dropout_rate, self._next_keys(y))

    def _next_keys(self, y: torch.Tensor) -> DropoutKeys | None:
        """The keys of the next dropout in this layer, for the rows of y."""
        if self._keys is None:
            return None
        self._dropouts += 1  # 0 is the attention
        return self.keys_at(self._dropouts, y)

    def keys_at(self, site: int, y: torch.Tensor) -> DropoutKeys | None:
        """The keys of a place in this layer, for the rows of y in this forward pass."""
        keys = None if self._keys is None else self._keys.site(site)
        if keys is not None and y.dim() == 2 and self._at is not None:
            keys = keys.select(self._at)
        return keys


def _same_text(mask: torch.Tensor, offset: int) -> torch.Tensor:
    """(rows, length, 1): whether a token and the one `offset` places behind it are of one text."""
    around = F.pad(mask[:, 0], (abs(offset), abs(offset)))
    return around.diagonal(abs(offset) + offset, 1, 2)[..., None]


def _begin_layer(layer: EncoderLayer, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Note what the dropout masks of a forward pass depend on. It comes with the plan, so that a
    pass that is repeated for the backward pass gets the same masks. LoRA's dropouts, inside the
    linear maps, read it too: nothing could be passed to them as an argument."""
    arguments = dict(zip(("x", "plan", "at"), positional, strict=False)) | named
    plan = arguments.get("plan")
    keys = plan.keys if isinstance(plan, AttentionPlan) else None
    if keys is not None or layer._keys is not None:  # setting attributes of modules is slow
        layer._keys, layer._at, layer._dropouts = keys, arguments.get("at"), 0
