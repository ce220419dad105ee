"""The files for Slurm, Kubernetes and ssh do what they promise; the schedulers are emulated."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from palm_ds.common import errors

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "srun": 'while [ "$1" != bash ]; do shift; done; SLURM_NODEID=0 "$@"',
    "scontrol": 'echo "$@" >> called; [ "$1" != show ] || printf "n1\\nn2\\n"',
    "sleep": "",
    "palm-ds": 'echo "$@" >> started; exit $(tail -n 1 codes; sed -i "\\$d" codes)',
}


def programs(folder: Path, codes: list[int]) -> dict[str, str]:
    """An environment in which `palm-ds` ends with these codes, one after another."""
    (folder / "codes").write_text("".join(f"{code}\n" for code in reversed(codes)))
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("codes", "starts", "requeued"),
    [([0], 1, False), ([75], 1, True), ([2], 1, False), ([3], 1, False), ([1, 42, 75], 3, True)],
)
def test_slurm(codes: list[int], starts: int, requeued: bool, tmp_path: Path) -> None:
    env = programs(tmp_path, codes) | {"SLURM_JOB_ID": "123", "SLOTS": "4"}
    command = ["bash", str(ROOT / "launch/slurm/pretrain.sbatch"), "r.yaml", "zero.json", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == codes[-1], done.stderr
    lines = (tmp_path / "started").read_text().splitlines()
    assert len(lines) == starts == len(set(lines))  # each with a port of its own
    assert lines[0].startswith("run --restarts 0 -- deepspeed --no_ssh --hostfile run/hosts")
    assert (tmp_path / "run/hosts").read_text() == "n1 slots=4\nn2 slots=4\n"
    assert ("requeue 123" in (tmp_path / "called").read_text()) == requeued


@pytest.mark.parametrize("failure", [errors.FAILED, errors.MISTAKE, errors.NONFINITE])
def test_slurm_takes_the_code_of_the_node_that_failed(failure: int, tmp_path: Path) -> None:
    """Not that of the node that srun has asked to stop because of it."""
    env = programs(tmp_path, []) | {"SLURM_JOB_ID": "123", "RESTARTS": "0"}
    (tmp_path / "palm-ds").write_text(f"#!/bin/bash\nexit $((SLURM_NODEID ? {failure} : 75))\n")
    each = 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || codes+=($?); done'
    largest = "printf '%s\\n' ${codes[@]} | sort -n | tail -n 1"
    srun = f'while [ "$1" != bash ]; do shift; done\n{each}\nexit $({largest})\n'
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{srun}")
    command = ["bash", str(ROOT / "launch/slurm/pretrain.sbatch"), "r.yaml", "zero.json", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == failure, done.stderr
    assert "requeue" not in (tmp_path / "called").read_text()


def kubernetes_job() -> Any:
    _, job = yaml.safe_load_all((ROOT / "launch/k8s/pretrain.yaml").read_text())
    return job["spec"]


def test_kubernetes_accepts_its_file() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all((ROOT / "launch/k8s/pretrain.yaml").read_text()):
        validate.validate(document, validate.latest_version(), strict=True)


def test_slurm_is_asked_for_all_cores_and_all_memory() -> None:
    """Else all processes of a node share one core and what the cluster gives a job by default."""
    text = (ROOT / "launch/slurm/pretrain.sbatch").read_text()
    assert "\n#SBATCH --exclusive\n#SBATCH --mem 0\n" in text
    assert '--cpus-per-task "${SLURM_CPUS_ON_NODE:-1}" --cpu-bind none' in text


def test_kubernetes_counts_only_failures() -> None:
    spec = kubernetes_job()
    rules = spec["podFailurePolicy"]["rules"]
    found = {
        rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule
    }
    assert found == {
        "FailJob": [errors.MISTAKE, errors.NONFINITE],
        "Ignore": [errors.STOPPED],
    }
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    names = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert pod["restartPolicy"] == "Never" and names == {container["name"]}


def test_the_container_ends_with_the_code_of_the_run(tmp_path: Path) -> None:
    (container,) = kubernetes_job()["template"]["spec"]["containers"]
    env = programs(tmp_path, [75]) | {item["name"]: item["value"] for item in container["env"]}
    env |= {"TMPDIR": str(tmp_path)}
    command = [*container["command"], *container["args"]]
    done = subprocess.run(
        command, cwd=tmp_path, env=env | {"JOB_COMPLETION_INDEX": "1"}, capture_output=True
    )
    assert done.returncode == 75, done.stderr
    started = (tmp_path / "started").read_text()
    assert "--node_rank 1" in started
    hosts = Path(started.split("--hostfile ")[1].split()[0])
    assert hosts.is_relative_to(tmp_path) and len(hosts.read_text().splitlines()) == 2


def test_no_file_names_an_environment_of_its_own() -> None:
    for file in (ROOT / "launch/slurm/pretrain.sbatch", ROOT / "launch/k8s/pretrain.yaml"):
        assert ".venv" not in file.read_text()


def test_the_examples_for_ssh_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from palm_ds.runtime.supervisor.command_line import understand, variables_for_other_hosts

    monkeypatch.chdir(ROOT / "launch/ssh")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert variables_for_other_hosts()["GLOO_SOCKET_IFNAME"] == "eth0"
    programs(tmp_path, [])
    (tmp_path / "deepspeed").write_text("")
    (tmp_path / "deepspeed").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = understand(["deepspeed", "--hostfile", "hosts", "launch/pretrain.py"])
    assert found.slots == {"node1": "slots=8", "node2": "slots=8"}
