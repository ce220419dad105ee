"""Restarts, and ends, of a run whose processes are real but need no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.hosts import Cluster, hosts
from tests.helpers.launchers import MARK, ROOT, clear_away, marked, wait_until_gone

pytestmark = pytest.mark.distributed
LAUNCHER = ROOT / "tests/helpers/launcher/deepspeed"
PATIENCE = 60
STEPS = 20


@dataclass
class Supervised:
    """`palm-ds run` at work."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | None = None

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(
        self, kind: str = "", *options: str, launcher: tuple[str, ...] = (), cluster: Any = None
    ) -> Supervised:
        words = [*options, "--", sys.executable, str(LAUNCHER), *launcher, str(self.run)]
        return self.start_words(*words, *([kind] if kind else []), cluster=cluster)

    def start_words(self, *options: str, cluster: Any = None) -> Supervised:
        words = [sys.executable, "-m", "palm_ds.cli.run", *options]
        self.process = subprocess.Popen(
            cluster.inside(0, words) if cluster else words,
            env={**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark, "PALM_TEST": self.mark},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self

    def starts(self) -> list[dict[str, Any]]:
        file = self.run / "starts"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def reach(self, step: int, starts: int = 2) -> None:
        """Until rank 0 has made that many steps in that many starts."""
        at = self.run / "at0"
        self.wait(
            lambda: (
                len(self.starts()) >= starts and at.exists() and int(at.read_text() or 0) >= step
            )
        )

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline and self.process and self.process.poll() is None
            time.sleep(0.05)

    def end(self, code: int) -> str:
        assert self.process
        output, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == code, output
        assert not wait_until_gone(self.mark, 5), output
        return output


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    found = Supervised(tmp_path)
    yield found
    clear_away(found.mark)
    if found.process:
        found.process.communicate(timeout=PATIENCE)


def finished(supervised: Supervised) -> bool:
    return (supervised.run / "latest").read_text() == str(STEPS)


def test_a_killed_rank_is_named_and_the_run_resumes(supervised: Supervised) -> None:
    supervised.start().reach(5)
    os.kill(supervised.starts()[1]["pid"], signal.SIGKILL)
    output = supervised.end(0)
    rank = supervised.starts()[1]["rank"]
    assert f"palm-ds run: rank {rank} on {socket.gethostname()} (last step " in output
    assert re.search(r"was killed( by SIGKILL)?; restart 1 of 5 in 1 s", output)
    assert finished(supervised) and len(supervised.starts()) == 4
    assert supervised.starts()[2]["step"] >= 4
    ports = {start["port"] for start in supervised.starts()}
    assert len(ports) == 2 and "0" not in ports


def test_a_killed_launcher_leaves_no_process_and_the_run_resumes(supervised: Supervised) -> None:
    supervised.start().reach(3)
    (launcher,) = {psutil.Process(start["pid"]).ppid() for start in supervised.starts()}
    os.kill(launcher, signal.SIGKILL)
    output = supervised.end(0)
    assert "its launcher was killed" in output
    assert finished(supervised) and supervised.starts()[2]["step"] >= 3  # they saved


def test_a_launcher_that_claims_success_is_not_believed(supervised: Supervised) -> None:
    """DeepSpeed's returns 0 if its inner process was killed."""
    supervised.start("killed early")
    output = supervised.end(0)
    assert "the launcher ended before its processes had started; restart 1 of 5" in output
    assert finished(supervised)


def test_sigterm_saves_and_ends_with_75(supervised: Supervised) -> None:
    supervised.start().reach(3)
    assert supervised.process
    supervised.process.terminate()
    supervised.end(75)
    done = int((supervised.run / "latest").read_text())
    assert 3 <= done < STEPS
    supervised.start()
    supervised.end(0)
    assert finished(supervised) and supervised.starts()[2]["step"] == done


@pytest.mark.parametrize(("kind", "code"), [("mistake", 2), ("nonfinite", 3)])
def test_what_a_restart_would_meet_again_is_not_restarted(supervised, kind, code) -> None:
    """The launcher itself may see another code first."""
    supervised.start(kind)
    supervised.end(code)
    assert len(supervised.starts()) == 2


def test_it_gives_up_with_one_line(supervised: Supervised) -> None:
    supervised.start("crash", "--restarts", "1")
    output = supervised.end(1)
    assert len(supervised.starts()) == 4
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "given up after 1 restart without progress: rank " in line


def test_to_resume_is_no_progress(supervised: Supervised) -> None:
    """A checkpoint of an earlier life, from which every start continues, is not a new one."""
    supervised.run.mkdir()
    (supervised.run / "latest").write_text("8")
    supervised.start("crash", "--restarts", "1")
    output = supervised.end(1)
    assert len(supervised.starts()) == 4
    assert "the last checkpoint is of step 8" in output


def test_progress_resets_the_count(supervised: Supervised) -> None:
    """Two crashes, each after eight more steps, are never two in a row."""
    supervised.start("crash after saving", "--restarts", "1")
    supervised.end(0)
    assert finished(supervised) and len(supervised.starts()) == 6


def test_no_restarts_are_none_after_progress_too(supervised: Supervised) -> None:
    supervised.start("crash after saving", "--restarts", "0")
    output = supervised.end(1)
    assert len(supervised.starts()) == 2 and "restart" not in output
    assert "ended with exit code 1; the last checkpoint is of step 8" in output


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")]
)
def test_the_signal_that_killed_a_command_is_named(supervised: Supervised, number, name) -> None:
    words = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})"]
    supervised.start_words("--restarts", "0", "--", *words)
    assert f"error: the command was killed by {name}\n" in supervised.end(1)


