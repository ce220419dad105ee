"""The processes of a run: joining them, small messages between them, leaving, and a watchdog.

The same program runs under `deepspeed`, `torchrun`, `mpirun` (with mpi4py) and alone; only this
module and the launch scripts look at the environment.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from palm_ds.common.errors import UserError
from palm_ds.common.messages import only_warnings
from palm_ds.runtime.ds_config import DSConfig
from palm_ds.runtime.ds_config_check import quieten

WATCHDOG_EXIT = 42


def accelerator() -> Any:
    """DeepSpeed's view of the device: cpu, cuda, ..."""
    quieten()
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


class Processes:
    """Who is in the run: `rank` of `world`, and the device this process computes on."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device(accelerator().device_name(self.local_rank))
        # Small host-side messages go over gloo, so that they never wait for the device.
        self._host_group: Any = (
            None if self.device.type == "cpu" else dist.new_group(backend="gloo")
        )

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value (anything that pickles), by rank, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Element-wise sums over all processes."""
        if self.world == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, group=self._host_group)
        return tensor.tolist()

    def sum_scalars(self, values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Sums of scalars over all processes, on the device, in float64."""
        stacked = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values.values()]
        )
        if self.world > 1:
            dist.all_reduce(stacked)
        return dict(zip(values, stacked.tolist(), strict=True))

    def barrier(self) -> None:
        dist.barrier(group=self._host_group)


def start(ds_config: DSConfig) -> Processes:
    """Join the processes of the run. May be called again; only the first call acts."""
    quieten()
    import deepspeed

    if not dist.is_initialized():
        _choose_cpu_collectives(ds_config)
        timeout = timedelta(minutes=ds_config.timeout_minutes)
        _set_timeouts(timeout)
        if is_single_process():
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed looks there
            _set_device()
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # no port
            dist.init_process_group(_backend(), store=store, rank=0, world_size=1, timeout=timeout)
        else:
            _check_mpi()
            deepspeed.init_distributed(timeout=timeout, verbose=False)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    processes = Processes()
    if processes.rank > 0:
        only_warnings()
    return processes


def stop() -> None:
    """Leave the run in good order; `start` may join anew. Without it DeepSpeed's stage 3 sometimes
    aborts at exit."""
    if dist.is_initialized():
        dist.barrier()
        _forget()


def leave_at_exit() -> None:
    """When this interpreter ends, leave without waiting for the others. May be called again."""
    atexit.unregister(_forget)
    atexit.register(_forget)


def _forget() -> None:
    """DeepSpeed's own way to leave: it keeps groups of its own, and would use them again."""
    import deepspeed.comm

    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process at once, when everything is written. Threads that DeepSpeed and the process
    groups leave behind now and then abort an interpreter that shuts down in the usual way, and a
    run that is done would count as failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_single_process() -> bool:
    """No launcher told us of others: one process."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return not launched and int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) == 1


def _check_mpi() -> None:
    """Under mpirun, DeepSpeed learns ranks through mpi4py."""
    if "RANK" not in os.environ and importlib.util.find_spec("mpi4py") is None:
        raise UserError("under mpirun mpi4py is needed to find the other processes: install it")


def _backend() -> str:
    return accelerator().communication_backend_name()


def _set_device() -> None:
    if accelerator().device_name() != "cpu":
        accelerator().set_device(0)


def _choose_cpu_collectives(ds_config: DSConfig) -> None:
    """DeepSpeed compiles a shared-memory all-reduce on CPU at start: it needs a compiler, leaves
    138 MB in /dev/shm a run, and a lock that stops later runs when killed. Off unless asked for."""
    import deepspeed.ops

    if accelerator().device_name() == "cpu" and not ds_config.comms.shm_all_reduce:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _set_timeouts(timeout: timedelta) -> None:
    """DeepSpeed makes groups without passing the timeout on, so it must be torch's default."""
    from torch.distributed import constants, distributed_c10d

    for module in (constants, distributed_c10d):
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            if getattr(module, name, None) is not None:
                setattr(module, name, timeout)


def check_precision(ds_config: DSConfig, device: torch.device) -> None:
    """Raises UserError if this accelerator cannot train in the precision asked for."""
    able = {
        "fp32": lambda: True,
        "bf16": accelerator().is_bf16_supported,
        "fp16": accelerator().is_fp16_supported,
    }
    if not able[ds_config.precision]():
        others = [name for name in ("bf16", "fp32") if able[name]()]
        raise UserError(
            f"{ds_config.path}: {ds_config.precision}: this machine ({device.type}) cannot train "
            f"in it; use {' or '.join(others)}"
        )


class Watchdog:
    """Ends the process when nothing has happened for too long, as when another one hangs: a
    launcher can then start the run again. `seconds` 0: never."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._last = time.monotonic()
        self._closed = threading.Event()
        if seconds > 0:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def beat(self) -> None:
        self._last = time.monotonic()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(self._seconds / 10, 5.0)):
            if time.monotonic() - self._last > self._seconds:
                print(  # not logged: the thread that hangs may hold the logger's lock
                    f"error: no step for {self._seconds / 60:g} minutes; giving up "
                    f"(exit code {WATCHDOG_EXIT})",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(WATCHDOG_EXIT)
