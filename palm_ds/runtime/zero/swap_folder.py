"""The folder in which ZeRO 3 keeps this process's optimizer state between steps
(`offload_optimizer.device: nvme`), and whether this machine can do that.

    NVME_PATH/palm_ds_0f3a...         DeepSpeed's files
    NVME_PATH/palm_ds_0f3a....lock    locked while the process lives

They hold nothing that a checkpoint does not: they are deleted when the engine is released, those of
a killed process at the next start. Every engine has its own, so that runs can share a disk.
"""

from __future__ import annotations

import atexit
import copy
import errno
import logging
import os
import resource
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.common.files import check_locks, try_lock
from palm_ds.common.messages import byte_size
from palm_ds.runtime.deepspeed.deepspeed_import import import_deepspeed
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.runtime.deepspeed.ds_config_check import reason
from palm_ds.runtime.processes.launchers import host_name
from palm_ds.runtime.processes.processes import Processes

_BYTES = 12
"""Of each parameter in files: weight and two moments in fp32."""
_CAP_IPC_LOCK = 14
_OFFLOAD = "zero_optimization.offload_optimizer"
log = logging.getLogger(__name__)


class SwapFolder:
    """This process's folder; without a `folder`, nothing."""

    def __init__(self, folder: Path | None = None, lock: int = -1):
        self._folder, self._lock, self._owner = folder, lock, os.getpid()
        if folder is not None:
            atexit.register(self.remove)

    @classmethod
    def claim(cls, ds_config: DSConfig, model: nn.Module, processes: Processes) -> SwapFolder:
        """A new folder, if `ds_config` needs one. Raises UserError on all processes if one of them
        cannot have it. Collective."""
        if ds_config.swap_path is None:
            return cls()
        check_swap_room(ds_config, model, processes)
        return cls(*_claim(ds_config.swap_path))

    def in_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """DeepSpeed's configuration with this folder as the place for its files."""
        config = copy.deepcopy(dict(config))
        if self._folder is not None:
            config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(self._folder)
        return config

    def remove(self) -> None:
        """Delete the folder. May be called twice."""
        atexit.unregister(self.remove)
        if self._folder is not None and self._owner == os.getpid():
            _delete(self._folder)
            os.close(self._lock)
            self._folder = None


def prepare_swapping(ds_config: DSConfig) -> None:
    """Raises UserError unless this machine can keep optimizer state in files as `ds_config` asks.
    Compiles DeepSpeed's async_io the first time; deletes what killed processes left."""
    if ds_config.swap_path is None:
        return
    _check_folder(ds_config.swap_path, f"{ds_config.path}: {_OFFLOAD}.nvme_path")
    _check_async_io(f"{ds_config.path}: {_OFFLOAD}.device")
    delete_abandoned(ds_config.swap_path)


def check_swap_room(ds_config: DSConfig, model: nn.Module, processes: Processes) -> None:
    """Raises UserError, on all processes, if a disk has too little room for the files, or a host
    allows too little locked memory for reading them. Collective."""
    if ds_config.swap_path is None:
        return
    hosts = processes.gather(host_name())
    values = sum(p.numel() for p in model.parameters() if p.requires_grad) / processes.world
    needed = swap_bytes(values) * hosts.count(host_name())
    problems = processes.gather(_problem(ds_config, values, needed))
    if problem := next(filter(None, problems), ""):
        raise UserError(f"{ds_config.path}: {_OFFLOAD}{problem}")


def describe_swapping(ds_config: DSConfig) -> list[str]:
    """Describe what is different with optimizer state in files, for the log."""
    if ds_config.swap_path is None:
        return []
    return [
        f"optimizer state is in files under {ds_config.swap_path} between steps; training waits "
        "while checkpoints are written"
    ]


def swap_bytes(values: float) -> float:
    """Bytes that the files of `values` trained values take."""
    return _BYTES * values


def swap_buffer_bytes(ds_config: DSConfig, values: float) -> float:
    """The host memory through which a process with `values` trained values reads its files."""
    zero = ds_config.sections["zero_optimization"]
    count = zero["offload_optimizer"].get("buffer_count", 5)  # DeepSpeed's default
    return 4.0 * count * min(values, zero["sub_group_size"])


def _problem(ds_config: DSConfig, values: float, needed: float) -> str:
    """Reason why this host cannot keep optimizer state in files; empty if it can."""
    path = ds_config.swap_path
    assert path is not None
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return f".nvme_path: {path} on {host_name()}: {error.strerror}"
    if needed > free:
        return (
            f".nvme_path: {path} on {host_name()}: {os.strerror(errno.ENOSPC)}: {byte_size(free)} "
            f"free, but the optimizer state of its processes takes {byte_size(needed)}"
        )
    locked, allowed = swap_buffer_bytes(ds_config, values), _lockable_bytes()
    if locked > allowed:
        return (
            f".buffer_count: buffers of {byte_size(locked)} cannot be locked in the memory of "
            f"{host_name()}, which allows {byte_size(allowed)}; raise `ulimit -l`, or lower "
            "zero_optimization.sub_group_size"
        )
    return ""


def _lockable_bytes() -> float:
    """Bytes of memory that this process may lock (mlock)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = Path("/proc/self/status").read_text()
    capabilities = next(line for line in status.splitlines() if line.startswith("CapEff"))
    privileged = int(capabilities.split()[1], 16) >> _CAP_IPC_LOCK & 1
    return float("inf") if privileged or soft == resource.RLIM_INFINITY else soft


def _check_folder(path: Path, where: str) -> None:
    """Raises UserError unless files can be created here without the cache of the system, which
    DeepSpeed goes around."""
    if not path.is_dir():
        what = "not a folder" if path.exists() else "no such folder"
        raise UserError(f"{where}: {path}: {what}; name one on a local disk")
    probe = path / f"palm_ds_{secrets.token_hex(8)}.probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT))
    except OSError as error:
        raise UserError(f"{where}: {path}: cannot be written: {error.strerror}") from None
    try:
        check_locks(probe, where)  # they tell the folders of killed processes
        os.close(os.open(probe, os.O_WRONLY | os.O_DIRECT))
    except OSError:
        raise UserError(
            f"{where}: {path}: this file system has no direct I/O (O_DIRECT), which DeepSpeed "
            "needs; name a folder on a local disk"
        ) from None
    finally:
        probe.unlink(missing_ok=True)


def _check_async_io(where: str) -> None:
    import_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportAttributeAccessIssue]

    log.info("loading DeepSpeed's async_io; the first time it is compiled, which takes minutes")
    try:
        AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        raise UserError(
            f'{where}: "nvme" needs DeepSpeed\'s async_io, which cannot be built here '
            f"({reason(error)[:200]}); install libaio with its headers (libaio-dev), a C++ "
            'compiler and ninja, or use "cpu"'
        ) from None


def delete_abandoned(path: Path) -> None:
    """Delete the folders of processes that have ended without."""
    for file in path.glob("palm_ds_*.lock"):
        with suppress(OSError):
            lock = os.open(file, os.O_RDWR)
            if try_lock(lock):
                _delete(file.with_suffix(""))
            os.close(lock)


def _claim(path: Path) -> tuple[Path, int]:
    """A new folder, and the lock that says so."""
    while True:
        folder = path / f"palm_ds_{secrets.token_hex(8)}"
        file = _lock_file(folder)
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if try_lock(lock) and file.exists():  # not taken for abandoned between the two
            folder.mkdir()
            return folder, lock
        os.close(lock)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_file(folder).unlink(missing_ok=True)
