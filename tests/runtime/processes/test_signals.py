"""A request to stop, by a signal or by the end of a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from palm_ds.runtime.processes.signals import StopFlag, stop_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_a_request(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under `nohup`
    with stop_signals() as flag:
        assert not flag.stop_requested
        os.kill(os.getpid(), number)
        assert flag.stop_requested
    assert signal.signal(number, before) == signal.SIG_DFL


def test_nohup_stays_in_force() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals() as flag:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not flag.stop_requested
    signal.signal(signal.SIGHUP, before)


def test_a_handler_of_the_program_stays_in_force() -> None:
    """submitit saves and queues the job again by SIGUSR1."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: received.append(number))
    with stop_signals() as flag:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1] and not flag.stop_requested
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_after_the_start_is_only_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe to the thread that watched the start is still open: Python prints what it cannot
    write into it."""
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    with stop_signals(starting=True) as flag:
        flag.starting = False
        (watcher,) = [each for each in threading.enumerate() if each.name == "start"]
        watcher.join(10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.stop_requested and not watcher.is_alive()
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not lost


def test_the_end_of_a_launcher_is_a_request(caplog) -> None:
    """Its processes would continue unnoticed, alongside those of the next start."""
    with subprocess.Popen(["sleep", "60"]) as launcher:
        flag = StopFlag(launchers=[psutil.Process(os.getpid()), psutil.Process(launcher.pid)])
        assert not flag.stop_requested
        launcher.kill()
        launcher.wait()
    caplog.set_level("INFO")
    assert flag.stop_requested and flag.stop_requested
    assert caplog.messages == ["the launcher has ended: saves and stops"]
