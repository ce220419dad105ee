"""A real Slurm on hosts made of namespaces: its controller on w0, a node on each other.

    with slurm(cluster, folder) as queue: queue.submit("job.sbatch")

Needs root, Slurm and munge; everything is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.hosts import Cluster

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")
GPUS = 2


@dataclass(frozen=True)
class Queue:
    """Submits jobs and asks about them, on w0."""

    cluster: Cluster
    folder: Path

    def call(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            self.cluster.inside(0, command),
            env={**os.environ, **(env or {}), "SLURM_CONF": f"{self.folder}/slurm.conf"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str, env: Mapping[str, str]) -> str:
        return self.call("sbatch", "--parsable", *words, env=env).strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", number)))


@contextlib.contextmanager
def slurm(cluster: Cluster, folder: Path) -> Iterator[Queue]:
    """Skips the test where Slurm is not installed."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install slurm-wlm munge")
    nodes = sorted(cluster.sshd)
    _write_files(folder, len(nodes))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_start_munge(folder))
        daemons.append(_start(cluster, folder, 0, "slurmctld", "-D"))
        daemons += [_start(cluster, folder, n, "slurmd", "-D", "-N", f"w{n}") for n in nodes]
        queue = Queue(cluster, folder)
        _wait_until_idle(queue, len(nodes))
        yield queue
    finally:
        for daemon in reversed(daemons):
            daemon.kill()
            daemon.wait()


def _start(cluster: Cluster, folder: Path, number: int, *command: str) -> subprocess.Popen[bytes]:
    """In a PID namespace of its own: its end ends what it started."""
    script = f"hostname w{number}; exec {' '.join(command)}"
    apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with (folder / f"{command[0]}-{number}.log").open("ab") as log:
        return subprocess.Popen(
            cluster.inside(number, [*apart, "sh", "-c", script]),
            env={**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"},
            stdout=log,
            stderr=log,
        )


def _start_munge(folder: Path) -> subprocess.Popen[bytes]:
    """Its socket is a file: one serves all hosts."""
    subprocess.run(["mungekey", "--create", "--keyfile", str(folder / "key")], check=True)
    files = {"socket": "munge", "key-file": "key", "pid-file": "munged.pid", "seed-file": "seed"}
    options = [f"--{name}={folder / file}" for name, file in files.items()]
    with (folder / "munged.log").open("wb") as log:
        command = ["munged", "--foreground", "--force", *options]
        return subprocess.Popen(command, stdout=log, stderr=log)


def _wait_until_idle(queue: Queue, nodes: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            if queue.call("sinfo", "--noheader", "-N", "-t", "idle").count("\n") == nodes:
                return
        if time.monotonic() > deadline:
            logs = "\n".join(file.read_text()[-2000:] for file in queue.folder.glob("*.log"))
            raise AssertionError(f"Slurm does not start: {logs}")
        time.sleep(0.5)


def _write_files(folder: Path, nodes: int) -> None:
    names, cores = f"w[1-{nodes}]", os.cpu_count()
    (folder / "cgroup").mkdir()
    (folder / "state").mkdir()
    for number in range(1, nodes + 1):
        (folder / f"spool.w{number}").mkdir()
    for number in range(GPUS):  # Slurm refuses GPUs without files
        subprocess.run(["mknod", str(folder / f"gpu{number}"), "c", "1", "3"], check=True)
    (folder / "gres.conf").write_text(
        f"NodeName={names} Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n"
    )
    (folder / "cgroup.conf").write_text(
        f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n"
    )
    (folder / "slurm.conf").write_text(
        f"""ClusterName=palm
SlurmctldHost=w0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdTimeout=20
ReturnToService=2
MpiDefault=none
NodeName={names} CPUs={cores} CoresPerSocket={cores} RealMemory=1000 Gres=gpu:{GPUS}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    )
