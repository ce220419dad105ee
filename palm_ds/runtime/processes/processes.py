"""The processes of a run: joining, exchanging small messages, leaving.

The same program runs under `deepspeed`, `torchrun`, `mpirun` (with mpi4py), `srun` and as a single
process.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from palm_ds.common import errors
from palm_ds.common.errors import UserError, first_line
from palm_ds.common.messages import only_warnings
from palm_ds.runtime.deepspeed.deepspeed_import import import_deepspeed
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.runtime.device.torch_settings import use_compile_cache
from palm_ds.runtime.processes import launch_env, liveness, rank_status, rendezvous
from palm_ds.runtime.processes.launchers import host_name

T = TypeVar("T")
_RELEASE_SECONDS = 0.2  # seconds


def accelerator() -> Any:
    """DeepSpeed's accelerator: cpu, cuda, ..."""
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def device_named(name: str) -> torch.device:
    """The device with this name. Raises UserError if it does not exist or cannot be used."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        known = ", ".join(["cpu", *gpus])
        why = "not a device" if "device string" in str(error) else "cannot be used here"
        raise UserError(f"device: {name!r}: {why}; there are: {known}") from None
    return device


class StopRequestedError(Exception):
    """Work that can be done again is abandoned, on all processes: the run is to save and stop."""


class Processes:
    """The process group of the run: this `rank` of `world`, and its device."""

    def __init__(self) -> None:
        self._stop: Callable[[], bool] | None = None
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device(accelerator().device_name(self.local_rank))
        # Small CPU messages go over gloo, so they never wait for the device.
        group = None if self.device.type == "cpu" else dist.new_group(backend="gloo")
        assert not isinstance(group, int), "every rank is a member"
        self._host_group = group

    def gather(self, value: T) -> list[T]:
        """The values of all ranks (anything that pickles), in order, on every rank."""
        if self.world == 1:
            return [value]
        values = [value] * self.world
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

    def gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The rows (n, ...) of all ranks, in order, on every rank; n may differ."""
        counts = self.gather(len(rows))
        if self.world == 1:
            return [rows]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded)
        return [part[:count] for part, count in zip(gathered, counts, strict=True)]

    def barrier(self) -> None:
        dist.barrier(group=self._host_group)

    @contextmanager
    def abandons(self, stop: Callable[[], bool]) -> Iterator[None]:
        """A context for work that is abandoned once `stop()` on some process."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    def stop_requested(self, *, together: bool = True) -> bool:
        """Whether the work of the context is to be abandoned; always False outside `abandons`.
        `together`: on some process, which is collective; otherwise on this one."""
        if self._stop is None:
            return False
        return self.sum([self._stop()])[0] > 0 if together else self._stop()

    def check_stop(self) -> None:
        """Raises StopRequestedError on all processes if the work is to be abandoned. Collective."""
        if self.stop_requested():
            raise StopRequestedError

    def reached(self, step: int) -> None:
        """Tell the other processes and `palm-ds run` that `step` steps are completed."""
        liveness.reached(step)
        rank_status.report(self.rank, step=step)

    def resumed(self, step: int) -> None:
        """Tell them likewise that this process continues from the checkpoint of `step`."""
        liveness.reached(step)
        rank_status.report(self.rank, step=step, saved=step, resumed=step)

    def saved(self, step: int) -> None:
        """Tell `palm-ds run` that there is a checkpoint of `step`."""
        rank_status.report(self.rank, saved=step)


@contextmanager
def _network_errors() -> Iterator[None]:
    """Raises UserError if gloo, which even a process alone starts, has no interface to use."""
    try:
        yield
    except RuntimeError as error:
        if not any(f"Unable to find {x} for" in str(error) for x in ("address", "interface")):
            raise
        chosen = os.environ.get("GLOO_SOCKET_IFNAME")
        what = (
            f"GLOO_SOCKET_IFNAME={chosen}: no such network interface; correct or unset it"
            if chosen
            else f"{host_name()}: no network interface has the address of this name, nor "
            "127.0.0.1; turn on the loopback interface (`ip link set lo up`), or name another in "
            "GLOO_SOCKET_IFNAME"
        )
        raise UserError(what) from None


@_network_errors()
def start(ds_config: DSConfig) -> Processes:
    """Join the processes of the run. Later calls have no effect but return the same group."""
    import_deepspeed()
    import deepspeed

    meeting = None
    if not dist.is_initialized():
        _check_device()
        use_compile_cache()
        _choose_cpu_collectives(ds_config)
        timeout = timedelta(minutes=ds_config.timeout_minutes)
        _set_timeouts(timeout)
        launch_env.check_ranks_are_known()
        launch_env.adapt_to_open_mpi()
        if launch_env.is_single_process():
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
            _set_device()
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # no port
            hook = sys.excepthook
            dist.init_process_group(_backend(), store=store, rank=0, world_size=1, timeout=timeout)
            sys.excepthook = hook  # torch's puts [rank0] before every line of a traceback
        else:
            place = _place()
            rank_status.report(place.rank)
            seconds = ds_config.peer_seconds
            meeting = rendezvous.meet(place, peer_seconds=seconds, timeout=timeout)
            deepspeed.init_distributed(timeout=timeout, auto_mpi_discovery=False, verbose=False)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    processes = Processes()
    if meeting is not None:
        processes.barrier()
        meeting.close()
    elif processes.world > 1:  # the program has connected them itself
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        here = launch_env.LaunchedProcess(
            rank=processes.rank, world=processes.world, address=address, port=0
        )
        store = dist.distributed_c10d._get_default_store()
        liveness.start(here, ds_config.peer_seconds, store)
    rank_status.report(processes.rank)
    if processes.rank > 0:
        only_warnings()
    return processes


def _check_device() -> None:
    """Raises UserError if DS_ACCELERATOR, or a GPU of each process, is not here."""
    try:
        count, name = accelerator().device_count(), accelerator().device_name()
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"DS_ACCELERATOR: {first_line(error)}") from None
    local = os.environ.get("LOCAL_RANK", "0")
    if name != "cpu" and local.isdecimal() and int(local) >= count:
        raise UserError(
            f"this process needs {name}:{local}, but there {'is' if count == 1 else 'are'} {count} "
            f"here; start fewer processes, or set DS_ACCELERATOR=cpu"
        )


def _place() -> launch_env.LaunchedProcess:
    """This process among those of the run, whatever launcher started it. Raises UserError."""
    if launch_env.under_srun():
        os.environ |= launch_env.ranks_of_srun()
        if accelerator().device_name() != "cpu" and accelerator().device_count() == 1:
            os.environ["LOCAL_RANK"] = "0"  # --gpus-per-task 1: each task sees its own GPU alone
    elif not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        _find_mpi_ranks()
    _check_device()
    return launch_env.place()


def crowded_hosts(processes: Processes) -> list[str]:
    """A line for each host whose processes outnumber the cores that they may use: launchers and
    batch systems bind them. Collective."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    hosts = processes.gather((host_name(), cores))
    lines = []
    for host in dict.fromkeys(host for host, _ in hosts):
        each = [used for name, used in hosts if name == host]
        shared = set[int]().union(*each)
        if 0 < len(shared) < len(each):
            cores_word = "core" if len(shared) == 1 else "cores"
            lines.append(
                f"{host}: its {len(each)} processes may use {len(shared)} {cores_word} only: ask "
                "the batch system for more (Slurm: --exclusive, --cpus-per-task), or bind less"
            )
    return lines