def test_a_stop_before_anything_began_may_be_continued(supervised: Supervised) -> None:
    words = [sys.executable, "-c", "print('here', flush=True); import time; time.sleep(60)"]
    supervised.start_words("--", *words)
    time.sleep(3)
    assert supervised.process
    supervised.process.terminate()
    supervised.end(75)


STARTS_SLOWLY = """
import pathlib, time
pathlib.Path("starts").touch()
time.sleep(2)
from palm_ds.runtime.processes import rank_status
from palm_ds.runtime.processes.signals import stop_signals
rank_status.report(0)
with stop_signals(starting=True):
    time.sleep(30)
rank_status.report(0, code=0)
"""


def test_a_stop_while_a_process_starts_is_not_lost(supervised: Supervised) -> None:
    """It was asked once, before it had a handler, and the run went on."""
    supervised.start_words("--restarts", "0", "--", sys.executable, "-c", STARTS_SLOWLY)
    supervised.wait((supervised.folder / "starts").exists)
    assert supervised.process
    supervised.process.terminate()
    assert "stopped before the first step" in supervised.end(75)


@pytest.mark.parametrize("program", ["", "nosuchssh -v", "ssh 'x"])
def test_a_program_that_reaches_no_host_is_one_line(supervised: Supervised, program: str) -> None:
    (supervised.folder / "hosts").write_text("w1 slots=1\nw2 slots=1\n")
    supervised.start("", "--ssh", program, launcher=("--hostfile", "hosts"))
    assert supervised.end(2).startswith(f"error: --ssh {program}: ")


def test_a_second_one_is_refused_and_orphans_are_killed(supervised: Supervised) -> None:
    supervised.start("slow").reach(2)
    second = Supervised(supervised.folder).start("slow")
    assert "already runs under palm-ds run" in second.end(2)
    (agent,) = [p for p in marked(supervised.mark) if "--agent" in p.cmdline()]
    name = agent.cmdline()[agent.cmdline().index("--agent") + 1]
    agent.kill()  # its processes are orphans now
    output = supervised.end(0)
    assert "killed 3 processes left by an earlier start" in output
    assert finished(supervised)
    assert not list(Path(tempfile.gettempdir()).glob(f"*{name}*"))


def test_the_run_stops_when_palm_ds_run_is_killed(supervised: Supervised) -> None:
    supervised.start().reach(3)
    assert supervised.process
    supervised.process.kill()
    supervised.process.communicate(timeout=PATIENCE)
    assert not wait_until_gone(supervised.mark, PATIENCE)
    done = int((supervised.run / "latest").read_text())
    assert 3 <= done < STEPS
    supervised.start()
    supervised.end(0)
    assert supervised.starts()[2]["step"] == done


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with hosts(3, tmp_path_factory.mktemp("hosts")) as found:
        yield found


class Away:
    """Two hosts of a run, and a third where the command is entered."""

    def __init__(self, supervised: Supervised, cluster: Cluster):
        self.supervised, self.cluster = supervised, cluster
        hostfile = supervised.folder / "hosts"
        hostfile.write_text("w1 slots=1\nw2 slots=1\n")
        options = ["--ssh", cluster.ssh, "--silence", "4"]
        launcher = ("--hostfile", str(hostfile))
        supervised.start("slow", *options, launcher=launcher, cluster=cluster)
        supervised.reach(3)

    def kill_rank(self, start: int) -> None:
        """A pid is that of its host's own numbering."""
        facts = self.supervised.starts()[start]
        kill = [*self.cluster.ssh.split(), facts["host"], f"kill -9 {facts['pid']}"]
        subprocess.run(self.cluster.inside(0, kill), check=True)

    def end(self) -> tuple[list[int], str]:
        """How many processes each start had, and the output."""
        output = self.supervised.end(0)
        assert finished(self.supervised)
        return [start["world"] for start in self.supervised.starts()], output


def test_a_check_needs_every_host(supervised: Supervised, cluster: Cluster) -> None:
    hostfile = supervised.folder / "hosts"
    hostfile.write_text("w1 slots=1\nw9 slots=1\n")
    options = ["--ssh", cluster.ssh, "--silence", "4"]
    launcher = ("--hostfile", str(hostfile))
    supervised.start("--check", *options, launcher=launcher, cluster=cluster)
    assert "error: w9: no answer" in supervised.end(1)
    assert not supervised.starts()


LOST = "w2: the host does not answer any more; restart 1 of 5"


def test_a_host_is_killed(supervised: Supervised, cluster: Cluster) -> None:
    away = Away(supervised, cluster)
    cluster.kill(2)
    try:
        worlds, output = away.end()
    finally:
        cluster.start(2)
        cluster.wait(2)
    assert worlds == [2, 2, 1]
    assert LOST in output and "continues without w2: no answer" in output


def test_a_link_is_cut_and_mended(supervised: Supervised, cluster: Cluster) -> None:
    """Nothing of the start before the cut runs on; the host is used again from the next one on."""
    away = Away(supervised, cluster)
    marks = {process.pid for process in marked(supervised.mark)}
    far = [p for p in marks if namespace_of(p) == namespace_of(cluster.sshd[2].pid)]
    cluster.link(2, "down")
    try:
        supervised.wait(lambda: len(supervised.starts()) == 3)
        supervised.wait(lambda: not any(psutil.pid_exists(pid) for pid in far))
    finally:
        cluster.link(2, "up")
    away.kill_rank(2)
    worlds, output = away.end()
    assert worlds == [2, 2, 1, 2, 2] and LOST in output and far
    assert "rank 0 on w1 (last step " in output  # killed where it cannot be seen from here


def namespace_of(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino
