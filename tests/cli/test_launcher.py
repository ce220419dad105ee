"""A mistyped --hostfile is refused instead of a run on one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from palm_ds.cli.launcher import hostfile_of
from tests.helpers.launchers import environment

LAUNCHER = """
import subprocess, sys
code = "from palm_ds.cli.launcher import check_hostfile; check_hostfile(); print('trains')"
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
