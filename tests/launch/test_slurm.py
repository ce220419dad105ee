"""launch/slurm/pretrain.sbatch on a real Slurm of two nodes: cores, a killed rank, the time limit,
a signal while the processes start. The processes are real but need no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from palm_ds.cli.main import main
from tests.helpers.hosts import hosts
from tests.helpers.launchers import PROGRAMS, ROOT
from tests.helpers.slurm import GPUS, Queue, slurm

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
FILE = str(ROOT / "launch/slurm/pretrain.sbatch")
DEEPSPEED = """#!/bin/bash
options=()
until [[ $1 == launch/pretrain.py || $1 == --module ]]; do options+=("$1"); shift; done
[[ $1 != --module ]] || shift
echo "$SLURMD_NODENAME starts $1"
exec {python} {launcher} "${{options[@]}}" {run} "$2"
"""
"""Instead of DeepSpeed's launcher; the recipe's name says what goes wrong."""
PATIENCE = 180
CLIENTS = ("sbatch", "scontrol", "scancel")


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    folder = tmp_path_factory.mktemp("slurm")
    with hosts(3, tmp_path_factory.mktemp("hosts")) as cluster, slurm(cluster, folder) as found:
        yield found


class Job:
    """A run of four processes on two nodes."""

    def __init__(self, queue: Queue, folder: Path, kind: str, *options: str):
        self.queue, self.run, self.log = queue, folder / "run", folder / "log"
        programs = folder / "bin"
        programs.mkdir()
        launcher = ROOT / "tests/helpers/launcher/deepspeed"
        text = DEEPSPEED.format(python=sys.executable, launcher=launcher, run=self.run)
        (programs / "deepspeed").write_text(text)
        (programs / "deepspeed").chmod(0o755)
        env = {"PATH": f"{programs}:{PROGRAMS}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        size = ("--nodes", "2", "--gpus-per-node", str(GPUS), "--output", str(self.log))
        words = ("--chdir", str(ROOT), *size, *options, FILE, kind, "zero.json", str(self.run))
        self.number = queue.submit(*words, env=env)

    def starts(self) -> list[dict[str, Any]]:
        file = self.run / "starts"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            log = self.log.read_text() if self.log.exists() else ""
            assert time.monotonic() < deadline, f"{self.queue.job(self.number)}\n{log[-3000:]}"
            time.sleep(0.3)

    def wait_for_state(self, state: str) -> None:
        self.wait(lambda: self.queue.job(self.number)["JobState"] == state)

    def begin_again(self) -> None:
        """Slurm lets a job that was queued again wait for two minutes. Its nodes refuse one that is
        as old as the order to end it, in whole seconds: "Job credential revoked"."""
        self.wait(lambda: self.queue.job(self.number)["Restarts"] == "1")
        self.wait_for_state("PENDING")
        time.sleep(3)
        self.queue.call("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def clear_away(self) -> None:
        self.queue.call("scancel", self.number)
        self.wait(lambda: self.queue.job(self.number)["JobState"] not in ("RUNNING", "COMPLETING"))


def step(job: Job) -> int:
    latest = job.run / "latest"
    return int(latest.read_text()) if latest.exists() else 0


def test_processes_have_the_cores_of_their_node_and_a_killed_one_is_replaced(
    queue: Queue, tmp_path: Path
) -> None:
    job = Job(queue, tmp_path, "slow")
    try:
        job.wait(lambda: step(job) >= 4)
        first = job.starts()
        assert [start["world"] for start in first] == [4] * 4
        assert {start["cores"] for start in first} == {len(os.sched_getaffinity(0))}
        kill_rank(job, 3)
        job.wait_for_state("COMPLETED")
        again = job.starts()[4:]
        assert len(again) == 4 and min(start["step"] for start in again) >= 2
        assert "was killed by SIGKILL" in job.log.read_text()
        assert step(job) == 20
    finally:
        job.clear_away()


def kill_rank(job: Job, rank: int) -> None:
    """Its number is that of its host's own numbering."""
    (pid,) = {start["pid"] for start in job.starts() if start["rank"] == rank}
    (host,) = {start["host"] for start in job.starts() if start["rank"] == rank}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            inside = Path(f"/proc/{process.pid}/status").read_text()
            numbers = re.findall(r"^NSpid:\s+(.*)$", inside, re.MULTILINE)[0].split()
            there = process.environ().get("SLURMD_NODENAME") == host
            if there and str(job.run) in process.cmdline() and numbers[1:] == [str(pid)]:
                process.kill()
                return
    raise AssertionError(f"no rank {rank} on {host}")


