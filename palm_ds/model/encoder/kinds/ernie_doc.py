"""ERNIE-Doc (Ding et al. 2021, arXiv 2012.15688): reads a document window by window, and remembers.

    window t      x (length)  ──layer n──> h (length)
    memory        the last vectors of layer n's own outputs in windows ..., t - 2, t - 1, which
                  layer n attends to in window t, without gradients
    score of i and j = ((q_i + w) . k_j + (q_i + p) . R(i - j) + (q_i + s) . T(type of j)) / sqrt(d)

Transformer-XL remembers what layer n read (layer n - 1's outputs), so that its reach grows with the
layers; here it grows with the windows. w, p and s are vectors of each layer and head, R and T its
maps of the vectors of distances and token types, each of which has a norm of its own and is in no
token's input. What comes first attends to a memory of zeros.

A text of a window fills its row: padding stands before the last token, which is [CLS].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import nn
from torch.utils.checkpoint import checkpoint

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings
from palm_ds.model.attention.dense import drop_weights, plain_attention
from palm_ds.model.attention.plan import AttentionPlan, softmax
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import (
    PLAIN,
    Activations,
    EncoderFlops,
    gather_positions,
    init_weights,
    memory_shape,
    refuse_task_types,
)
from palm_ds.model.encoder.layer import EncoderLayer
from palm_ds.model.encoder.positions import skewed
from palm_ds.model.encoder.transformer import TransformerEncoder
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels, layer_norm
from palm_ds.model.ops.compiled import CompiledRegion
from palm_ds.model.ops.dropout import DropoutKeys, dropout, table_keys

_TABLE_EPS = 1e-5
"""Of the norms of the three tables and of masked-LM heads, whatever that of the layers is."""


@dataclass(frozen=True, kw_only=True)
class ErnieDocOptions(Settings):
    """`backbone.options` of this encoder."""

    memory_length: PositiveInt = 128
    """Vectors of earlier windows that each layer attends to."""
    masked_score: PositiveFloat = 1e9
    """Is subtracted in fp32 from the scores of padding: 1e9 in ERNIE's code, 1e8 in PaddleNLP's.
    Memories have vectors of padding too, which by rounding depend on it."""


@dataclass(frozen=True, kw_only=True)
class DocumentPlan(AttentionPlan):
    """Input of a layer besides the vectors of its window."""

    memory: torch.Tensor
    """(rows, memory, hidden), without gradients."""
    distance_vectors: torch.Tensor
    """(memory + 2 length, hidden): those of i - j = memory + length - 1, ..., -length."""
    type_vectors: torch.Tensor
    """(types, hidden)"""
    key_types: torch.Tensor
    """(rows, 1, types, memory + length): 1 where a key has the type, else 0."""


class DocumentLayer(EncoderLayer):
    """A layer of BERT's whose attention has memories, distances and types."""

    def __init__(self, config: EncoderConfig, kernels: Kernels):
        super().__init__(config, kernels)
        size = config.hidden_size
        self.distance_map, self.type_map = nn.Linear(size, size), nn.Linear(size, size)
        self.content_bias, self.distance_bias, self.type_bias = (
            nn.Parameter(_vector(size, config.init_range)) for _ in range(3)
        )

    def attention(self, x: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """(rows, length, hidden) before the output projection."""
        assert isinstance(plan, DocumentPlan) and plan.bias is not None
        self.reads_distances = True  # memories are no tokens of the batch
        _, past_key, past_value = self.qkv(plan.memory).chunk(3, -1)
        self.reads_distances = False
        query, key, value = self.qkv(x).chunk(3, -1)  # the last call is what `recorded` keeps
        keys = self._heads(torch.cat([past_key, key], 1))
        values = self._heads(torch.cat([past_value, value], 1))
        scores = self._heads(query + self.content_bias) @ keys.transpose(-1, -2)
        scores = (scores + self._further(query, plan)) * keys.shape[-1] ** -0.5
        weights = softmax(scores.float() + plan.bias).to(scores.dtype)
        if self.training and self.attention_rate:
            weights = drop_weights(weights, plan.keys, self.attention_rate)
        return (weights @ values).transpose(1, 2).flatten(2)

    def _further(self, query: torch.Tensor, plan: DocumentPlan) -> torch.Tensor:
        """(rows, heads, length, memory + length): what distances and types add to scores."""
        distances = self._heads(self.distance_map(plan.distance_vectors)[None])
        types = self._heads(self.type_map(plan.type_vectors)[None])
        of_distance = self._heads(query + self.distance_bias) @ distances.transpose(-1, -2)
        of_type = self._heads(query + self.type_bias) @ types.transpose(-1, -2)
        return skewed(of_distance) + of_type @ plan.key_types.to(of_type.dtype)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, heads, n, head size) of (rows, n, hidden)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _vector(size: int, std: float) -> torch.Tensor:
    return nn.init.trunc_normal_(torch.empty(size), std=std, a=-2 * std, b=2 * std)


