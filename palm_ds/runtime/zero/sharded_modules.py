"""A model that is not trained, shared out among the processes.

    every process keeps 1/N of each part ──all-gather before the part runs──> its weights
                                          freed after it

A part is a module that is called as a whole: an embedding, a layer, a head. The weights of one part
are whole at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from palm_ds.runtime.processes.processes import Processes


@dataclass(frozen=True)
class _SharedPart:
    """The parameters of a part, of which this process keeps a contiguous share."""

    parameters: tuple[nn.Parameter, ...]
    shapes: tuple[torch.Size, ...]
    share: torch.Tensor  # (1/N of all, rounded up,) on the device

    def gather(self, world: int) -> None:
        flat = self.share
        if world > 1:
            flat = self.share.new_empty(world * len(self.share))
            dist.all_gather_into_tensor(flat, self.share)
        sizes = [shape.numel() for shape in self.shapes]
        pieces = flat[: sum(sizes)].split(sizes)
        for parameter, piece, shape in zip(self.parameters, pieces, self.shapes, strict=True):
            parameter.data = piece.view(shape)

    def free(self) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.new_empty(0)


class ShardedModules:
    """The parts of a model: children of `backbone` and its `layers`, and `heads`. A parameter that
    two parts have (tied embeddings) is kept once."""

    def __init__(self, model: Any, processes: Processes):
        self.processes = processes
        self._needs: dict[nn.Module, list[_SharedPart]] = {}
        owner: dict[nn.Parameter, _SharedPart] = {}
        for module in _modules(model):
            own = tuple(p for p in module.parameters() if p not in owner)
            if own:
                part = self._share(own)
                owner |= dict.fromkeys(own, part)
            parts = [owner[parameter] for parameter in module.parameters()]
            self._needs[module] = list(dict.fromkeys(parts))
            module.register_forward_pre_hook(lambda module, *_: self._gather(module))
            module.register_forward_hook(lambda module, *_: self._free(module))
        self._move_others(model, owner)

    def _move_others(self, model: nn.Module, shared: Collection[nn.Parameter]) -> None:
        """Move what is in no part, whole, to the device: buffers, and parameters of an encoder's
        own."""
        for parameter in model.parameters():
            if parameter not in shared:
                parameter.data = parameter.data.to(self.processes.device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.processes.device))

    def _share(self, parameters: tuple[nn.Parameter, ...]) -> _SharedPart:
        """Keep this process's share of some parameters, and free them."""
        rank, world = self.processes.rank, self.processes.world
        flat = torch.cat([parameter.data.flatten() for parameter in parameters])
        size = -(-len(flat) // world)
        share = flat.new_zeros(size)
        mine = flat[rank * size : (rank + 1) * size]
        share[: len(mine)] = mine
        shapes = tuple(parameter.shape for parameter in parameters)
        part = _SharedPart(parameters, shapes, share.to(self.processes.device))
        part.free()
        return part

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """A context in which a part has its weights. All processes take part."""
        self._gather(module)
        yield
        self._free(module)

    def _gather(self, module: nn.Module) -> None:
        for part in self._needs[module]:
            part.gather(self.processes.world)

    def _free(self, module: nn.Module) -> None:
        for part in self._needs[module]:
            part.free()


def _modules(model: Any) -> Iterator[nn.Module]:
    """The parts of a model, in a fixed order."""
    for child in model.backbone.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child
    yield from model.heads.values()
