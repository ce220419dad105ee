"""Memory that this process may use, and figures of its device for the log."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from palm_ds.common.errors import UserError, first_line
from palm_ds.runtime.device.gpu_specs import find_card

_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CONTAINER = Path("/sys/fs/cgroup")


def host_memory() -> int:
    """Bytes of this machine's memory, or of the part that a container or `ulimit -v` allows."""
    limits = [psutil.virtual_memory().total]
    for path in map(Path, _CGROUP):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(limits if soft == resource.RLIM_INFINITY else [*limits, soft])


def free_host_memory() -> int:
    """Bytes of memory that can still be used, including what only caches files."""
    free = [psutil.virtual_memory().available, _free_in_container()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        free.append(soft - psutil.Process().memory_info().vms)
    return max(min(free), 0)


def _free_in_container() -> int:
    """The part of a container's memory that is not in use; its limit is often "max"."""
    try:
        limit = int((_CONTAINER / "memory.max").read_text())
        used = int((_CONTAINER / "memory.current").read_text())
        stat = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return psutil.virtual_memory().available


@contextmanager
def names_micro_batch(rows: int) -> Iterator[None]:
    """Turn torch's error for a full GPU into a UserError with the keys that help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        cause = first_line(error)
        raise UserError(
            f"the GPU's memory is not enough for a micro-batch of {rows} rows ({cause}); in the "
            "DeepSpeed file, lower train_micro_batch_size_per_gpu (the losses stay the same), set "
            "palm_ds.activation_checkpointing, or raise the ZeRO stage"
        ) from None


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
    """The most memory used since the last call; None for a CPU. Does not synchronize."""
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
