from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.processes.launch_env import (
    adapt_to_open_mpi,
    check_mpi_agrees,
    check_ranks_are_known,
    has_ended,
    hostfile_of,
    is_single_process,
    launched_processes,
    rank_of_launcher,
    ranks_of_srun,
    under_srun,
)
from tests.helpers.launchers import environment

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


PARENT = '''
import subprocess, sys
code = """from palm_ds.runtime.processes.launch_env import *
print(len(deepspeed_launchers()), len(launchers()))"""
sys.exit(subprocess.call([sys.executable, "-c", code]))
'''


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        (["deepspeed", "--num_gpus", "2"], "1 1"),
        (["-u", "deepspeed.launcher.launch"], "1 1"),
        (["torchrun"], "0 1"),
        (["run_deepspeed.py"], "0 0"),
        (["train.py", "--deepspeed_config", "torchrun.json", "deepspeed"], "0 0"),
    ],
)
def test_launchers_among_the_parents(line: list[str], counts: str, tmp_path: Path) -> None:
    for word in line:
        (tmp_path / word).write_text(PARENT)
    command = [sys.executable, *line]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[0] == counts, done.stderr


def test_a_killed_process_has_ended_before_anybody_waits_for_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        seen = psutil.Process(process.pid)
        assert not has_ended(seen)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # left as it is: a zombie
        assert has_ended(seen)
    assert has_ended(seen)


# ---- a mistyped --hostfile is refused instead of a run on one machine ----

LAUNCHER = """
import subprocess, sys
code = "from palm_ds.runtime.processes import launch_env as x; x.check_hostfile(); print('trains')"
child = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
sys.exit(subprocess.call([sys.executable, "-c", child, code]))
"""
"""As `deepspeed` does, it starts a program that starts the run."""


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("deepspeed --hostfile hosts train.py", "hosts"),
        ("deepspeed --hostfile=hosts train.py", "hosts"),
        ("deepspeed --num_gpus 2 -H hosts train.py", "hosts"),
        ("deepspeed -Hhosts train.py", "hosts"),
        ("deepspeed --hostf hosts train.py", "hosts"),
        ("deepspeed --num_gpus 2 train.py --held_out", None),
        ("deepspeed --help", None),
        ("deepspeed train.py --hostfile", ""),
    ],
)
def test_the_hostfile_of_a_command_line(line: str, name: str | None) -> None:
    assert hostfile_of(line.split()) == name


@pytest.mark.parametrize(
    ("options", "refused"),
    [(("--hostfile", "hosts"), False), (("--hostfile", "hsots"), True), ((), False)],
)
def test_a_run_checks_the_command_line_of_its_launcher(
    options: tuple[str, ...], refused: bool, tmp_path: Path
) -> None:
    """Names are relative to the launcher's folder."""
    (tmp_path / "deepspeed").write_text(LAUNCHER)
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    command = [sys.executable, "deepspeed", *options, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout == "trains\n") is not refused
    assert ("--hostfile hsots: no such file" in done.stderr) is refused


@pytest.mark.distributed
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(("launch/pretrain.py",), marks=pytest.mark.exhaustive),
        ("--module", "palm_ds.cli.predict"),
    ],
)
def test_under_the_real_launcher(target: tuple[str, ...], root: Path, tmp_path: Path) -> None:
    module = "palm_ds.cli.predict" in target
    arguments = ["run", "--input", "a", "--output", str(tmp_path / "o")] if module else ["x.yaml"]
    arguments += [] if module else ["--deepspeed_config", "ds_configs/cpu.json"]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "nowhere"]
    done = subprocess.run(
        [*launcher, "--num_gpus", "1", *target, *arguments],
        cwd=root,
        env=environment(tmp_path, "hostfile"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "error: --hostfile nowhere: no such file; deepspeed would train on this" in done.stderr
