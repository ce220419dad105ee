"""Layout of the tensors that an optimizer updates: the parameters that each is made of.

    ZeRO 0       each tensor is a parameter
    ZeRO 1, 2    the parameters of a group one after another, cut into one range per process
    ZeRO 3       this process's part of each parameter of a group, one after another

An update that depends on a whole matrix (its norm, its singular values) needs to know; one that is
element-wise does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""The sum of a tensor over all processes, on the tensor's device."""


class Param(NamedTuple):
    name: str
    shape: torch.Size


class Piece(NamedTuple):
    """A run of values of one flattened parameter."""

    param: int
    """Its number in the layout."""
    start: int
    """The first of the parameter's values."""
    inside: slice
    """Where they are in the flattened tensor."""

    def __len__(self) -> int:
        return self.inside.stop - self.inside.start


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """The parameters of one tensor, in the same order on all processes, and the pieces of them that
    are on this one."""

    params: tuple[Param, ...]
    pieces: tuple[Piece, ...]


def whole_param(name: str, shape: torch.Size) -> FlatLayout:
    """The layout of a tensor that is one parameter."""
    pieces = (Piece(0, 0, slice(0, shape.numel())),)
    return FlatLayout(params=(Param(name, shape),), pieces=pieces)


class NeedsLayouts(torch.optim.Optimizer):
    """An optimizer whose update of a value depends on the whole parameter.

    Every tensor of its groups is a parameter until `set_layouts` says otherwise, once ZeRO has
    replaced them.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]):
        super().__init__(groups, defaults)
        self._layouts: Mapping[torch.Tensor, FlatLayout] = {}
        self._all_reduce: AllReduce | None = None

    def set_layouts(
        self, layouts: Mapping[torch.Tensor, FlatLayout], all_reduce: AllReduce | None
    ) -> None:
        """`all_reduce`: None if all parameters are whole on this process."""
        self._layouts, self._all_reduce = layouts, all_reduce

    def layout(self, tensor: torch.Tensor) -> FlatLayout:
        return self._layouts.get(tensor) or whole_param("", tensor.shape)
