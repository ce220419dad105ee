"""A convolutional network over words, as in ERNIE's distillation (PaddlePaddle/ERNIE,
`demo/distill`) and, with several windows, in Kim 2014 (arXiv 1408.5882).

    each layer:  for each window of w words a convolution, activation; all concatenated
                 maximum over `pool` neighbors

Beyond the borders of a text are zeros, wherever in a row it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, PositiveInt
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import ACTIVATIONS, EncoderConfig
from palm_ds.model.encoder.encoder import PLAIN
from palm_ds.model.encoder.word_encoder import Sequences, WordEncoder, WordOptions
from palm_ds.model.kernels import Kernels


@dataclass(frozen=True, kw_only=True)
class CNNOptions(WordOptions):
    """`backbone.options` of `kind: cnn`."""

    windows: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (3,)
    """The words that each convolution sees."""
    pool: PositiveInt = 3
    """Neighbors of the maximum; 1 means none."""


class CNN(WordEncoder):
    """The hidden size is divided among the windows."""

    defaults = {
        **WordEncoder.defaults,
        "hidden_size": 128,
        "activation": "relu",
    }
    options_type = CNNOptions

    def __init__(self, config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False):
        windows = self.options_of(config).windows
        if config.hidden_size % len(windows):
            raise UserError(
                f"backbone.options.windows: {len(windows)} windows do not divide the hidden_size "
                f"{config.hidden_size}"
            )
        super().__init__(config, kernels, recompute=recompute)

    def layer(self, number: int) -> nn.Module:
        return ConvolutionLayer(
            self.input_size(number),
            self.hidden_size,
            windows=self.options.windows,
            pool=self.options.pool,
            activation=self.config.activation,
        )

    @classmethod
    def layer_weights(cls, config: EncoderConfig) -> int:
        windows = cls.options_of(config).windows
        each = config.hidden_size // len(windows)
        return sum(sum(windows) * size * each for size in cls.input_sizes(config))

    @classmethod
    def kept_values(cls, config: EncoderConfig, size: int) -> int:
        """The words of every window, the activation's input and output, the neighbors."""
        options = cls.options_of(config)
        return sum(options.windows) * size + (2 + options.pool) * config.hidden_size


class ConvolutionLayer(nn.Module):
    """A convolution for each window, and the maximum over neighbors."""

    def __init__(
        self, size: int, hidden_size: int, *, windows: Sequence[int], pool: int, activation: str
    ):
        super().__init__()
        self.windows, self.pool, self.activation = windows, pool, ACTIVATIONS[activation]
        each = hidden_size // len(windows)
        made = [nn.Linear(window * size, each) for window in windows]
        for part in made:  # as Paddle does
            nn.init.normal_(part.weight, std=math.sqrt(2 / part.in_features))
            nn.init.zeros_(part.bias)
        self.convolutions = nn.ModuleList(made)

    def forward(self, x: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        windows = []
        for window, convolution in zip(self.windows, self.convolutions, strict=True):
            seen = [sequences.shifted(x, offset) for offset in _offsets(window)]
            windows.append(convolution(torch.cat(seen, -1)))
        x = self.activation(torch.cat(windows, -1))
        near = [sequences.shifted(x, offset, -torch.inf) for offset in _offsets(self.pool)]
        return torch.stack(near).amax(0) if self.pool > 1 else x


def _offsets(window: int) -> range:
    """The places of a window around a word; one more to the right if it is even."""
    before = (window - 1) // 2
    return range(-before, window - before)
