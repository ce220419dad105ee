from __future__ import annotations

import os

import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.processes.launch_env import (
    adapt_to_open_mpi,
    check_mpi_agrees,
    check_ranks_are_known,
    is_single_process,
    launched_processes,
    port_for_mpi,
    rank_of_launcher,
    ranks_of_srun,
    stated_processes,
    under_srun,
)

SRUN = {
    "SLURM_JOB_ID": "12005",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch):
    """Sets the variables of a launcher, and no others."""
    for name in list(os.environ):
        if name.startswith(
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_", "PMI", "MV2_", "SLURM_", "MASTER_")
        ):
            monkeypatch.delenv(name)

    def given(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return given


@pytest.mark.parametrize(
    ("variables", "processes"),
    [
        ({}, 1),
        ({"RANK": "0", "WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMI_SIZE": "3"}, 3),
        ({"MV2_COMM_WORLD_SIZE": "2"}, 2),
        ({"PMI_SIZE": "1"}, 1),
        (SRUN, 4),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, 1),  # srun --pty bash
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 1),  # in a batch script
        ({**SRUN, "RANK": "7", "WORLD_SIZE": "16"}, 16),  # deepspeed under srun
        ({**SRUN, "OMPI_COMM_WORLD_SIZE": "8"}, 8),  # mpirun, which starts daemons by srun
        ({**SRUN, "PMI_SIZE": "8", "PMI_RANK": "3"}, 8),
        ({**SRUN, "PMI_SIZE": "4", "PMI_RANK": "3"}, 4),  # srun --mpi=pmi2
    ],
)
def test_how_many_a_launcher_started(variables, processes, given) -> None:
    given(variables)
    assert launched_processes() == processes
    assert is_single_process() == (processes == 1)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[03-04]", "gpu03"),
        ("a,b", "a"),
        ("n7", "n7"),
        ("n[7,9]-ib", "n7-ib"),
        ("r1n[1-2],r2n1", "r1n1"),
        ("r[1-2]i[0,3]n[08-10],x", "r1i0n08"),
    ],
)
def test_srun_is_one_run(hosts, first, given) -> None:
    given({**SRUN, "SLURM_STEP_NODELIST": hosts})
    assert under_srun()
    assert ranks_of_srun() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": first,
        "MASTER_PORT": "20005",
    }


@pytest.mark.parametrize("name", ["PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"])
def test_processes_that_cannot_find_each_other_are_refused(name, given) -> None:
    given({name: "1"})
    with pytest.raises(UserError, match=f"^{name} is set, but nothing says how many processes"):
        check_ranks_are_known()
    given(TORCHRUN)
    check_ranks_are_known()


def test_one_task_of_srun_has_a_rank_of_pmix(given) -> None:
    """Where it is Slurm's default (`MpiDefault=pmix`), also in a shell by `srun --pty`."""
    given({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"})
    check_ranks_are_known()
    assert is_single_process()
    given({"PMIX_RANK": "1"})  # of another launcher in that task
    with pytest.raises(UserError, match="^PMIX_RANK is set, but nothing says"):
        check_ranks_are_known()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "2"}, "RANK=2, but WORLD_SIZE=2: ranks go from 0 to 1, each once"),
        ({"RANK": "first"}, "RANK=first: expected a whole number from 0 on"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: expected a whole number from 1 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: expected a whole number from 1 on"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x: expected a whole number from 0 on"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: expected a whole number from 1 to 65535"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK=x: expected a whole number from 0"),
        ({"WORLD_SIZE": None}, "RANK is set, but nothing says how many processes were started"),
        ({"WORLD_SIZE": "1", "RANK": "-1"}, "RANK=-1: expected a whole number from 0 on"),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "x"}, "LOCAL_RANK=x: expected a whole"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE=2, but MASTER_ADDR is not set: .* train alone"),
        ({"RANK": None}, "WORLD_SIZE=2, but RANK is not set: .* train alone"),
    ],
)
def test_variables_that_a_launcher_never_sets_are_refused(
    changes, said, given, monkeypatch
) -> None:
    given({k: v for k, v in (TORCHRUN | changes).items() if v is not None})
    with pytest.raises(UserError, match=said):
        check_ranks_are_known()


def test_one_process_needs_no_address(given) -> None:
    given({"RANK": "0", "WORLD_SIZE": "1"})
    check_ranks_are_known()
    assert is_single_process()


def test_mpi4py_of_another_mpi_is_refused(given) -> None:
    given({"PMI_SIZE": "2", "RANK": "0", "WORLD_SIZE": "1"})
    with pytest.raises(UserError, match="PMI_SIZE=2, but mpi4py sees 1"):
        check_mpi_agrees(2)
    check_mpi_agrees(1)


def test_mpirun_without_mpi4py_is_an_error(given, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given({"PMI_SIZE": "2"})
    with pytest.raises(UserError, match="mpirun: needs mpi4py"):
        check_ranks_are_known()
    given(TORCHRUN)
    check_ranks_are_known()


def test_under_open_mpi_mpi4py_loads_open_mpi(given, monkeypatch) -> None:
    for name in ("MPI4PY_MPIABI", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    given({"PMI_SIZE": "2"})
    adapt_to_open_mpi()
    assert "MPI4PY_MPIABI" not in os.environ
    given({"OMPI_COMM_WORLD_SIZE": "2"})
    adapt_to_open_mpi()
    assert os.environ["MPI4PY_MPIABI"] == "openmpi"
    assert os.environ["TTY_COMPATIBLE"] == "0"


def test_a_rank_that_makes_no_sense_is_none(given) -> None:
    """As when an error is printed, which must not end in another one."""
    for variables in (
        {"SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "y"},
        {"RANK": "a", "WORLD_SIZE": "2"},
        {"RANK": "7", "WORLD_SIZE": "2"},
    ):
        given(variables)
        assert rank_of_launcher() == 0


def test_numbers_beside_a_launcher(given) -> None:
    given({})
    assert (stated_processes(), port_for_mpi()) == (1, 29500)
    given({"WORLD_SIZE": "8 nodes", "MASTER_PORT": "one"})
    with pytest.raises(UserError, match="WORLD_SIZE=8 nodes: expected a whole number from 1 on"):
        stated_processes()
    with pytest.raises(UserError, match="MASTER_PORT=one: expected a whole number from 1 to 65535"):
        port_for_mpi()
