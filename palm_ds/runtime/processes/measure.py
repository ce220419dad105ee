"""Short measurements of the machines of a run: network, speed, clocks, a shared folder."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from palm_ds.runtime.processes.processes import Processes

_REPEATS = 3
_REDUCED_BYTES = 32 << 20
_SIDE, _PRODUCTS = 1024, 8
_SHARED_SECONDS = 10.0


def all_reduce_rate(processes: Processes) -> float:
    """Bytes per second of the network, per process, in the best of a few all-reduces (the bus
    bandwidth: what each process sends). Collective."""
    values = torch.ones(_REDUCED_BYTES // 4, device=processes.device)
    seconds = []
    for _ in range(_REPEATS):
        processes.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        values[0].item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    sent = 2 * (processes.world - 1) / processes.world * _REDUCED_BYTES
    return min(processes.gather(sent / min(seconds)))


def product_seconds(processes: Processes) -> list[float]:
    """Seconds that each process takes for some products of matrices, all together. Collective."""
    matrix = torch.ones(_SIDE, _SIDE, device=processes.device)
    product = torch.empty_like(matrix)
    seconds = []
    for _ in range(_REPEATS):
        processes.barrier()
        started = time.perf_counter()
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix, out=product)
        product[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return processes.gather(min(seconds))


def clocks(processes: Processes) -> list[float]:
    """Seconds by which the clock of each process is ahead of rank 0's. Collective."""
    processes.barrier()
    times = processes.gather(time.time())
    return [clock - times[0] for clock in times]


def sees_shared_folder(processes: Processes, folder: Path) -> list[bool]:
    """Whether each process sees a file that rank 0 has just written there. Collective."""
    name = processes.gather(f".shared.{secrets.token_hex(8)}")[0]
    with suppress(OSError):
        if processes.rank == 0:
            (folder / name).write_bytes(b"")
    processes.barrier()
    deadline = time.monotonic() + _SHARED_SECONDS  # a client of NFS may see it late
    while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    answers = processes.gather(seen)
    with suppress(OSError):
        if processes.rank == 0:
            (folder / name).unlink()
    return answers
