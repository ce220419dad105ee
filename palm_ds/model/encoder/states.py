"""States inside an encoder: its embeddings, the output of its layers, their queries, keys and
values.

    with recorded(encoder, wanted) as states:
        encoder(batch)
    states.hidden[3]      # (rows, length, hidden): the output of the third layer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.inputs.batch import EncoderStates


@dataclass(frozen=True, kw_only=True)
class WantedStates:
    """States to record; layers are numbered from 1."""

    embeddings: bool = False
    hidden: tuple[int, ...] = ()
    qkv: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.embeddings or self.hidden or self.qkv)

    def check(self, encoder: Encoder, where: str) -> None:
        """Raises UserError, starting with `where`, if the encoder has no such states."""
        layers = encoder.computed_layers if hasattr(encoder, "layers") else []
        for number in (*self.hidden, *self.qkv):
            if not 1 <= number <= len(layers):
                raise UserError(f"{where}: there is no layer {number}; it has {len(layers)}")
        if self.embeddings and not layers:
            raise UserError(f"{where}: has no layers, and so no embeddings below them")
        for number in self.qkv:
            if encoder.qkv_module(number) is None:
                raise UserError(f"{where}: layer {number} has no queries, keys and values")


@contextmanager
def recorded(encoder: Encoder, wanted: WantedStates) -> Iterator[EncoderStates]:
    """Record the states of the forward passes inside.

    The hooks are new in each pass: they then come after those of ZeRO 3 and of adapters, whose
    modules replace the encoder's, and are gone when the backward pass computes layers again."""
    states = EncoderStates()
    with ExitStack() as hooks:
        for handle in _hooks(encoder, wanted, states) if wanted else ():
            hooks.callback(handle.remove)
        yield states


def _hooks(
    encoder: Encoder, wanted: WantedStates, states: EncoderStates
) -> Iterator[RemovableHandle]:
    turns = _Turns(encoder)
    for layer in {id(x): x for x in turns.layers}.values():
        yield layer.register_forward_pre_hook(turns.count)
    if wanted.embeddings:
        yield turns.layers[0].register_forward_pre_hook(_keep_input(states, turns))
    for number in wanted.hidden:
        module = encoder.hidden_module(number)
        yield module.register_forward_hook(_keep_output(states.hidden, number, turns))
    for number in wanted.qkv:
        module = encoder.qkv_module(number)
        assert module is not None, "WantedStates.check says so"
        yield module.register_forward_hook(_keep_output(states.qkv, number, turns))


class _Turns:
    """Tells the layers apart that one module computes: its calls in a forward pass."""

    def __init__(self, encoder: Encoder):
        self.layers: list[Any] = encoder.computed_layers
        self._calls: Counter[int] = Counter()

    def count(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """A hook before each call of a layer."""
        self._calls[id(module)] += 1

    def at(self, number: int) -> bool:
        """Whether the last call of the module of the layer `number`, from 1, was that layer's."""
        layer = self.layers[number - 1]
        of_module = [n for n, each in enumerate(self.layers, 1) if each is layer]
        return of_module[(self._calls[id(layer)] - 1) % len(of_module)] == number


def _keep_input(states: EncoderStates, turns: _Turns) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if turns.at(1):
            states.embeddings = arguments[0]

    return hook


def _keep_output(kept: dict[int, torch.Tensor], number: int, turns: _Turns) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        if turns.at(number):
            kept[number] = output

    return hook
