"""The base of encoders that are not transformers: small, fast students (docs/model.md).

    word (+ token type) embedding, dropout
    layers, each (rows, length, any) -> (rows, length, hidden), dropout
    at the first token of a sequence: its text vector, a pooling of its tokens' vectors
    pooler: tanh of a linear map, as in any encoder

A head of whole texts thus reads the text vector, any other one the vectors of tokens. There are no
positions, no task embedding and no attention.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import NonNegativeInt
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings, one_of
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import (
    PLAIN,
    Activations,
    Encoder,
    EncoderFlops,
    Pooler,
    gather_positions,
    init_weights,
    refuse_task_types,
)
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.ops.dropout import DropoutKeys, dropout

WORD_POOLINGS = ("softsign_sum", "mean", "max")


@dataclass(frozen=True)
class Sequences:
    """Places of the sequences in packed rows, for layers that mix neighbors or whole sequences.

        row        [CLS] a b [SEP] | [CLS] c [SEP] | padding
        first        1   0 0   0       1   0   0     ...
        pooled       what each token's own sequence adds up to
        shifted      each token's neighbor, `fill` beyond the border of its sequence

    No vector ever depends on another sequence of its row. Padding counts as one more sequence.
    """

    ids: torch.Tensor
    """(rows, length) int64: numbered within the row; -1 is padding."""
    first: torch.Tensor
    """(rows, length) bool: the first token of each sequence, which heads of whole texts read."""

    @classmethod
    def of(cls, batch: Batch) -> Sequences:
        ids = batch.sequence_ids
        return cls(ids, ids != _moved(ids[..., None], -1, fill=-2)[..., 0])

    @property
    def numbers(self) -> torch.Tensor:
        """(rows, length) int64: numbers that no two sequences of the batch share, below
        rows * (length + 1)."""
        rows, length = self.ids.shape
        row = torch.arange(rows, device=self.ids.device)[:, None]
        return row * (length + 1) + self.ids + 1

    def pooled(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """For each token of (rows, length, hidden) what the vectors of its sequence come to, fp32;
        `how` is one of WORD_POOLINGS."""
        x = x.float()
        if how == "max":
            return self._reduced(x, "amax")
        total = self._reduced(x, "sum")
        if how == "softsign_sum":
            return F.softsign(total)
        return total / self._reduced(torch.ones_like(x[..., :1]), "sum")

    def _reduced(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        rows, length, hidden = x.shape
        lowest = -torch.inf if reduction == "amax" else 0.0
        if torch.compiler.is_exporting():  # rows of one text; runtimes have no scatter in fp16
            own = torch.where(self.ids[..., None] >= 0, x, lowest)
            return own.amax(1, keepdim=True) if reduction == "amax" else own.sum(1, keepdim=True)
        at = self.numbers.flatten()
        totals = x.new_full((rows * (length + 1), hidden), lowest)
        index = at[:, None].expand(-1, hidden)
        totals = totals.scatter_reduce(0, index, x.flatten(0, 1), reduction)
        return totals.index_select(0, at).view(rows, length, hidden)

    def shifted(self, x: torch.Tensor, offset: int, fill: float = 0.0) -> torch.Tensor:
        """(rows, length, hidden): the vector `offset` positions further on, or `fill` where that is
        no part of the sequence."""
        if offset == 0:
            return x
        same = _moved(self.ids[..., None], offset, fill=-2) == self.ids[..., None]
        return torch.where(same, _moved(x, offset), fill)

    def time_order(self) -> tuple[np.ndarray, np.ndarray]:
        """The flat positions ordered by their place in a sequence, longer sequences first, as a
        PackedSequence wants them, and how many there are of each place. Waits for the device."""
        numbers = self.numbers.flatten().cpu().numpy()
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        lengths = np.diff(starts, append=len(numbers))
        place = np.arange(len(numbers)) - np.repeat(starts, lengths)
        order = np.lexsort((np.repeat(starts, lengths), -np.repeat(lengths, lengths), place))
        return order, np.bincount(place)


def _moved(x: torch.Tensor, offset: int, fill: int = 0) -> torch.Tensor:
    """x (rows, length, any), read `offset` positions further on; `fill` beyond the row."""
    length = x.shape[1]
    if offset < 0:
        return F.pad(x, (0, 0, -offset, 0), value=fill)[:, :length]
    return F.pad(x, (0, 0, 0, offset), value=fill)[:, offset:]


@dataclass(frozen=True, kw_only=True)
class WordOptions(Settings):
    """`backbone.options` of every such encoder."""

    embedding_size: NonNegativeInt = 0
    """Width of the word embeddings; 0 means the hidden size."""
    pooling: Annotated[str, one_of(WORD_POOLINGS)] = "softsign_sum"
    """How vectors of tokens become that of their text."""


class WordEncoder(Encoder):
    """A subclass defines `layer`. Layers are called with (x, Sequences)."""

    defaults = {
        "num_layers": 1,
        "num_heads": 1,
        "token_types": 1,
        "task_types": 0,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    """A subclass adds `hidden_size`."""
    options_type = WordOptions

    def __init__(self, config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False):
        super().__init__(config, kernels, recompute=recompute)
        assert config.vocab_size is not None
        refuse_task_types(config)
        self.options = self.options_of(config)
        self.embedding_size = self.input_sizes(config)[0]
        self.word = nn.Embedding(config.vocab_size, self.embedding_size)
        if config.token_types > 1:
            self.segment = nn.Embedding(config.token_types, self.embedding_size)
        self.pooler = Pooler(config.hidden_size)
        init_weights(self, config.init_range)
        self.layers = nn.ModuleList(self.layer(number) for number in range(config.num_layers))

    @abstractmethod
    def layer(self, number: int) -> nn.Module:
        """Builds the layer `number` (from 0)."""

    def input_size(self, number: int) -> int:
        """Width of the vectors that the layer `number` reads."""
        return self.hidden_size if number else self.embedding_size

    @classmethod
    def has_positions(cls, config: EncoderConfig) -> bool:
        return False

    @classmethod
    def embedding_width(cls, config: EncoderConfig) -> int:
        return cls.input_sizes(config)[0]

    @classmethod
    def input_sizes(cls, config: EncoderConfig) -> list[int]:
        """The same of every layer, by the configuration alone."""
        first = cls.options_of(config).embedding_size or config.hidden_size
        return [first, *(config.hidden_size for _ in range(config.num_layers - 1))]

    @classmethod
    @abstractmethod
    def layer_weights(cls, config: EncoderConfig) -> int:
        """Weights that a token is multiplied with in the layers, without biases."""

    @classmethod
    @abstractmethod
    def kept_values(cls, config: EncoderConfig, size: int) -> int:
        """Values that a layer with inputs of this size keeps of a token for its backward pass."""

    @classmethod
    def flops(cls, config: EncoderConfig) -> EncoderFlops:
        """Of its matrices; there is no attention."""
        return EncoderFlops(token=6.0 * cls.layer_weights(config))

    @classmethod
    def activations(cls, config: EncoderConfig) -> Activations:
        kept = [cls.kept_values(config, size) for size in cls.input_sizes(config)]
        return Activations(attention=0, feed_forward=sum(kept) / len(kept), widest=max(kept))

    def forward(self, batch: Batch, at: torch.Tensor | None = None) -> torch.Tensor:
        if batch.visibility is not None:
            raise UserError(
                f"backbone.kind: {self.config.kind} reads whole texts; tasks whose tokens see "
                "only some of the others need a transformer"
            )
        keys, sequences = self._dropout_keys(batch), Sequences.of(batch)
        x = self.word(batch.input_ids)  # (rows, length, embedding size)
        if self.config.token_types > 1:
            x = x + self.segment(batch.token_type_ids)
        x = self._drop(x, keys, 0)
        for number, layer in enumerate(self.layers, 1):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, sequences, use_reentrant=False)
            else:
                x = layer(x, sequences)
            x = self._drop(x, keys, number)
        texts = sequences.pooled(x, self.options.pooling).to(x.dtype)
        return gather_positions(at, torch.where(sequences.first[..., None], texts, x))[0]

    def _drop(self, x: torch.Tensor, keys: DropoutKeys | None, site: int) -> torch.Tensor:
        rate = self.config.dropout if self.training else 0.0
        return dropout(x, rate, keys.site(site) if keys else None)
