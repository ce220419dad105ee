"""TF32: fp32 matrix products whose inputs GPUs round to 10 bits of mantissa, several times faster.

Sums stay fp32, and so do weights and everything else. GPUs have it since 2020 (compute capability
8.0); it matters to runs in fp32, not to bf16 and fp16.

    use_tf32(ds_config.tf32, device)      # before anything is compiled
"""

from __future__ import annotations

import torch

from palm_ds.runtime.deepspeed.ds_config import DSConfig

_SINCE = (8, 0)
"""Compute capability."""


def use_tf32(on: bool, device: torch.device) -> None:
    """Switch TF32 on or off on a GPU. Of torch's interfaces this one writes both the old and the
    new settings: up to torch 2.13, torch.compile fails if only torch.backends.*.fp32_precision was
    set (pytorch#166387)."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if on else "highest")


def describe_tf32(ds_config: DSConfig, device: torch.device) -> str:
    """A line for the log; empty where there is nothing to say."""
    if device.type != "cuda":
        return f"palm_ds.tf32: no effect on this device ({device.type})" if ds_config.tf32 else ""
    if torch.cuda.get_device_capability(device) < _SINCE:
        name = torch.cuda.get_device_name(device)
        return f"palm_ds.tf32: no effect, {name} has no TF32" if ds_config.tf32 else ""
    if ds_config.precision != "fp32":
        return ""
    if ds_config.tf32:
        return "fp32 with TF32: inputs of matrix products are rounded to 10 bits of mantissa"
    return "fp32 without TF32: palm_ds.tf32 makes matrix products several times faster"
