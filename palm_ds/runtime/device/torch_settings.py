"""Settings of torch and Python for a run: TF32, caches of compiled kernels, garbage collection.

TF32 rounds the inputs of fp32 matrix products to 10 bits of mantissa, several times faster on GPUs.
Sums stay fp32, and so do weights and everything else. GPUs have it since 2020 (compute capability
8.0); it matters to runs in fp32, not to bf16 and fp16.

    use_tf32(ds_config.tf32, device)      # before anything is compiled

bf16 and fp16 are far slower than fp32 on CPUs without instructions for them; a line says so.

What torch.compile and Triton compiled is kept for the next start: torch's own folder is in /tmp,
which job schedulers empty. Here it is below the user's cache folder, one for each host: processes
of a host share it (torch writes under temporary names and renames), and hosts that share a home
directory never wait for each other's locks. What the user has set in TORCHINDUCTOR_CACHE_DIR or
TRITON_CACHE_DIR stays.

Python's cyclic garbage collector runs at chosen steps only. By itself it runs whenever enough
objects were made: on each process at another moment, while all the others wait, and over every
object of torch and of the corpus. A training step leaves hardly any cycles behind (a test holds
it), so collecting every 50 steps, on all processes in the same one, costs no memory. Only what was
made since is searched; all of torch and of the corpus once in 1,000 steps.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from palm_ds.common.files import cache_folder
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


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TOO_SLOW = 2.0
"""Times the seconds of fp32."""


def describe_slow_precision(precision: str, device: torch.device) -> str:
    """A line for the log if this CPU multiplies matrices far slower in this precision than in fp32;
    else empty. Without instructions for it torch takes up to a hundred times as long, and a run
    seems to hang. It is measured, since each architecture has another name for these instructions.
    """
    if device.type != "cpu" or precision == "fp32":
        return ""
    factor = _matmul_seconds(DTYPES[precision]) / _matmul_seconds(torch.float32)
    if factor < _TOO_SLOW:
        return ""
    return (
        f"{precision}: this CPU lacks the instructions and multiplies matrices {factor:.0f} times "
        "slower than in fp32; use fp32"
    )


def _matmul_seconds(dtype: torch.dtype) -> float:
    """The fastest of a few products of small matrices, each 15 ms where they are slow."""
    rows, weights = torch.ones(128, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(rows, weights)
        times.append(time.perf_counter() - start)
    return min(times)


TORCH, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def use_compile_cache() -> Path | None:
    """Set the folders for this process and those it starts; they are made when something is
    compiled. Returns torch's; None if the user's cache cannot be written to, so that torch uses its
    own."""
    if TORCH in os.environ:
        return Path(os.environ[TORCH])
    folder = cache_folder() / "compile" / socket.gethostname()
    if not os.access(_nearest(folder), os.W_OK):
        return None
    os.environ[TORCH] = str(folder)
    os.environ.setdefault(TRITON, str(folder / "triton"))
    return folder


def _nearest(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


_EVERY, _ALL = 50, 1000  # steps
_YOUNG, _OLD = 1, 2  # generations: what was made since the last collection, and everything


def collecting_between(steps: Iterable[int]) -> Iterator[int]:
    """The steps; cycles are collected before some of them and at no other time."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for step in steps:
            if step and step % _EVERY == 0:
                gc.collect(_YOUNG if step % _ALL else _OLD)
            yield step
    finally:
        if was_enabled:
            gc.enable()
