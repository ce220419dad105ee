"""A request to stop, by a signal or by the end of a launcher."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil

from palm_ds.runtime.signals import StopFlag, stop_signals


def test_a_signal_is_a_request() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as flag:
        assert not flag.stop_requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.stop_requested
    assert signal.getsignal(signal.SIGTERM) == before


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
