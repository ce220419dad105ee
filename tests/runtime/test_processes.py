from __future__ import annotations

import subprocess
import sys

import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.processes import WATCHDOG_EXIT, _check_mpi
from tests.helpers import warm_python


def run(code: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run(["-c", code], timeout=60)


def test_watchdog_ends_a_process_that_hangs() -> None:
    done = run(
        "import time\n"
        "from palm_ds.runtime.processes import Watchdog\n"
        "watchdog = Watchdog(0.3)\n"
        "for _ in range(6): time.sleep(0.1); watchdog.beat()\n"
        "print('alive', flush=True); time.sleep(30)"
    )
    assert done.returncode == WATCHDOG_EXIT == 42
    assert done.stdout == "alive\n"
    assert done.stderr == "error: no step for 0.005 minutes; giving up (exit code 42)\n"


def test_watchdog_closes() -> None:
    done = run(
        "import time\n"
        "from palm_ds.runtime.processes import Watchdog\n"
        "watchdog = Watchdog(0.2); watchdog.close(); time.sleep(0.6)\n"
        "Watchdog(0).beat()"
    )
    assert (done.returncode, done.stderr) == (0, "")


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
