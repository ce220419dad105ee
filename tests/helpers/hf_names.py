"""Hugging Face parameters under our names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.weights.formats.huggingface.families import architecture_of
from palm_ds.weights.formats.huggingface.names import State, lost, to_palm_ds_names
from palm_ds.weights.formats.tensor_files import in_memory_entry


def from_names(state: Mapping[str, torch.Tensor], kind: str) -> tuple[State, list[str]]:
    """Hugging Face parameters under palm_ds names, and the names of unknown ones.

    `kind` is the model_type.
    """
    stored = {name: in_memory_entry(name, tensor) for name, tensor in state.items()}
    layer = re.compile(r"\blayers?\.(\d+)\.")
    layers = {m[1] for m in (layer.search(x) for x in state) if m}
    config = EncoderConfig(kind=architecture_of(kind).kind, num_layers=max(len(layers), 1))
    entries, skipped = to_palm_ds_names(stored, kind, config, "weights")
    return {palm_name: entry.read() for palm_name, entry in entries.items()}, lost(skipped)
