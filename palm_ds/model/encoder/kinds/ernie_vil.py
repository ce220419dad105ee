"""ERNIE-ViL (Yu et al. 2021, arXiv 2006.16934): a stream of tokens and a stream of regions, which
read each other in co-attention (ViLBERT's, Lu et al. 2019).

    tokens    layers ──┬── co-attention ── layers ──┬── co-attention ── a layer
    regions   layers ──┘                  layers ───┘                   a layer

Each stream has layers of its own width. In a co-attention the queries of each are compared with the
other's keys, both of a third width, and a feed-forward network follows. Regions stand behind the
text in its row: each stream computes all places of a row, and what is not its own is dropped.
A text without an image reads nothing in co-attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import PositiveInt
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from palm_ds.common.config import Several
from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings
from palm_ds.model.attention.attention import plan_attention
from palm_ds.model.attention.dense import drop_weights
from palm_ds.model.attention.plan import AttentionPlan, softmax
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import (
    PLAIN,
    EncoderFlops,
    Pooler,
    gather_positions,
    init_weights,
    refuse_task_types,
)
from palm_ds.model.encoder.layer import EncoderLayer, LayerSpec, build_norm
from palm_ds.model.encoder.regions import RegionEmbedding
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.ops.dropout import DropoutKeys, dropout_keys

_USUAL_BLOCKS = 6
"""Co-attentions of the published models."""


@dataclass(frozen=True, kw_only=True)
class ErnieVilOptions(Settings):
    """`backbone.options` of this encoder."""

    region_size: PositiveInt = 2048
    """Features of a region of an image."""
    image_hidden_size: PositiveInt = 1024
    """Width of the stream of regions."""
    image_heads: PositiveInt = 8
    """Attention heads of its layers."""
    image_intermediate_size: PositiveInt = 1024
    """Inner size of its feed-forward networks."""
    co_hidden_size: PositiveInt = 1024
    """Width of queries, keys and values in co-attention, and of what the poolers return."""
    co_heads: PositiveInt = 8
    """Attention heads of co-attention."""
    text_layers_before: Several[int] = ()
    """For each co-attention how many layers of tokens come before it, ascending; the last number is
    one less than num_layers. Empty: six, or as many as there are layers, at the end."""
    image_layers_before: Several[int] = ()
    """The same of regions, which have one layer more than the last number. Empty: 0, 1, 2, ..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for width, heads in (("image_hidden_size", "image_heads"), ("co_hidden_size", "co_heads")):
            if getattr(self, width) % getattr(self, heads):
                raise UserError(f"{heads}: {getattr(self, heads)} does not divide {width}")

    def blocks(self, num_layers: int) -> list[tuple[int, int]]:
        """(layers of tokens, layers of regions) before each co-attention. Raises UserError."""
        usual = range(max(num_layers - _USUAL_BLOCKS, 0), num_layers)
        texts = list(self.text_layers_before or usual)
        images = list(self.image_layers_before or range(len(texts)))
        if len(texts) != len(images) or any(x != sorted(set(x)) for x in (texts, images)):
            raise UserError(
                f"backbone.options: text_layers_before {texts} and image_layers_before {images} "
                "must be ascending and equally many"
            )
        if min(texts[0], images[0]) < 0 or texts[-1] != num_layers - 1:
            raise UserError(
                f"backbone.options.text_layers_before: {texts} must end with {num_layers - 1}, one "
                "less than num_layers"
            )
        return list(zip(texts, images, strict=True))


@dataclass(frozen=True, kw_only=True)
class CoPlan(AttentionPlan):
    """Input of a co-attention besides the vectors of its own stream."""

    other: torch.Tensor
    """(rows, length, its width)"""
    seen: torch.Tensor
    """(rows, 1, length, length) bool: which places of the other stream each of this one reads."""


