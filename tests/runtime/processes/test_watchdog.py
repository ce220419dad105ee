"""A process whose steps stop ends, and only such a one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from palm_ds.common import errors
from palm_ds.runtime.processes import watchdog
from palm_ds.runtime.processes.watchdog import Watchdog
from tests.helpers import warm_python


def run(code: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run(
        ["-c", f"import time\nfrom palm_ds.runtime.processes.watchdog import *\n{code}"]
    )


def test_it_ends_a_process_that_hangs() -> None:
    done = run(
        "watchdog = Watchdog(2.4)\n"
        "for _ in range(5): time.sleep(0.6); watchdog.beat()\n"
        "print('alive', flush=True); time.sleep(60)"
    )
    assert done.returncode == errors.WATCHDOG == 42
    assert done.stdout == "alive\n"
    assert done.stderr == "error: no step for 0.04 minutes; giving up (exit code 42)\n"


def test_it_ends_a_process_whose_messages_nobody_reads() -> None:
    """Where `2>&1 | tee log` had ended with its terminal, it could not, and hung for ever."""
    code = (
        "import time\nfrom palm_ds.runtime.processes.watchdog import Watchdog\n"
        "watchdog = Watchdog(0.5); time.sleep(20)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as gone:
        done = subprocess.run([sys.executable, "-c", code], stderr=gone, timeout=60)
    assert done.returncode == errors.WATCHDOG


def test_a_suspended_process_goes_on() -> None:
    code = (
        "import os, signal, time\n"
        "from palm_ds.runtime.processes.watchdog import Watchdog\n"
        "watchdog = Watchdog(3.0); os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(1); watchdog.beat(); print('alive', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.waitpid(process.pid, os.WUNTRACED)
        time.sleep(5)
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=30)
    assert out == b"alive\n"
    assert process.returncode == errors.WATCHDOG and b"no step for 0.05 minutes" in err


def test_it_closes() -> None:
    done = run(
        "watchdog = Watchdog(0.2); watchdog.close(); time.sleep(0.6)\nWatchdog(0).beat()",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_limit_follows_the_steps_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    found = Watchdog(0, floor=10.0)
    found._fixed = None  # no thread watches: 0 asked for none

    def step(seconds: float) -> None:
        now[0] += seconds
        found.stepped()

    for seconds in (500.0, 90.0, 0.1, 0.1, 0.1, 0.1):  # the first compile
        step(seconds)
    assert found.limit == 3600.0  # too few to know
    step(0.1)
    assert found.limit == 10.0
    step(2.0)
    assert found.limit == 40.0
    found.beat()  # saving, or evaluating
    now[0] += 900.0
    found.beat()
    assert found.limit == 3600.0
    step(7.0)  # since the last beat, not a step alone
    assert found.limit == 40.0
    for _ in range(100):
        step(0.2)
    assert found.limit == 10.0
