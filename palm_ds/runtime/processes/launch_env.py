"""This process and its launcher: rank and address from the environment, parents, identity.

    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
                                deepspeed, torchrun, or your own script
    OMPI_..., PMI_..., MV2_...  the mpirun of Open MPI, MPICH, Intel and MVAPICH; the ranks come
                                from mpi4py
    SLURM_...                   srun with several tasks

Processes that a launcher has started but that cannot find each other are refused: each would train
a run of its own in the same folder.

The launchers themselves are found among the parent processes. `deepspeed` and `torchrun` are
parents of the processes they start. `deepspeed` is two processes, of which the outer one forwards
no signals. Launchers of another user or in another namespace cannot be read and are ignored. mpirun
ends its processes itself.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from palm_ds.common.errors import UserError

_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_PORTS = 20_000, 12_000
"""The first port and how many: below those that the system gives to connections."""


@dataclass(frozen=True, kw_only=True)
class LaunchedProcess:
    """This process among those of its run, and where rank 0 is reached."""

    rank: int
    world: int
    address: str
    port: int

    def host_of(self, rank: int) -> str:
        """The host that DeepSpeed's launcher has for a rank; "" if it is unknown."""
        slots = json.loads(base64.urlsafe_b64decode(option_of_deepspeed("--world_info")) or "{}")
        hosts = [host for host, used in slots.items() for _ in used]
        return hosts[rank] if rank < len(hosts) else ""


def is_single_process() -> bool:
    """Whether no launcher has set up other processes."""
    return launched_processes() == 1


def launched_processes() -> int:
    """The number of processes according to the launcher's environment variables; 1 without one.
    Raises UserError."""
    if _has_ranks():
        return _number("WORLD_SIZE", least=1)
    if under_srun():
        return _number("SLURM_STEP_NUM_TASKS", least=1)
    return next((_number(name, least=1) for name in _SIZES if name in os.environ), 1)


def check_ranks_are_known() -> None:
    """Raises UserError if the processes of a launcher cannot find each other."""
    _number("LOCAL_RANK", default=0)  # DeepSpeed reads it wherever it is set
    if _has_ranks():
        if launched_processes() > 1:
            place()
        _number("RANK")
        _number("LOCAL_RANK", default=0)
        return
    if under_srun():
        return
    known = any(name in os.environ for name in _SIZES)
    rank = next((name for name in ("RANK", *_RANKS) if name in os.environ), "")
    if rank and not known:
        raise UserError(
            f"{rank} is set, but nothing says how many processes were started; use torchrun or "
            "deepspeed, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    if not known and _number("WORLD_SIZE", least=1, default=1) > 1:
        raise _incomplete(["RANK"])
    if launched_processes() > 1 and importlib.util.find_spec("mpi4py") is None:
        raise UserError("mpirun: needs mpi4py to find the other processes; install it")


def place() -> LaunchedProcess:
    """This process among those that a launcher has started. Raises UserError."""
    if missing := [name for name in ("RANK", "MASTER_ADDR") if not os.environ.get(name)]:
        raise _incomplete(missing)
    rank, world = _number("RANK"), _number("WORLD_SIZE", least=1)
    if rank >= world:
        raise UserError(
            f"RANK={rank}, but WORLD_SIZE={world}: ranks go from 0 to {world - 1}, each once"
        )
    port = _number("MASTER_PORT", least=1, most=65535)
    return LaunchedProcess(rank=rank, world=world, address=os.environ["MASTER_ADDR"], port=port)


def check_mpi_agrees(expected: int) -> None:
    """Raises UserError if mpi4py found another number of processes than mpirun says."""
    if (stated := _number("WORLD_SIZE")) != expected:
        name = next(name for name in _SIZES if name in os.environ)
        raise UserError(
            f"{name}={expected}, but mpi4py sees {stated}: it loads another MPI than this "
            "mpirun's; set MPI4PY_LIBMPI to the libmpi.so of this one, or use torchrun or deepspeed"
        )


def rank_of_launcher() -> int:
    """The rank of this process as far as the environment tells; 0 if it is alone or makes no
    sense."""
    try:
        ranks = ("SLURM_PROCID",) if under_srun() else ("RANK", *_RANKS)
        text = next((os.environ[name] for name in ranks if name in os.environ), "")
        return int(text) if text.isdecimal() and int(text) < launched_processes() else 0
    except UserError:
        return 0


def adapt_to_open_mpi() -> None:
    """Under Open MPI's mpirun, let mpi4py load Open MPI's library, whatever other MPI is installed,
    and take the terminal that mpirun gives every process for what it is: a pipe."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
        os.environ.setdefault("TTY_COMPATIBLE", "0")  # rich


def under_srun() -> bool:
    """Whether Slurm itself started several tasks, not a launcher or mpirun that it started."""
    get = os.environ.get
    if (
        _has_ranks()
        or "SLURM_PROCID" not in os.environ
        or _number("SLURM_STEP_NUM_TASKS", default=1) == 1
    ):
        return False
    mpirun = "OMPI_COMM_WORLD_SIZE" in os.environ or "MV2_COMM_WORLD_SIZE" in os.environ
    same = (get("PMI_RANK"), get("PMI_SIZE")) == (get("SLURM_PROCID"), get("SLURM_STEP_NUM_TASKS"))
    return not mpirun and ("PMI_SIZE" not in os.environ or same)


def ranks_of_srun() -> dict[str, str]:
    """The variables of torchrun, from those of srun."""
    get = os.environ.get
    first, count = _PORTS
    number = _number("SLURM_JOB_ID", default=0) + 97 * _number("SLURM_STEP_ID", default=0)
    return {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": get("MASTER_ADDR") or _first_host(get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": get("MASTER_PORT") or str(first + number % count),
    }


def _first_host(hosts: str) -> str:
    """Of a list as Slurm writes it: `gpu[03-05,9]` begins with gpu03."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", hosts)
    assert match is not None, hosts
    return "".join(part or "" for part in match.groups())


def _has_ranks() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _number(
    name: str, *, least: int = 0, most: float = math.inf, default: int | None = None
) -> int:
    """The value of an environment variable. Raises UserError."""
    text = os.environ.get(name, "" if default is None else str(default)).strip()
    if not text.isdecimal() or not least <= int(text) <= most:
        to = "on" if most == math.inf else f"to {most}"
        raise UserError(
            f"{name}={text}: expected a whole number from {least} {to}; launchers set it"
            if text
            else f"{name} is not set; launchers set it"
        )
    return int(text)


def _incomplete(missing: list[str]) -> UserError:
    return UserError(
        f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but {' and '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set: this process would train alone. Use "
        "torchrun or deepspeed, or set RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each"
    )


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
