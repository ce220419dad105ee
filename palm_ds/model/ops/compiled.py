"""torch.compile of parts of the model, whole and for fixed shapes.

    region = CompiledRegion("layers")
    layer.forward = region.wrap(layer.forward)

Each compilation is a line in the log, from the second one on with the guard that failed. The layers
of an encoder share the compiled code. What cannot be compiled whole (a user's layer that prints,
say) runs as it is, and the log says so once.

Shapes that change from batch to batch are padded to a few sizes: `padded_positions`, `padded_rows`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from palm_ds.common.errors import first_line

log = logging.getLogger(__name__)

_MAX_SHAPES = 64  # torch gives up after 8
_CHUNKS = (64, 512, 2048)
_SHARES = 8  # sizes that positions are padded to, up to all tokens of a batch


class CompiledRegion:
    """Functions that are compiled alike, such as all layers of an encoder."""

    def __init__(self, name: str):
        self.name, self.failed = name, False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, compiled at its first call."""
        from torch._dynamo import config  # takes seconds
        from torch._dynamo.exc import TorchDynamoException

        config.recompile_limit = max(config.recompile_limit, _MAX_SHAPES)
        compiled = torch.compile(function, fullgraph=True, dynamic=False)

        def call(*arguments: Any, **named: Any) -> Any:
            if self.failed or torch.compiler.is_compiling():
                return function(*arguments, **named)
            before = _graphs()
            try:
                return compiled(*arguments, **named)
            except TorchDynamoException as error:
                self._fail(error)
                return function(*arguments, **named)
            finally:
                if (count := _graphs() - before) and not self.failed:
                    self._report(count)

        return call

    def _fail(self, error: Exception) -> None:
        self.failed = True
        log.warning("compile: %s run uncompiled: %s", self.name, first_line(error))

    def _report(self, count: int) -> None:
        for metrics in _latest(count):
            seconds = getattr(metrics, "entire_frame_compile_time_s", None) or 0.0
            reason = _first_guard(getattr(metrics, "recompile_reason", None))
            why = f" (no earlier graph fits: {reason})" if reason else ""
            log.info("compile: %s compiled in %.1f s%s", self.name, seconds, why)


def padded_positions(at: torch.Tensor, tokens: int) -> torch.Tensor:
    """`at` (n,) with further positions of a batch of `tokens`, up to an eighth of them, two
    eighths, ...: label counts differ, and each size is compiled once."""
    step = -(-tokens // _SHARES)
    missing = -len(at) % step
    return torch.cat([at, torch.arange(missing, device=at.device)])


def padded_rows(n: int) -> int:
    """The rows that a chunk of the vocabulary product has: few sizes, each compiled once."""
    return next((size for size in _CHUNKS if n <= size), _CHUNKS[-1])


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _latest(count: int) -> list[Any]:
    """torch's records of the last compilations."""
    from torch._dynamo.utils import get_compilation_metrics

    return [each for each in get_compilation_metrics() if each.co_name][-count:]


def _first_guard(reason: str | None) -> str:
    """The condition in torch's reason: "0/1: at is None   # return tensors if ..."."""
    line = (reason or "").strip().split("\n")[0]
    return " ".join(line.split(": ", 1)[-1].split("#")[0].split())