def stop() -> None:
    """Leave the run cleanly; `start` can join again. Without it, DeepSpeed's stage 3 sometimes
    aborts at exit."""
    if dist.is_initialized():
        device = [accelerator().current_device()] if dist.get_backend() == "nccl" else None
        dist.barrier(device_ids=device)  # NCCL warns if it has to guess the device
        liveness.end(errors.FINISHED)
        _forget()


def leave_at_exit() -> None:
    """Leave when the interpreter exits, without waiting for the others, with the program's own
    exit code. Can be called repeatedly."""
    atexit.unregister(_forget)
    atexit.register(_forget)


def _forget() -> None:
    """Destroy the groups through DeepSpeed, which would otherwise reuse its own cached ones."""
    import deepspeed.comm

    if dist.is_initialized():
        several = dist.get_world_size() > 1
        deepspeed.comm.destroy_process_group()
        # or DeepSpeed asks it for a rank when it next reads a file: with `python -O` an error
        deepspeed.comm.comm.cdb = None
        if several:
            end_without_destructors()


def end_without_destructors() -> None:
    """End the process as soon as Python is done, with the same exit code but without C++'s static
    destructors: once in about 50 times they abort a finished process of several, and the launcher
    counts its run as failed. So does a thread of gloo that lets go of a tensor, some time after it
    was reduced, while Python ends: it gets a moment before. Without glibc there is no more."""
    time.sleep(_RELEASE_SECONDS)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.fflush(None)
        libc.on_exit(libc._exit, None)  # called with the exit code


