"""A bag of words: the student of ERNIE's distillation (PaddlePaddle/ERNIE, `distill/`).

    [CLS] a b [SEP]  ->  softsign([CLS] + a + b + [SEP])   at [CLS]; elsewhere the words

With the pooler and a class head it is the released one: softsign of the sum, a linear map with
tanh, a linear map to the classes.
"""

from __future__ import annotations

import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import init_weights
from palm_ds.model.encoder.word_encoder import Sequences, WordEncoder


class BagOfWords(WordEncoder):
    """Its only layer widens or narrows the embeddings, if they have another width."""

    defaults = {**WordEncoder.defaults, "hidden_size": 128}

    def layer(self, number: int) -> nn.Module:
        if self.config.num_layers > 1:
            raise UserError(
                f"backbone.num_layers: {self.config.num_layers}, but a bag of words has 1"
            )
        return _Fit(self.embedding_size, self.hidden_size, self.config.init_range)

    @classmethod
    def layer_weights(cls, config: EncoderConfig) -> int:
        (size,) = cls.input_sizes(config)
        return size * config.hidden_size if size != config.hidden_size else 0

    @classmethod
    def kept_values(cls, config: EncoderConfig, size: int) -> int:
        """The embeddings and, of another width, the vectors."""
        return size if size == config.hidden_size else size + config.hidden_size


class _Fit(nn.Module):
    """A linear map between different widths; between equal ones, none."""

    def __init__(self, size: int, hidden_size: int, init_range: float):
        super().__init__()
        self.dense = nn.Linear(size, hidden_size) if size != hidden_size else None
        init_weights(self, init_range)

    def forward(self, x: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        return self.dense(x) if self.dense is not None else x
