"""Linear maps for predictions on x86 CPUs, whose weights are laid out ahead.

    onednn     oneDNN's own packed form
    columns    the transpose in memory: MKL's product of few rows with it is up to a third faster

torch multiplies fp32 matrices with MKL, which is about half as fast as oneDNN on AMD's processors,
and the faster one on Intel's. The results agree up to rounding; oneDNN's do not depend on what
else is in a batch.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

_DTYPES = (torch.float32, torch.bfloat16)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}
_CPU_INFO = Path("/proc/cpuinfo")


class PackedLinear(nn.Module):
    """y = x W^T + b without gradients. Its state dict is that of the nn.Linear it was made from; it
    cannot load one, or be moved. A copy is an nn.Linear, which can; one that was pickled is packed
    again where it is loaded, if that machine can."""

    def __init__(self, linear: nn.Linear, parts: int = 1, form: str = "") -> None:
        """`parts`: maps of equal height that are stacked in it; each is multiplied by itself."""
        super().__init__()
        weight = linear.weight.detach()
        in_columns = (form or packed_form(weight.dtype)) == "columns"
        lay_out, self._multiply = (_in_columns, F.linear) if in_columns else (_reordered, _onednn)
        self._weights = [lay_out(part) for part in weight.chunk(parts)]
        bias = linear.bias
        self._biases = [None] * parts if bias is None else list(bias.detach().chunk(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._weights) == 1:
            return self._multiply(x, self._weights[0], self._biases[0])
        return torch.cat(self.parts(x), -1)

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The results of the parts, each contiguous."""
        pairs = zip(self._weights, self._biases, strict=True)
        return [self._multiply(x, weight, bias) for weight, bias in pairs]

    def _whole(self) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """The weight and bias as they were, and the number of parts."""
        weights = [x.to_dense() if x.is_mkldnn else x for x in self._weights]
        biases = [bias for bias in self._biases if bias is not None]
        return torch.cat(weights).contiguous(), torch.cat(biases) if biases else None, len(weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        weight, bias, _ = self._whole()
        return _linear(weight, bias)

    def __reduce__(self) -> tuple[Any, ...]:
        return _packed_or_linear, self._whole()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        weight, bias, _ = self._whole()
        destination[prefix + "weight"] = weight
        if bias is not None:
            destination[prefix + "bias"] = bias


def _in_columns(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous().t()


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear.eval()


def _packed_or_linear(weight: torch.Tensor, bias: torch.Tensor | None, parts: int) -> nn.Module:
    linear = _linear(weight, bias)
    return PackedLinear(linear, parts) if packed_form(weight.dtype) else linear


@cache
def packed_form(dtype: torch.dtype) -> str:
    """`columns` or `onednn`: the faster form on this processor; empty if there is none."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ""
    if dtype == torch.float32 and torch.backends.mkl.is_available() and _made_by_intel():
        return "columns"
    return "onednn" if onednn_packs(dtype) else ""


def _made_by_intel() -> bool:
    """Linux does not say in `platform.processor`."""
    known = _CPU_INFO.read_text() if _CPU_INFO.is_file() else platform.processor()
    return "GenuineIntel" in known


@cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes what torch does, which is tried: the operation is not documented."""
    if dtype not in _DTYPES:
        return False
    x = torch.arange(96.0).sin().view(3, 32).to(dtype)
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        linear = nn.Linear(32, 16).to(dtype)
        try:
            output = PackedLinear(linear, form="onednn")(x)
        except (RuntimeError, AttributeError, NotImplementedError):
            return False
        return bool(
            (output - F.linear(x, linear.weight, linear.bias)).abs().max() < _TOLERANCE[dtype]
        )
