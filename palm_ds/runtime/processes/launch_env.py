"""Rank, number of processes and address, as launchers say them in the environment.

    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
                                deepspeed, torchrun, or your own script
    OMPI_..., PMI_..., MV2_...  the mpirun of Open MPI, MPICH, Intel and MVAPICH; the ranks come
                                from mpi4py
    SLURM_...                   srun with several tasks

Processes that a launcher has started but that cannot find each other are refused: each would train
a run of its own in the same folder.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass

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


def stated_processes() -> int:
    """WORLD_SIZE, also without a launcher; 1 if it is not set. Raises UserError."""
    return _number("WORLD_SIZE", least=1, default=1)


def port_for_mpi() -> int:
    """Where rank 0 listens; mpirun chooses none. Raises UserError."""
    return _number("MASTER_PORT", least=1, most=65535, default=29500)


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
    if rank and not known and not _is_only_task(rank):
        raise UserError(
            f"{rank} is set, but nothing says how many processes were started; use torchrun or "
            "deepspeed, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    if not known and stated_processes() > 1:
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


def _is_only_task(rank: str) -> bool:
    """Whether a rank is that of the one task of srun, which sets PMIX_RANK (`--mpi=pmix`) and no
    size."""
    get = os.environ.get
    return get("SLURM_STEP_NUM_TASKS") == "1" and get("SLURM_PROCID") == os.environ[rank]


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
    """Of a list as Slurm writes it: `gpu[03-05,9]` begins with gpu03, `r[1-2]n[0,4]` with r1n0."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\]?)*", hosts)
    assert match is not None, hosts
    return re.sub(r"\[([^\],-]*)[^\]]*\]?", r"\1", match[0])


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
