"""Log lines on the device of a process: its peak, its memory, what was compiled."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch

from palm_ds.runtime.device.gpu_specs import find_card


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of a GPU's memory."""

    allocated: int
    """The most that tensors took together."""
    reserved: int
    """The most that torch's allocator held, free blocks included."""


def peak_flops(device: torch.device, precision: str) -> float:
    """FLOP/s that the device can do at most, by its maker; NaN if that is unknown."""
    if device.type != "cuda":
        return math.nan
    card = find_card(torch.cuda.get_device_name(device))
    tf32 = str(torch.backends.cuda.matmul.fp32_precision) == "tf32"
    peak = card.peak(precision, tf32=tf32) if card else None
    return math.nan if peak is None else peak


def take_memory_use(device: torch.device) -> MemoryUse | None:
    """The most memory used since the last call; None for a CPU. Does not synchronise."""
    if device.type != "cuda":
        return None
    used = MemoryUse(
        allocated=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.max_memory_reserved(device),
    )
    torch.cuda.reset_peak_memory_stats(device)
    return used


def compile_count() -> int:
    """Graphs that torch.compile has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0
