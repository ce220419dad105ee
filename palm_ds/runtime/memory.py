"""How much memory this process may use."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int:
    """Bytes of this machine's memory, or of the part that a container or `ulimit -v` allows."""
    limits = [psutil.virtual_memory().total]
    for path in map(Path, _CGROUP):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(limits if soft == resource.RLIM_INFINITY else [*limits, soft])