class CoAttentionLayer(EncoderLayer):
    """One stream's half of a co-attention: queries of its own, keys and values of the other's."""

    def __init__(self, config: EncoderConfig, kernels: Kernels, other: int, width: int, heads: int):
        super().__init__(config, kernels)
        del self.qkv
        self.num_heads = heads
        self.co_query = nn.Linear(config.hidden_size, width)
        self.co_key, self.co_value = nn.Linear(other, width), nn.Linear(other, width)
        self.project = nn.Linear(width, config.hidden_size)

    def attention(self, x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """(rows, length, co width) before the output projection; zeros where nothing is read."""
        assert isinstance(plan, CoPlan)
        query, key, value = map(
            self._heads, (self.co_query(x), self.co_key(plan.other), self.co_value(plan.other))
        )
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        weights = softmax(scores.masked_fill(~plan.seen, torch.finfo(scores.dtype).min))
        weights = weights * plan.seen.any(-1, keepdim=True)
        if self.training and self.attention_rate:
            weights = drop_weights(weights, plan.keys, self.attention_rate)
        return (weights @ value).transpose(1, 2).flatten(2)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, heads, length, head size)"""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class CoAttention(nn.Module):
    """Both halves of a co-attention."""

    def __init__(self, text: CoAttentionLayer, image: CoAttentionLayer):
        super().__init__()
        self.text, self.image = text, image


class ErnieVil(TransformerEncoder):
    """The encoder of ERNIE-ViL."""

    options_type = ErnieVilOptions
    takes_layers = False
    above_layers = ("pooler", "region_pooler", "image_layers", "co_layers")
    defaults = {"task_types": 0, "layer_norm_eps": 1e-5}

    def __init__(self, config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False):
        refuse_task_types(config)
        super().__init__(config, kernels, recompute=recompute)
        options = self.choices = self.choices_of(config)
        self.blocks = options.blocks(config.num_layers)
        image, size = self.image_config(config), options.image_hidden_size
        norm = build_norm("layer_norm", size, config.layer_norm_eps, kernels)
        self.region = RegionEmbedding(options.region_size, size, norm)
        self.image_layers = nn.ModuleList(
            EncoderLayer(image, kernels) for _ in range(self.blocks[-1][1] + 1)
        )
        co = options.co_hidden_size, options.co_heads
        self.co_layers = nn.ModuleList(
            CoAttention(
                CoAttentionLayer(config, kernels, size, *co),
                CoAttentionLayer(image, kernels, config.hidden_size, *co),
            )
            for _ in self.blocks
        )
        self.region_pooler = Pooler(size, "relu", options.co_hidden_size)
        for part in (self.region, self.image_layers, self.co_layers, self.region_pooler):
            init_weights(part, config.init_range)

    @classmethod
    def choices_of(cls, config: EncoderConfig) -> ErnieVilOptions:
        """Its options."""
        options: ErnieVilOptions = cls.options_of(config)
        return options

    @classmethod
    def image_config(cls, config: EncoderConfig) -> EncoderConfig:
        """The hyperparameters of layers of regions."""
        options = cls.choices_of(config)
        return replace(
            config,
            hidden_size=options.image_hidden_size,
            num_heads=options.image_heads,
            intermediate_size=options.image_intermediate_size,
        )

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        return TransformerSpec(layers=(LayerSpec(),) * config.num_layers, pooler_activation="relu")

    def build_pooler(self) -> nn.Module:
        return Pooler(self.hidden_size, "relu", self.choices_of(self.config).co_hidden_size)

    # ---- what heads read ----

    @classmethod
    def region_size(cls, config: EncoderConfig) -> int:
        return cls.choices_of(config).region_size

    def of_texts(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[..., : self.hidden_size]

    def of_regions(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[..., : self.region_width]

    @property
    def region_width(self) -> int:
        return self.choices.image_hidden_size

    @property
    def match_width(self) -> int:
        return self.choices.co_hidden_size

    @property
    def image_pooler(self) -> nn.Module:
        return self.region_pooler

    def pools(self, head: nn.Module) -> bool:
        """Raises UserError for heads of whole texts, which have the width of tokens."""
        pooled = super().pools(head)
        if pooled and self.match_width != self.hidden_size:
            raise UserError(
                f"backbone.kind: {self.config.kind}: its pooler returns {self.match_width} values, "
                f"and heads of whole texts read hidden_size, {self.hidden_size}; make both widths "
                "equal, or use the tasks of docs/images.md"
            )
        return pooled

    def pooled_texts(self, vectors: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return super().pooled_texts(self.of_texts(vectors), real)

    # ---- the forward pass ----

    def forward(self, batch: Batch, at: torch.Tensor | None = None) -> torch.Tensor:
        """Vectors of tokens and of regions, the narrower ones with zeros behind them."""
        keys = self._dropout_keys(batch)
        text, is_region = self._embed(batch, keys), _regions_of(batch)
        image = text.new_zeros(*text.shape[:2], self.region_width)
        image = self.region.placed(batch, image, self.config.dropout, keys)
        plan = plan_attention(_separated(batch, is_region), self.kernels.attention, keys=keys)
        plans = iter(plan.for_layers(self._num_plans))
        seen = _seen(batch, is_region)
        for co_layer, texts, images in self._walk():
            text = self._through(texts, text, plans)
            image = self._through(images, image, plans)
            if co_layer is not None:
                of_text = _co_plan(next(plans), image, seen)
                of_image = _co_plan(next(plans), text, seen.transpose(-1, -2))
                text, image = (
                    self._run(co_layer.text, text, of_text),
                    self._run(co_layer.image, image, of_image),
                )
        wide = max(self.hidden_size, self.region_width)
        text, image = (F.pad(x, (0, wide - x.shape[-1])) for x in (text, image))
        return gather_positions(at, torch.where(is_region[..., None], image, text))[0]

    def _walk(
        self,
    ) -> Iterator[tuple[CoAttention | None, Sequence[nn.Module], Sequence[nn.Module]]]:
        """Each co-attention with the layers of both streams before it, then what follows the last
        one."""
        texts, images = list(self.layers), list(self.image_layers)
        before = (0, 0)
        for layer, block in zip(self.co_layers, self.blocks, strict=True):
            assert isinstance(layer, CoAttention)
            yield layer, texts[before[0] : block[0]], images[before[1] : block[1]]
            before = block
        yield None, texts[before[0] :], images[before[1] :]

    @property
    def _num_plans(self) -> int:
        return len(self.layers) + len(self.image_layers) + 2 * len(self.co_layers)

    def _through(
        self, layers: Sequence[nn.Module], x: torch.Tensor, plans: Iterator[AttentionPlan]
    ) -> torch.Tensor:
        for layer in layers:
            x = self._run(layer, x, next(plans))
        return x

    def _run(self, layer: nn.Module, x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layer, x, plan, use_reentrant=False)
        return layer(x, plan)

    def _dropout_keys(self, batch: Batch) -> DropoutKeys | None:
        if super()._dropout_keys(batch) is None:
            return None
        widths = self.hidden_size, self.region_width, self.adapter_columns
        return dropout_keys(batch, max(*widths, batch.input_ids.shape[1]))

    def _compile(self) -> None:
        """Not: its streams share plans of a kind that is compiled once for each."""

    # ---- answers ----

    @classmethod
    def flops(cls, config: EncoderConfig) -> EncoderFlops:
        """Both streams compute all places of a row."""
        options, image = cls.choices_of(config), cls.image_config(config)
        blocks = options.blocks(config.num_layers)
        usual, size, width = super().flops(config), config.hidden_size, options.co_hidden_size
        own = 4 * image.hidden_size**2 + 2 * image.hidden_size * image.feed_forward_size
        co = 4 * width * (size + image.hidden_size) + 2 * size * config.feed_forward_size
        co += 2 * image.hidden_size * image.feed_forward_size
        more = (blocks[-1][1] + 1) * own + len(blocks) * co
        return replace(usual, token=usual.token + 6.0 * more)

    @classmethod
    def is_specified(cls) -> bool:
        return cls.layer is ErnieVil.layer and cls.forward is ErnieVil.forward

    @classmethod
    def paddle_json(cls, config: EncoderConfig) -> dict[str, Any]:
        options = cls.choices_of(config)
        blocks = options.blocks(config.num_layers)
        return {
            "sent_type_vocab_size": config.token_types,
            "v_hidden_size": options.image_hidden_size,
            "v_num_attention_heads": options.image_heads,
            "v_intermediate_size": options.image_intermediate_size,
            "co_hidden_size": options.co_hidden_size,
            "co_num_attention_heads": options.co_heads,
            "co_intermediate_size": options.co_hidden_size,
            "t_biattention_id": [text for text, _ in blocks],
            "v_biattention_id": [image for _, image in blocks],
        }


def _regions_of(batch: Batch) -> torch.Tensor:
    """(rows, length) bool: whether a place is a region's."""
    nothing = torch.zeros_like(batch.sequence_ids, dtype=torch.bool)
    if batch.regions is None:
        return nothing
    return nothing.flatten().index_fill(0, batch.regions.positions, True).view_as(nothing)


def _separated(batch: Batch, is_region: torch.Tensor) -> Batch:
    """The batch with texts and their regions as sequences of their own."""
    if batch.regions is None:
        return batch
    ids = torch.where(batch.sequence_ids < 0, -1, 2 * batch.sequence_ids + is_region)
    ends = torch.cat([batch.cu_seqlens, batch.regions.firsts]).sort().values
    return replace(batch, sequence_ids=ids, cu_seqlens=ends)


def _seen(batch: Batch, is_region: torch.Tensor) -> torch.Tensor:
    """(rows, 1, length, length) bool: whether i is a token, and j a region of its image."""
    ids = batch.sequence_ids
    same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    return (same & ~is_region[:, :, None] & is_region[:, None, :])[:, None]


def _co_plan(plan: AttentionPlan, other: torch.Tensor, seen: torch.Tensor) -> CoPlan:
    return CoPlan(kernel=plan.kernel, compute=plan.compute, keys=plan.keys, other=other, seen=seen)
