"""State of an optimizer over flat tensors, their layout, and exact gradient norms.

A layout says which parameters a tensor is made of:

    ZeRO 0       each tensor is a parameter
    ZeRO 1, 2    the parameters of a group one after another, cut into one range per process
    ZeRO 3       this process's part of each parameter of a group, one after another

An update that depends on a whole matrix (its norm, its singular values) needs to know; one that is
element-wise does not.

Gradient norms are right to 1e-7 at any size. On a CPU, torch's own fp32 norm adds the squares
nearly one by one: over the 16 million numbers of a token embedding it comes out 6e-4 too small, so
that a run clips otherwise than one that shards the same gradients. Here fp32 adds up small pieces,
and float64 adds up the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class OptimizerStateSpec:
    """The per-tensor state of an optimizer: `moments`, tensors of the same shape, and `step`, the
    number of updates."""

    moments: Mapping[str, torch.dtype]
    step: int | torch.Tensor
    """The initial count, a number or a tensor with one element."""
    from_zero: bool = True
    """Whether the moments may start as zeros."""

    def entry(self, tensor: torch.Tensor, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The optimizer's initial `state` of a tensor, all zeros; a count that is a tensor lies on
        `device`."""
        step = self.step
        count = torch.zeros_like(step, device=device) if isinstance(step, torch.Tensor) else 0
        entry: dict[str, Any] = {"step": count}
        for name, dtype in self.moments.items():
            entry[name] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
        return entry


ADAM = OptimizerStateSpec(
    moments={"exp_avg": torch.float32, "exp_avg_sq": torch.float32}, step=torch.zeros(())
)
MOMENTUM = OptimizerStateSpec(moments={"momentum_buffer": torch.float32}, step=torch.zeros(()))


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


_PIECE = 1 << 14  # numbers


def total_norm(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """The norm of all tensors together, as a float64 scalar on their device; 0 for none. `dtype`:
    what a tensor or piece of one is summed in (default: its own)."""
    pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    if not pieces:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(pieces, 2, dtype)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).double().norm()


def _pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Other devices add up pairwise, which one piece is exact enough for."""
    return tensor.flatten().split(_PIECE) if tensor.device.type == "cpu" else (tensor,)
