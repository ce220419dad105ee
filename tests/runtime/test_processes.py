from __future__ import annotations

import subprocess
import sys

import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.processes import (
    _check_mpi,
    device_named,
    is_single_process,
    launched_processes,
)
from tests.helpers import warm_python


def run(code: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run(["-c", code], timeout=60)


@pytest.mark.parametrize(
    ("name", "why"), [("tpu", "not a device"), ("cuda:99", "cannot be used here")]
)
def test_a_device_that_is_not_there_is_one_line(name: str, why: str) -> None:
    assert device_named("cpu").type == "cpu"
    with pytest.raises(UserError, match=f"device: '{name}': {why}.*; there are: cpu") as caught:
        device_named(name)
    assert "\n" not in str(caught.value)


def test_one_process_alone_is_quiet() -> None:
    code = (
        "from palm_ds.runtime.ds_config import make_ds_config\n"
        "from palm_ds.runtime.processes import start, stop\n"
        "first, second = start(make_ds_config({})), start(make_ds_config({}))\n"
        "assert (first.rank, second.world) == (0, 1)\n"
        "assert (first.gather('x'), first.sum([3])) == (['x'], [3])\n"
        "first.barrier(); stop(); stop()"
    )
    command = [sys.executable, "-c", code]  # a cold start: what is imported is quiet too
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_mpirun_without_mpi4py_is_an_error(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="mpirun: needs mpi4py"):
        _check_mpi()
    monkeypatch.setenv("RANK", "0")
    _check_mpi()


@pytest.mark.parametrize(
    ("variables", "processes"),
    [
        ({}, 1),
        ({"RANK": "0", "WORLD_SIZE": "4"}, 4),
        ({"WORLD_SIZE": "4"}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMI_SIZE": "3"}, 3),
        ({"MV2_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMI_SIZE": "1"}, 1),
    ],
)
def test_how_many_a_launcher_started(variables, processes, monkeypatch) -> None:
    """MPICH's and Intel's mpirun set other variables than Open MPI's."""
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_processes() == processes
    assert is_single_process() == (processes == 1)
