"""A bidirectional LSTM over words: the strongest of the small students (ERNIE's `distill/README`;
Tang et al. 2019, arXiv 1903.12136).

    forward   a -> b -> c        each text by itself, half of the hidden size each
    backward  a <- b <- c
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.word_encoder import Sequences, WordEncoder

_GATES = (0, 3, 1, 2)
"""ONNX's order (input, output, forget, cell) among torch's (input, forget, cell, output)."""


class BiLSTM(WordEncoder):
    """Each direction has half of the hidden size."""

    defaults = {**WordEncoder.defaults, "hidden_size": 256}

    def layer(self, number: int) -> nn.Module:
        if self.hidden_size % 2:
            raise UserError(
                f"backbone.hidden_size: {self.hidden_size} is odd; a bilstm halves it between "
                "its directions"
            )
        return LSTMLayer(self.input_size(number), self.hidden_size)

    @classmethod
    def layer_weights(cls, config: EncoderConfig) -> int:
        half = config.hidden_size // 2
        return sum(2 * 4 * half * (size + half) for size in cls.input_sizes(config))

    @classmethod
    def kept_values(cls, config: EncoderConfig, size: int) -> int:
        """The inputs in both orders, and of each direction four gates, the cell and the output."""
        return 2 * size + 6 * config.hidden_size


class LSTMLayer(nn.Module):
    """One LSTM in each direction."""

    def __init__(self, size: int, hidden_size: int):
        super().__init__()
        self.lstm = nn.LSTM(size, hidden_size // 2, bidirectional=True)

    def forward(self, x: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """(rows, length, size) -> (rows, length, hidden)"""
        if torch.compiler.is_exporting():
            return self._in_onnx(x, sequences)
        order, counts = sequences.time_order()
        flat, index = x.flatten(0, 1), torch.from_numpy(order).to(x.device)
        packed = PackedSequence(flat.index_select(0, index), torch.from_numpy(counts))
        out = self.lstm(packed)[0].data
        back = torch.empty_like(index).scatter_(0, index, torch.arange(len(index), device=x.device))
        return out.index_select(0, back).view(*x.shape[:2], -1)

    def _in_onnx(self, x: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """The same as ONNX's operator, for rows of one text with padding on either side."""
        real = sequences.ids >= 0
        first = real.long().argmax(1, keepdim=True)
        turned = _rolled(x, first)  # texts begin at 0
        weights = (self._onnx_gates(f"weight_{part}").unflatten(1, (-1,)) for part in ("ih", "hh"))
        biases = torch.cat([self._onnx_gates(f"bias_{part}") for part in ("ih", "hh")], 1)
        half = self.lstm.hidden_size
        out = torch.onnx.ops.symbolic(
            "LSTM",
            (turned.transpose(0, 1), *weights, biases, real.sum(1).clamp(min=1).int()),
            attrs={"hidden_size": half, "direction": "bidirectional"},
            dtype=x.dtype,
            shape=(x.shape[1], 2, x.shape[0], half),
        )
        states = out.permute(2, 0, 1, 3).flatten(2)  # (rows, length, hidden)
        return _rolled(states, -first)

    def _onnx_gates(self, name: str) -> torch.Tensor:
        """(directions, 4 * half, any): a parameter with the gates in ONNX's order."""
        both = [getattr(self.lstm, f"{name}_l0{end}") for end in ("", "_reverse")]
        return torch.stack([torch.cat([x.chunk(4)[n] for n in _GATES]) for x in both])


def _rolled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Each row of x (rows, length, hidden), starting from its place `by` (rows, 1)."""
    length = x.shape[1]
    places = torch.arange(length, device=x.device) + by
    places = torch.where(places < 0, places + length, places)
    places = torch.where(places >= length, places - length, places)
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
