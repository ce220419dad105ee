"""Prepares a model for predictions."""

from __future__ import annotations

import torch
from torch import nn

from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.multi_task_model import Model
from palm_ds.model.ops.packed_linear import PackedLinear, packed_form


def prepare_to_predict(model: Model, device: torch.device | str, dtype: torch.dtype) -> Model:
    """The same model on a device, for nothing but predictions."""
    model.to(device, dtype).eval()
    if torch.device(device).type == "cpu" and packed_form(dtype):
        _pack(model.backbone)
    return model


def _pack(encoder: Encoder) -> None:
    """Pack the matrices of its layers; a user's layer may lack some. The two halves of a gated
    network are multiplied one after the other: what follows reads each whole."""
    matrices = encoder.matrices(encoder.config)
    for layer in encoder.layers:
        modules = dict(layer.named_modules())
        for matrix in matrices:
            if type(linear := modules.get(matrix.path)) is nn.Linear:
                halves = len(matrix.stacked) if matrix.roles == ("intermediate",) else 1
                layer.set_submodule(matrix.path, PackedLinear(linear, halves))
