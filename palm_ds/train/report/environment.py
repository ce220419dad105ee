"""Environment of a run: host, devices, package versions, command line."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from palm_ds.common.messages import without_secrets

_PACKAGES = (
    "palm_ds",
    "torch",
    "deepspeed",
    "transformers",
    "tokenizers",
    "datasets",
    "pyarrow",
    "numpy",
) + ("safetensors", "sentencepiece", "rjieba", "triton", "apex", "flash-attn", "mpi4py")


def environment(first_start: str = "") -> dict[str, Any]:
    """Environment of a run: machine, devices, versions, and the command that started it, or that
    resumed it after its `first_start`."""
    import torch

    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())

    gpus = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        gpus.append(f"{device.name}, {device.total_memory / 2**30:.0f} GiB")
    return {
        "started": first_start or now,
        **({"resumed": now} if first_start else {}),
        "command": without_secrets(" ".join(sys.argv)),
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": package_versions(_PACKAGES),
    }


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    return {name: version for name in names if (version := _version(name))}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
