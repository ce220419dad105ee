"""The base of encoders that are not transformers: small, fast students (docs/model.md).

    word (+ token type) embedding, dropout
    layers, each (rows, length, any) -> (rows, length, hidden), dropout
    at the first token of a sequence: its text vector, a pooling of its tokens' vectors
    pooler: tanh of a linear map, as in any encoder

A head of whole texts thus reads the text vector, any other one the vectors of tokens. There are no
positions, no task embedding and no attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from palm_ds.common.errors import UserError, suggest
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import PLAIN, Encoder, Pooler, gather_positions, init_weights
from palm_ds.model.encoder.sequences import POOLINGS, Sequences
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.ops.dropout import DropoutKeys, dropout


class WordEncoder(Encoder):
    """A subclass defines `layer`. Layers are called with (x, Sequences)."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_layers": 1,
        "num_heads": 1,
        "token_types": 1,
        "task_types": 0,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    """Hyperparameters that a recipe need not give; a subclass adds `hidden_size`."""

    def __init__(
        self,
        config: EncoderConfig,
        kernels: Kernels = PLAIN,
        *,
        recompute: bool = False,
        embedding_size: int = 0,
        pooling: str = "softsign_sum",
    ):
        """`embedding_size`: width of the word embeddings; 0 means the hidden size. `pooling`: how
        vectors of tokens become that of their text. Raises UserError."""
        nn.Module.__init__(self)  # a transformer's parts are not wanted
        assert config.vocab_size is not None, "vocab_size must be filled in from the tokenizer"
        _check(config, embedding_size, pooling)
        self.config, self.kernels, self.recompute = config, kernels, recompute
        self.pooling, self.embedding_size = pooling, embedding_size or config.hidden_size
        self.adapter_columns = self.embedding_size
        self.word = nn.Embedding(config.vocab_size, self.embedding_size)
        if config.token_types > 1:
            self.segment = nn.Embedding(config.token_types, self.embedding_size)
        self.pooler = Pooler(config.hidden_size)
        init_weights(self, config.init_range)
        self.layers = nn.ModuleList(self.layer(number) for number in range(config.num_layers))

    def input_size(self, number: int) -> int:
        """Width of the vectors that the layer `number` reads."""
        return self.hidden_size if number else self.embedding_size

    @staticmethod
    def input_sizes(config: EncoderConfig) -> list[int]:
        """The same of every layer, by the configuration alone."""
        first = config.options.get("embedding_size") or config.hidden_size
        return [first, *(config.hidden_size for _ in range(config.num_layers - 1))]

    @classmethod
    def layer_weights(cls, config: EncoderConfig) -> int:
        """Weights that a token is multiplied with in the layers, without biases."""
        raise NotImplementedError

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
        texts = sequences.pooled(x, self.pooling).to(x.dtype)
        return gather_positions(at, torch.where(sequences.first[..., None], texts, x))[0]

    def _drop(self, x: torch.Tensor, keys: DropoutKeys | None, site: int) -> torch.Tensor:
        rate = self.config.dropout if self.training else 0.0
        return dropout(x, rate, keys.site(site) if keys else None)


def _check(config: EncoderConfig, embedding_size: int, pooling: str) -> None:
    if config.task_types:
        raise UserError(
            f"backbone.task_types: {config.task_types}, but {config.kind} has no task embedding; "
            "set 0"
        )
    if type(embedding_size) is not int or embedding_size < 0:
        raise UserError(
            f"backbone.options.embedding_size: {embedding_size!r} is not a width; expected a "
            "number from 1, or 0 for the hidden size"
        )
    if pooling not in POOLINGS:
        near = suggest(str(pooling), POOLINGS)
        raise UserError(f"backbone.options.pooling: no {pooling!r}{near}")
