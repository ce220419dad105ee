"""Command lines of the real launchers, and everything that a started command left running."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.warm_python import free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
ABSENT = ROOT / "tests" / "helpers" / "absent"
"""Packages that launchers would import for nothing."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--log-dir", os.devnull]
"""Without a folder of logs, which would stay in the system's folder of temporary files."""
MARK = "PALM_TEST_RUN"
"""Inherited by every process of a command; its value tells the commands apart."""


def deepspeed(processes: int, *options: str) -> list[str]:
    local = ["--num_gpus", str(processes), "--master_port", str(free_port())]
    return [sys.executable, str(PROGRAMS / "deepspeed"), *local, *options]


def deepspeed_node(hostfile: Path, rank: int, port: int) -> list[str]:
    """One machine of a hostfile, as under Slurm."""
    place = ["--no_ssh", "--hostfile", str(hostfile), "--node_rank", str(rank)]
    master = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    return [sys.executable, str(PROGRAMS / "deepspeed"), *place, *master]


def torchrun(processes: int) -> list[str]:
    return [*TORCHRUN, f"--nproc_per_node={processes}", "--master_port", str(free_port())]


def mpirun(processes: int) -> list[str]:
    """mpirun, next to this Python or on the path; skips the test without it or mpi4py."""
    program = shutil.which("mpirun", path=f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")
    if program is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpirun and mpi4py here: pip install mpi4py mpich")
    return [program, "-n", str(processes), sys.executable]


def openmpi(processes: int) -> list[str]:
    """Open MPI's mpirun, whatever else is installed; skips the test without it or mpi4py."""
    program = shutil.which("mpirun.openmpi")
    if program is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpirun.openmpi and mpi4py here: apt install openmpi-bin")
    options = ["--allow-run-as-root", "--oversubscribe", "-np", str(processes)]
    return [program, *options, sys.executable]


def environment(folder: Path, mark: str) -> dict[str, str]:
    """As few of the caller's variables as will do, so that a test does not depend on them."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "MASTER"))}
    return kept | {
        MARK: mark,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ABSENT}",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
    }


def marked(mark: str) -> Iterator[psutil.Process]:
    """The processes of a command that still run, orphans included."""
    for process in psutil.process_iter():
        try:
            found = process.environ().get(MARK) == mark and process.pid != os.getpid()
            if found and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.Error, OSError):
            continue


def clear_away(mark: str) -> None:
    """Kill all of them."""
    for process in marked(mark):
        try:
            process.kill()
            process.wait(10)
        except (psutil.Error, OSError):
            continue


def wait_until_gone(mark: str, seconds: float) -> list[str]:
    """The command lines of the processes that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    while left := list(marked(mark)):
        if time.monotonic() > deadline:
            return [" ".join(process.cmdline()) for process in left]
        time.sleep(0.1)
    return []
