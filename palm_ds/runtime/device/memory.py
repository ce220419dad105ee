"""Memory that this process may use, memory that is free, and advice where a GPU has too little."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from palm_ds.common.errors import UserError

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
        cause = str(error).splitlines()[0]
        raise UserError(
            f"the GPU's memory is not enough for a micro-batch of {rows} rows ({cause}); in the "
            "DeepSpeed file, lower train_micro_batch_size_per_gpu (the losses stay the same), set "
            "palm_ds.activation_checkpointing, or raise the ZeRO stage"
        ) from None