def test_the_time_limit_saves_and_queues_the_job_again(queue: Queue, tmp_path: Path) -> None:
    job = Job(queue, tmp_path, "patient", "--time", "1", "--signal", "TERM@58")
    try:
        job.wait(lambda: step(job) >= 2)
        job.begin_again()
        done = step(job)
        assert 2 <= done < 20
        job.wait(lambda: len(job.starts()) == 8)
        assert {start["step"] for start in job.starts()[4:]} == {done}
    finally:
        job.clear_away()


def test_a_signal_while_the_processes_start_queues_the_job_again(
    queue: Queue, tmp_path: Path
) -> None:
    """Slurm sends it once: a run that swallowed it would lose what it does until the time is up."""
    job = Job(queue, tmp_path, "starting")
    try:
        job.wait(lambda: len(list(job.run.glob("starting*"))) == 4)
        job.queue.call("scancel", "--signal", "TERM", job.number)
        job.begin_again()
        log = job.log.read_text()
        assert "stopped before the first step" in log and "Traceback" not in log
        job.wait_for_state("COMPLETED")
        assert step(job) == 20
    finally:
        job.clear_away()


def test_a_mistake_on_one_node_ends_the_job_while_the_others_wait(
    queue: Queue, tmp_path: Path
) -> None:
    """srun asks them to stop, and their code is larger than that of the mistake."""

    def restarts() -> str:
        return queue.job(job.number)["Restarts"]

    job = Job(queue, tmp_path, "mistake on a node")
    try:
        job.wait(lambda: queue.job(job.number)["ExitCode"] != "0:0" or restarts() != "0")
        assert (queue.job(job.number)["ExitCode"], restarts()) == ("2:0", "0")
        assert "stopped before the first step" in job.log.read_text()
    finally:
        job.clear_away()


RECIPE = """\
length: 16
batch: 2 rows
backbone: {preset: tiny}
sources: {text: {corpus: text}}
tasks: {knowledge_masking: {source: text}}
stages: [{knowledge_masking: 20}]
"""


def test_submit_follows_a_job_to_its_end_and_cancels_another(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """`palm-ds submit` where Slurm's programs are those of w0."""
    job = Job(queue, tmp_path, "slow", "--hold")  # for its programs
    inside = {name: shlex.join(queue.cluster.inside(0, [name])) for name in CLIENTS}
    (tmp_path / "clients").mkdir()
    for name, words in inside.items():
        body = f'export PATH={tmp_path}/bin:{PROGRAMS}:{os.environ["PATH"]}\nexec {words} "$@"\n'
        (tmp_path / "clients" / name).write_text(f"#!/bin/bash\n{body}")
        (tmp_path / "clients" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/clients:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", f"{queue.folder}/slurm.conf")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    words = ["submit", "--slurm", "mine.yaml", "--deepspeed_config", "cpu.json", "--run_dir", "run"]
    words += ["--nodes", "2", "--gpus", str(GPUS)]
    try:
        assert main(words) == 0
        said = capsys.readouterr().out
        first, *log = said.splitlines()
        assert re.fullmatch(r"submitted as job \d+", first)
        assert {f"w{n} starts palm_ds.cli.pretrain" for n in (1, 2)} <= set(log)
        assert {start["world"] for start in job.starts()} == {4} and step(job) == 20
        assert main([*words, "--detach"]) == 0
        number = capsys.readouterr().out.split()[-1]
        assert main(["submit", "--slurm", "--cancel", number]) == 0
        job.wait(lambda: queue.job(number)["JobState"] in ("CANCELLED", "COMPLETED"))
        assert queue.job(number)["JobState"] == "CANCELLED"
    finally:
        job.clear_away()
