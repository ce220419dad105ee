"""Finds the launchers that started this process: their command lines, and whether they still run.

`deepspeed` and `torchrun` are parents of the processes they start. `deepspeed` is two processes, of
which the outer one forwards no signals. Launchers of another user or in another namespace cannot be
read and are ignored. mpirun ends its processes itself.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_DEEPSPEED = {"deepspeed", "deepspeed.pt", "deepspeed.launcher.launch", "deepspeed.launcher.runner"}
_AGENT = {"palm_ds.cli.run"}
_TORCH = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}


def deepspeed_launchers() -> list[psutil.Process]:
    """DeepSpeed's launchers among the parents of this process, nearest first."""
    return [parent for parent in psutil.Process().parents() if _is_one_of(parent, _DEEPSPEED)]


def launchers() -> list[psutil.Process]:
    """DeepSpeed's and torch's launchers and the agent of `palm-ds run` among the parents of this
    process, nearest first."""
    parents = psutil.Process().parents()
    return [parent for parent in parents if _is_one_of(parent, _DEEPSPEED | _TORCH | _AGENT)]


def option_of_deepspeed(name: str) -> str:
    """The value of `NAME=VALUE` on the command line of DeepSpeed's launcher, or ""."""
    for launcher in deepspeed_launchers():
        with contextlib.suppress(psutil.Error, OSError):
            for word in launcher.cmdline():
                if word.startswith(f"{name}="):
                    return word.partition("=")[2]
    return ""


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_one_of(process: psutil.Process, names: set[str]) -> bool:
    """Whether a process runs one of these programs or modules, directly or through Python."""
    try:
        line = process.cmdline()
    except (psutil.Error, OSError):
        return False
    return any(Path(word).name in names for word in line[:4])
