"""Fake tensors on the device "cuda", on machines without one: shapes and dtypes, no numbers.

torch refuses to index them where it was built without CUDA, so indices become narrow, select and
unsqueeze.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


@contextmanager
def fake_gpu() -> Iterator[None]:
    """New tensors are fake and on "cuda"; no gradients, which need a torch built with CUDA."""
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"), _Indexing():
        yield


class _Indexing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return _indexed(*args)
        if func is torch.Tensor.__setitem__:
            return torch.ops.aten.copy_.default(_indexed(*args[:2]), args[2])
        return func(*args, **(kwargs or {}))


def _indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    parts = index if isinstance(index, tuple) else (index,)
    missing = tensor.dim() - sum(part is not None and part is not ... for part in parts)
    at = 0
    for part in parts:
        if part is ...:
            at += missing
        elif part is None:
            tensor, at = tensor.unsqueeze(at), at + 1
        elif isinstance(part, slice):
            start, stop, step = part.indices(tensor.shape[at])
            assert step == 1
            tensor, at = tensor.narrow(at, start, max(stop - start, 0)), at + 1
        elif isinstance(part, int):
            tensor = tensor.select(at, part)
        else:
            tensor, at = tensor.index_select(at, part), at + 1
    return tensor


def parameters_to_fake_gpu(model: nn.Module) -> None:
    """Inside `fake_gpu`. Parameters that are shared stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False, remove_duplicate=False):
            if old not in made:
                made[old] = nn.Parameter(
                    torch.empty(old.shape, dtype=old.dtype), requires_grad=False
                )
            module.register_parameter(name, made[old])


def to_fake_gpu(values: Any) -> Any:
    """The tensors in nested values, as fake ones. Inside `fake_gpu`."""
    if isinstance(values, torch.Tensor):
        return torch.empty(values.shape, dtype=values.dtype)
    if isinstance(values, dict):
        return {key: to_fake_gpu(value) for key, value in values.items()}
    return tuple(map(to_fake_gpu, values)) if isinstance(values, tuple) else values
