"""The launchers among the parents of this process, and what tells a process from all others.

The launchers themselves are found among the parent processes. `deepspeed` and `torchrun` are
parents of the processes they start. `deepspeed` is two processes, of which the outer one forwards
no signals. Launchers of another user or in another namespace cannot be read and are ignored. mpirun
ends its processes itself.
"""

from __future__ import annotations

import base64
import contextlib
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from palm_ds.common.errors import UserError

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


def host_of(rank: int) -> str:
    """The host that DeepSpeed's launcher has for a rank; "" if it is unknown."""
    slots = json.loads(base64.urlsafe_b64decode(_option_of_deepspeed("--world_info")) or "{}")
    hosts = [host for host, used in slots.items() for _ in used]
    return hosts[rank] if rank < len(hosts) else ""


def _option_of_deepspeed(name: str) -> str:
    """The value of `NAME=VALUE` on the command line of DeepSpeed's launcher, or ""."""
    for launcher in deepspeed_launchers():
        with contextlib.suppress(psutil.Error, OSError):
            for word in launcher.cmdline():
                if word.startswith(f"{name}="):
                    return word.partition("=")[2]
    return ""


def check_hostfile() -> None:
    """Raises UserError if DeepSpeed's launcher was given a hostfile that does not exist: it trains
    on this machine alone then, after a warning in its log, and tells its processes nothing of it.
    If its command line cannot be read, nothing is checked."""
    for launcher in deepspeed_launchers():
        try:
            line, folder = launcher.cmdline(), Path(launcher.cwd())
        except (psutil.Error, OSError):
            continue
        name = hostfile_of(line)
        if name and not (folder / name).is_file():
            raise UserError(
                f"--hostfile {name}: no such file; deepspeed would train on this machine alone. "
                "Correct the name, or leave out --hostfile"
            )


def hostfile_of(line: Sequence[str]) -> str | None:
    """The value of `deepspeed`'s --hostfile, -H or an abbreviation."""
    for word, following in zip(line, [*line[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if len(option) > 3 and "--hostfile".startswith(option):
            return value if equals else following
        if word.startswith("-H"):
            return word[2:].removeprefix("=") or following
    return None


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


_MAX_COMMAND_LENGTH = 200


def host_name() -> str:
    return platform.node() or "an unnamed host"


def host_identity() -> str:
    """Equal for two processes that see each other's process numbers: the same start of the same
    kernel, and the same namespace of process numbers. Empty if the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since the machine did, which changes of the clock do
    not touch (without /proc: in seconds). 0 if it has ended, also while its parent has not noticed.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return 0
        if not psutil.LINUX:
            return int(process.create_time())
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])
    except (psutil.Error, OSError, IndexError, ValueError):
        return 0


def command_line() -> str:
    """The command line of this process, shortened."""
    text = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return text if len(text) <= _MAX_COMMAND_LENGTH else f"{text[:_MAX_COMMAND_LENGTH]} ..."
