"""Which parents are launchers, and when they have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from palm_ds.runtime.processes.launcher import has_ended

PARENT = '''
import subprocess, sys
code = """from palm_ds.runtime.processes.launcher import *
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