def leave(code: int) -> NoReturn:
    """End this process immediately; everything must be written. Remaining threads of DeepSpeed and
    the process groups occasionally abort a regular interpreter shutdown, and a finished run would
    count as failed."""
    liveness.end(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _find_mpi_ranks() -> None:
    """Set torchrun's variables from MPI. MPI is ended again: it is only used to find the ranks, and
    each killed run would leave a file of MPICH in /dev/shm. Raises UserError."""
    from deepspeed.comm.comm import mpi_discovery

    used_before = "mpi4py.MPI" in sys.modules
    expected = launch_env.launched_processes()
    port = launch_env.port_for_mpi()
    try:
        mpi_discovery(distributed_port=port, verbose=False)
    except (ImportError, RuntimeError) as error:
        why = first_line(error)
        raise UserError(
            f"mpirun: mpi4py cannot load MPI's library ({why}); install this mpirun's libmpi.so, "
            "or use torchrun or deepspeed"
        ) from None
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and not used_before:
        mpi.Finalize()
    launch_env.check_mpi_agrees(expected)


def _backend() -> str:
    return accelerator().communication_backend_name()


def _set_device() -> None:
    if accelerator().device_name() != "cpu":
        accelerator().set_device(0)


def _choose_cpu_collectives(ds_config: DSConfig) -> None:
    """Disable DeepSpeed's shared-memory all-reduce on CPU unless requested. Its compilation at
    start needs a compiler; it leaves 138 MB in /dev/shm per run and, if killed, a lock that blocks
    later runs. DeepSpeed is not even asked whether it could compile it: that would try every
    operator it has, with a compiler, for a fifth of a second."""
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # its parent's `torch` is torch
    if accelerator().device_name() == "cpu" and not ds_config.comms.shm_all_reduce:
        backend.build_shm_op = lambda: None


def _set_timeouts(timeout: timedelta) -> None:
    """Change torch's default timeout, since DeepSpeed creates groups without passing one."""
    from torch.distributed import constants, distributed_c10d

    for module in (constants, distributed_c10d):
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            if getattr(module, name, None) is not None:
                setattr(module, name, timeout)


def check_supported(ds_config: DSConfig, device: torch.device) -> None:
    """Raises UserError if this accelerator cannot do what the DeepSpeed file asks for."""
    supported = {
        "fp32": lambda: True,
        "bf16": accelerator().is_bf16_supported,
        "fp16": accelerator().is_fp16_supported,
    }
    if not supported[ds_config.precision]():
        alternatives = [name for name in ("bf16", "fp32") if supported[name]()]
        raise UserError(
            f"{ds_config.path}: {ds_config.precision}: this machine ({device.type}) cannot train "
            f"in it; use {' or '.join(alternatives)}"
        )
    if device.type == "cpu" and ds_config.for_gpus:
        key = f"zero_optimization.{ds_config.for_gpus[0]}"
        raise UserError(f"{ds_config.path}: {key}: needs a GPU; remove it")
