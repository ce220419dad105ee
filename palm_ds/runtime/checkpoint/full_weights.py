"""The weights of a model, whole and in fp32, from the shards of all processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from palm_ds.runtime.checkpoint.sharded_state import LocalShards


def full_state_dict(
    model: nn.Module, local: LocalShards, device: torch.device
) -> dict[str, torch.Tensor]:
    """On rank 0, every parameter and persistent buffer on the CPU; an empty dict elsewhere. All
    processes take part, one weight at a time, so `device` holds at most one extra."""
    out = {}
    for name, full in _parameters(local, device):
        if local.rank == 0:
            out[name] = full.detach().to("cpu", torch.float32, copy=True)
    if local.rank:
        return {}
    return {name: out[name] for name in local.parameters} | _buffers(model)


def _parameters(local: LocalShards, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param

    for name in local.frozen:
        yield name, local.full_frozen(name, device)
    if local.stage == 3:
        yield from local.full_partitioned(device)
        return
    for name, parameter in local.parameters.items():
        if name not in local.frozen:
            full = safe_get_full_fp32_param(parameter) if local.stage else parameter
            assert full is not None
            yield name, full


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the persistent buffers, on the CPU."""
    stored = model.state_dict().keys()
    return {n: b.detach().cpu().clone() for n, b in model.named_buffers() if n in stored}
