"""Modules without values, for their shapes or for weights that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def on_meta() -> Iterator[None]:
    """Within the context modules are built on torch's "meta" device and not initialized: for random
    numbers without values torch would import its compiler, which takes as long as torch itself."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Leaves tensors as they are that torch.nn.init or a method would fill with random numbers."""

    _DRAWING = ("normal_", "uniform_", "kaiming_uniform_")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        values = kwargs or {}
        if func.__name__ in self._DRAWING:
            return args[0] if args else values["tensor"]
        return func(*args, **values)
