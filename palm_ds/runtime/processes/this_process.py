"""Identity of this process for other processes: host, kernel, start, command line."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

import psutil

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
    not touch. 0 if it has ended (also while its parent has not noticed)."""
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return 0
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])
    except (psutil.Error, OSError, IndexError, ValueError):
        return 0


def command_line() -> str:
    """The command line of this process, shortened."""
    text = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return text if len(text) <= _MAX_COMMAND_LENGTH else f"{text[:_MAX_COMMAND_LENGTH]} ..."
