"""Which processes a launcher has started, from the environment variables that it sets.

    RANK, WORLD_SIZE            deepspeed, torchrun, or your own script
    OMPI_..., PMI_..., MV2_...  the mpirun of Open MPI, MPICH, Intel and MVAPICH; the ranks come
                                from mpi4py
    SLURM_...                   srun with several tasks

Processes that a launcher has started but that cannot find each other are refused: each would train
a run of its own in the same folder.
"""

from __future__ import annotations

import importlib.util
import os
import re

from palm_ds.common.errors import UserError

_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_PORTS = 20_000, 12_000
"""The first port and how many: below those that the system gives to connections."""


def is_single_process() -> bool:
    """Whether no launcher has set up other processes."""
    return not _has_ranks() and launched_processes() == 1


def launched_processes() -> int:
    """The number of processes according to the launcher's environment variables; 1 without one."""
    if _has_ranks():
        return int(os.environ["WORLD_SIZE"])
    if under_srun():
        return int(os.environ["SLURM_STEP_NUM_TASKS"])
    return next((int(os.environ[name]) for name in _SIZES if name in os.environ), 1)


def check_ranks_are_known() -> None:
    """Raises UserError if the processes of a launcher cannot find each other."""
    if _has_ranks() or under_srun():
        return
    known = any(name in os.environ for name in _SIZES)
    rank = next((name for name in _RANKS if name in os.environ), "")
    if rank and not known:
        raise UserError(
            f"{rank} is set, but nothing says how many processes were started; use torchrun or "
            "deepspeed, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    if launched_processes() > 1 and importlib.util.find_spec("mpi4py") is None:
        raise UserError("mpirun: needs mpi4py to find the other processes; install it")


def adapt_to_open_mpi() -> None:
    """Under Open MPI's mpirun, let mpi4py load Open MPI's library, whatever other MPI is installed,
    and take the terminal that mpirun gives every process for what it is: a pipe."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
        os.environ.setdefault("TTY_COMPATIBLE", "0")  # rich


def under_srun() -> bool:
    """Whether Slurm itself started several tasks, not a launcher or mpirun that it started."""
    get = os.environ.get
    if _has_ranks() or "SLURM_PROCID" not in os.environ or int(get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return False
    mpirun = "OMPI_COMM_WORLD_SIZE" in os.environ or "MV2_COMM_WORLD_SIZE" in os.environ
    same = (get("PMI_RANK"), get("PMI_SIZE")) == (get("SLURM_PROCID"), get("SLURM_STEP_NUM_TASKS"))
    return not mpirun and ("PMI_SIZE" not in os.environ or same)


def ranks_of_srun() -> dict[str, str]:
    """The variables of torchrun, from those of srun."""
    get = os.environ.get
    first, count = _PORTS
    number = int(get("SLURM_JOB_ID", 0)) + 97 * int(get("SLURM_STEP_ID", 0))
    return {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": get("MASTER_ADDR") or _first_host(get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": get("MASTER_PORT") or str(first + number % count),
    }


def _first_host(hosts: str) -> str:
    """Of a list as Slurm writes it: `gpu[03-05,9]` begins with gpu03."""
    found = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", hosts)
    assert found is not None, hosts
    return "".join(part or "" for part in found.groups())


def _has_ranks() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
