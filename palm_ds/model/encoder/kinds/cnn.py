"""A convolutional network over words, as in ERNIE's distillation (PaddlePaddle/ERNIE,
`demo/distill`) and, with several windows, in Kim 2014 (arXiv 1408.5882).

    each layer:  for each window of w words a convolution, activation; all concatenated
                 maximum over `pool` neighbours

Beyond the borders of a text are zeros, wherever in a row it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.model.config.activations import ACTIVATIONS
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import PLAIN
from palm_ds.model.encoder.sequences import Sequences
from palm_ds.model.encoder.word_encoder import WordEncoder
from palm_ds.model.kernels import Kernels


class CNN(WordEncoder):
    """The hidden size is divided among the windows."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **WordEncoder.defaults,
        "hidden_size": 128,
        "activation": "relu",
    }

    def __init__(
        self,
        config: EncoderConfig,
        kernels: Kernels = PLAIN,
        *,
        windows: Sequence[int] = (3,),
        pool: int = 3,
        **others: Any,
    ):
        """`windows`: the words that each convolution sees. `pool`: neighbours of the maximum; 1
        means none. Raises UserError."""
        self.windows = _checked(windows, "windows")
        (self.pool,) = _checked([pool], "pool")
        if config.hidden_size % len(self.windows):
            raise UserError(
                f"backbone.options.windows: {len(self.windows)} windows do not divide the "
                f"hidden_size {config.hidden_size}"
            )
        super().__init__(config, kernels, **others)

    def layer(self, number: int) -> nn.Module:
        return ConvolutionLayer(
            self.input_size(number),
            self.hidden_size,
            windows=self.windows,
            pool=self.pool,
            activation=self.config.activation,
        )

    @classmethod
    def layer_weights(cls, config: EncoderConfig) -> int:
        windows = config.options.get("windows", (3,))
        each = config.hidden_size // len(windows)
        return sum(sum(windows) * size * each for size in cls.input_sizes(config))


class ConvolutionLayer(nn.Module):
    """A convolution for each window, and the maximum over neighbours."""

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
        found = []
        for window, convolution in zip(self.windows, self.convolutions, strict=True):
            seen = [sequences.shifted(x, offset) for offset in _offsets(window)]
            found.append(convolution(torch.cat(seen, -1)))
        x = self.activation(torch.cat(found, -1))
        near = [sequences.shifted(x, offset, -torch.inf) for offset in _offsets(self.pool)]
        return torch.stack(near).amax(0) if self.pool > 1 else x


def _offsets(window: int) -> range:
    """The places of a window around a word; one more to the right if it is even."""
    before = (window - 1) // 2
    return range(-before, window - before)


def _checked(sizes: object, name: str) -> tuple[int, ...]:
    given = tuple(sizes) if isinstance(sizes, list | tuple) else ()
    if not given or any(type(size) is not int or size < 1 for size in given):
        example = "3" if name == "pool" else "[2, 3, 4]"
        shown = given[0] if name == "pool" and given else sizes
        raise UserError(
            f"backbone.options.{name}: {shown!r}: expected a number of words, as {example}"
        )
    return given
