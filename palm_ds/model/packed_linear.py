"""Linear maps for predictions on x86 CPUs: oneDNN's, with weights packed ahead.

torch multiplies fp32 matrices with MKL, which is about half as fast as oneDNN on AMD's processors.
The results agree to rounding, and do not depend on what else is in a batch.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.multi_task_model import Model

_DTYPES = (torch.float32, torch.bfloat16)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}


class PackedLinear(nn.Module):
    """y = x W^T + b without gradients. Its state dict is that of the nn.Linear it was made from; it
    cannot load one, or be moved. A copy is an nn.Linear, which can; one that was pickled is packed
    again where it is loaded, if that machine can."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        bias = None if self._bias is None else self._bias.clone()
        return _linear(self._weight.to_dense(), bias)

    def __reduce__(self) -> tuple[Any, ...]:
        return _packed_or_linear, (self._weight.to_dense(), self._bias)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + "weight"] = self._weight.to_dense()
        if self._bias is not None:
            destination[prefix + "bias"] = self._bias


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear.eval()


def _packed_or_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    linear = _linear(weight, bias)
    return PackedLinear(linear) if can_pack(weight.dtype) else linear


def prepare_to_predict(model: Model, device: torch.device | str, dtype: torch.dtype) -> Model:
    """The same model on a device, for nothing but predictions."""
    model.to(device, dtype).eval()
    if torch.device(device).type == "cpu" and can_pack(dtype):
        _pack(model.backbone)
    return model


def _pack(encoder: Encoder) -> None:
    """Pack the matrices of its layers; a user's layer may lack some."""
    paths = [matrix.path for matrix in encoder.matrices(encoder.config)]
    for layer in encoder.layers:
        modules = dict(layer.named_modules())
        for path in paths:
            if type(linear := modules.get(path)) is nn.Linear:
                layer.set_submodule(path, PackedLinear(linear))


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes what torch does, which is tried: the operation is not documented."""
    if dtype not in _DTYPES or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    x = torch.arange(96.0).sin().view(3, 32).to(dtype)
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        linear = nn.Linear(32, 16).to(dtype)
        try:
            output = PackedLinear(linear)(x)
        except (RuntimeError, AttributeError, NotImplementedError):
            return False
        return bool(
            (output - F.linear(x, linear.weight, linear.bias)).abs().max() < _TOLERANCE[dtype]
        )
