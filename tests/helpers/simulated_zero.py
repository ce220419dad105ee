"""An optimizer on tensors as ZeRO cuts them: the processes are threads, and nothing else of ZeRO is
there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import nn

from palm_ds.runtime.optimizer.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer.param_groups import set_rates
from palm_ds.runtime.optimizer.state import AllReduce, FlatLayout, NeedsLayouts, Param, Piece

Cut = Callable[[Sequence[int], int, int], list[Piece]]
"""The pieces of parameters of these sizes on process `rank` of `world`."""


class LayersModel(nn.Module):
    """Has the names of a real model: two layers with fused queries, keys and values."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            nn.ModuleDict(
                {"qkv": nn.Linear(width, 3 * width), "expand": nn.Linear(width, 2 * width + 1)}
            )
            for _ in range(2)
        ]
        self.backbone = nn.ModuleDict(
            {"word": nn.Embedding(11, width), "layers": nn.ModuleList(layers)}
        )
        self.heads = nn.ModuleDict({"order": nn.Linear(width, 3)})


def as_zero_1(sizes: Sequence[int], rank: int, world: int) -> list[Piece]:
    """The parameters one after another, cut into equal ranges."""
    part = -(-sum(sizes) // world)
    pieces, offset = [], 0
    for number, size in enumerate(sizes):
        start = max(rank * part - offset, 0)
        end = min((rank + 1) * part - offset, size)
        if start < end:
            first = offset + start - rank * part
            pieces.append(Piece(number, start, slice(first, first + end - start)))
        offset += size
    return pieces


def as_zero_3(sizes: Sequence[int], rank: int, world: int) -> list[Piece]:
    """Each parameter cut into equal parts, the last ones shorter or empty."""
    pieces, offset = [], 0
    for number, size in enumerate(sizes):
        part = -(-size // world)
        start, end = min(rank * part, size), min((rank + 1) * part, size)
        if start < end:
            pieces.append(Piece(number, start, slice(offset, offset + end - start)))
        offset += part
    return pieces


def gradients(model: nn.Module, step: int) -> dict[nn.Parameter, torch.Tensor]:
    """Of very different sizes from step to step."""
    generator = torch.Generator().manual_seed(step)
    scale = 10.0 ** (step % 3)
    return {p: scale * torch.randn(p.shape, generator=generator) for p in model.parameters()}


def train_whole(config: OptimizerConfig, steps: range, lr: float = 0.1) -> nn.Module:
    model = LayersModel()
    optimizer = build_optimizer(model, config, zero_stage=0, checked=False)
    for step in steps:
        for parameter, gradient in gradients(model, step).items():
            parameter.grad = gradient
        set_rates(optimizer.param_groups, lr)
        optimizer.step()
    return model


def train_cut(
    config: OptimizerConfig, steps: range, *, cut: Cut, world: int, lr: float = 0.1
) -> nn.Module:
    """The same on `world` processes."""
    barrier, shared = Barrier(world, timeout=20), [torch.zeros(())] * world

    def process(rank: int) -> list[tuple[nn.Parameter, Piece, torch.Tensor]]:
        def all_reduce(values: torch.Tensor) -> torch.Tensor:
            shared[rank] = values
            barrier.wait()
            total = torch.stack(shared).sum(0)
            barrier.wait()
            return total

        return _process(models[rank], config, steps, all_reduce, cut=cut, at=(rank, world), lr=lr)

    models = [LayersModel() for _ in range(world)]
    with ThreadPoolExecutor(world) as pool:
        for rank, found in enumerate(pool.map(process, range(world))):
            names = {p: name for name, p in models[rank].named_parameters()}
            whole = dict(models[0].named_parameters())
            for parameter, piece, values in found:
                target = whole[names[parameter]].detach().view(-1)
                target[piece.start : piece.start + len(piece)] = values
    return models[0]


def _process(
    model: nn.Module,
    config: OptimizerConfig,
    steps: range,
    all_reduce: AllReduce,
    *,
    cut: Cut,
    at: tuple[int, int],
    lr: float,
) -> list[tuple[nn.Parameter, Piece, torch.Tensor]]:
    """This process's values of each parameter."""
    optimizer = build_optimizer(model, config, zero_stage=1, checked=False)
    names = {p: name for name, p in model.named_parameters()}
    groups, layouts = [], {}
    for group in optimizer.param_groups:
        params = group["params"]
        pieces = cut([p.numel() for p in params], *at)
        flat = nn.Parameter(_flat(pieces, params, {p: p.detach() for p in params}))
        group["params"] = [flat]
        listed = tuple(Param(names[p], p.shape) for p in params)
        layouts[flat] = FlatLayout(params=listed, pieces=tuple(pieces))
        groups.append((flat, params, pieces))
    if isinstance(optimizer, NeedsLayouts):
        optimizer.set_layouts(layouts, all_reduce)
    for step in steps:
        wanted = gradients(model, step)
        for flat, params, pieces in groups:
            flat.grad = _flat(pieces, params, wanted)
        set_rates(optimizer.param_groups, lr)
        everything = optimizer.param_groups
        for group in everything:  # ZeRO steps one group after another
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = everything
    return [
        (params[piece.param], piece, flat.detach()[piece.inside])
        for flat, params, pieces in groups
        for piece in pieces
    ]


def _flat(
    pieces: Sequence[Piece],
    params: Sequence[nn.Parameter],
    values: dict[nn.Parameter, torch.Tensor],
) -> torch.Tensor:
    """The pieces' values in a flat tensor; padding is not a number, so that none is read."""
    size = max((piece.inside.stop for piece in pieces), default=0) + 3
    flat = torch.full((size,), float("nan"))
    for piece in pieces:
        whole = values[params[piece.param]].reshape(-1)
        flat[piece.inside] = whole[piece.start : piece.start + len(piece)]
    return flat
