from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from palm_ds.runtime.processes.launchers import has_ended, hostfile_of
from tests.helpers.launchers import environment

PARENT = '''
import subprocess, sys
code = """from palm_ds.runtime.processes.launchers import *
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
code = "from palm_ds.runtime.processes import launchers as x; x.check_hostfile(); print('trains')"
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
@pytest.mark.exhaustive  # tests/distributed/test_launchers.py has one that is found among parents
@pytest.mark.parametrize("target", [("launch/pretrain.py",), ("--module", "palm_ds.cli.predict")])
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