class ErnieDoc(TransformerEncoder):
    """The encoder of ERNIE-Doc."""

    paddle = "ernie_doc"
    options_type = ErnieDocOptions
    defaults = {"token_types": 3, "task_types": 0}
    free_options = ("masked_score",)
    above_layers = ("pooler",)

    def __init__(self, config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False):
        refuse_task_types(config)
        super().__init__(config, kernels, recompute=recompute)
        size, memory = config.hidden_size, self.memory_length(config)
        self.norm, self.position_norm, self.segment_norm = (
            layer_norm(size, _TABLE_EPS, kernels.layer_norm) for _ in range(3)
        )
        self.position = nn.Embedding(2 * config.max_positions + memory, size)
        init_weights(self.position, config.init_range)

    def layer(self, number: int) -> nn.Module:
        return DocumentLayer(self.config, self.kernels)

    def masked_lm_transform(self) -> tuple[nn.Linear, nn.Module]:
        """Its norm's bias begins at 1, as in ERNIE's code."""
        size = self.hidden_size
        norm = layer_norm(size, _TABLE_EPS, self.kernels.layer_norm)
        nn.init.ones_(norm.get_parameter("bias"))
        return nn.Linear(size, size), norm

    def _compile(self) -> None:
        """Without attention, whose memories differ in shape from its window."""
        region = CompiledRegion("layers")
        for layer in self.layers:
            assert isinstance(layer, DocumentLayer)
            layer.compile_in(region, whole=False)

    def forward(self, batch: Batch, at: torch.Tensor | None = None) -> torch.Tensor:
        """The batch's `memory` is read, and its `following` set."""
        if batch.memory is None:
            raise UserError(
                f"backbone.kind: {self.config.kind} reads documents window by window, with "
                "memories: it takes no packed rows of texts (predict, embed, serve, fill-mask)"
            )
        keys = self._dropout_keys(batch)
        x = self._drop(self.norm(self.word(batch.input_ids)), keys)
        past = self._past(batch, x)
        plan, following = self._plan(batch, past, keys), []
        layers = self.computed_layers
        plans = plan.for_layers(len(layers))
        for layer, own_plan, memory in zip(layers, plans, past, strict=True):
            own = replace(own_plan, memory=memory)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, own, use_reentrant=False)
            else:
                x = layer(x, own)
            both = torch.cat([memory, x.detach()], 1)
            following.append(both[:, -past.shape[2] :])
        batch.memory.following = torch.stack(following)
        return gather_positions(at, x)[0]

    def _past(self, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        """(layers, rows, memory, hidden), zeros where nothing came before."""
        assert batch.memory is not None
        layers, *sizes = memory_shape(self.config)
        past = batch.memory.past
        return x.new_zeros(layers, len(x), *sizes) if past is None else past.to(x)

    def _plan(self, batch: Batch, past: torch.Tensor, keys: DropoutKeys | None) -> DocumentPlan:
        memory, (rows, length), device = past.shape[2], batch.input_ids.shape, past.device
        first = batch.token_type_ids[:, :1].expand(-1, memory)
        types = torch.cat([first, batch.token_type_ids], 1)
        numbers = torch.arange(self.config.token_types, device=device)
        query = (batch.sequence_ids >= 0)[..., None]
        key = torch.cat([query.new_ones(rows, memory), query[..., 0]], 1)
        options: ErnieDocOptions = self.options_of(self.config)
        hidden = torch.where(query & key[:, None], 0.0, -options.masked_score)
        places = distance_rows(length, memory, self.config.max_positions, device)
        distances = self.position_norm(self.position(places))
        table = self.segment_norm(self.segment(numbers))
        of_tables = keys and table_keys(batch, keys, len(places) + len(numbers))
        split = len(places)
        return DocumentPlan(
            kernel=self.kernels.attention,
            compute=plain_attention,
            bias=hidden[:, None],
            keys=keys,
            memory=past[0],
            distance_vectors=self._drop(distances, _part(of_tables, slice(split))),
            type_vectors=self._drop(table, _part(of_tables, slice(split, None))),
            key_types=(types[:, None] == numbers[:, None])[:, None],
        )

    def _drop(self, x: torch.Tensor, keys: DropoutKeys | None) -> torch.Tensor:
        return dropout(x, self.config.dropout if self.training else 0.0, keys)

    # ---- answers ----

    @classmethod
    def memory_length(cls, config: EncoderConfig) -> int:
        options: ErnieDocOptions = cls.options_of(config)
        return options.memory_length

    @classmethod
    def flops(cls, config: EncoderConfig) -> EncoderFlops:
        """A token's own, with the keys and values of memories, and what it multiplies with the keys
        of a full window and its memory, of which each has three products."""
        size, memory = config.hidden_size, cls.memory_length(config)
        window = config.max_positions
        own = cls.spec(config).weights(config) + config.num_layers * 3 * size**2 * memory / window
        pairs = 4 * size * (window + memory) + size * memory
        return EncoderFlops(token=6 * own + 6 * config.num_layers * pairs)

    @classmethod
    def activations(cls, config: EncoderConfig) -> Activations:
        """BERT's, and scores with memories, which are kept."""
        usual = super().activations(config)
        scores = 4 * config.num_heads * (config.max_positions + cls.memory_length(config))
        return replace(usual, attention=usual.attention + scores)

    @classmethod
    def adds_to_scores(cls, config: EncoderConfig) -> bool:
        return True

    @classmethod
    def is_specified(cls) -> bool:
        return cls.layer is ErnieDoc.layer and cls.forward is ErnieDoc.forward

    @property
    def generates(self) -> bool:
        return False


def distance_rows(
    length: int, memory: int, window: int, device: torch.device | None = None
) -> torch.Tensor:
    """(memory + 2 length,) the rows of the table for the distances i - j of a query i from a key j,
    memory + length - 1 to -length, in a table for windows of `window` tokens: 0, -1, ... are in its
    first rows, 1, 2, ... from row `window` on (`get_related_pos` in ERNIE's code)."""
    distance = memory + length - 1 - torch.arange(memory + 2 * length, device=device)
    return torch.where(distance > 0, window - 1 + distance, -distance)


def _part(keys: DropoutKeys | None, inside: slice) -> DropoutKeys | None:
    return None if keys is None else replace(keys, tokens=keys.tokens[inside])
