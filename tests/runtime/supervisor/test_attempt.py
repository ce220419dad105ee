"""The exit code of a run, from those of its processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.supervisor import agent
from palm_ds.runtime.supervisor.attempt import combined, signal_in


@pytest.mark.parametrize(
    ("ranks", "commands", "code"),
    [
        ([0, 0], [0], 0),
        ([75, 75], [75], 75),
        ([75, 143], [1], 75),  # one was still starting
        ([75, 75], [None], 75),
        ([0, 0], [None], 1),  # a host was lost at the very end
        ([1, 2], [1], 2),
        ([3, None], [247], 3),
        ([42, None], [247], 42),
        ([1, None], [247], 1),
        ([75, None], [247], 1),
        ([], [2], 2),
        ([], [0], 0),
        ([], [0, 1], 1),
        ([], [-9], 1),
        ([], [None], 1),
    ],
)
def test_one_code_for_all(ranks, commands, code) -> None:
    assert combined(ranks, commands) == code


@pytest.mark.parametrize(
    ("code", "number"),
    [
        (-9, 9),
        (137, 9),
        (247, 9),
        (-11, 11),
        (139, 11),
        (-15, 15),
        (0, 0),
        (1, 0),
        (255, 0),
        (75, 0),
    ],
)
def test_the_signal_of_an_exit_code(code, number) -> None:
    assert signal_in(code) == number


@pytest.mark.parametrize(
    ("connection", "address"),
    [
        ("192.0.2.1 50000 192.0.2.7 22", "192.0.2.7"),
        ("127.0.0.1 50000 127.0.0.1 22", "198.51.100.3"),
        ("::1 50000 ::1 22", "198.51.100.3"),
        ("", "198.51.100.3"),
    ],
)
def test_the_address_of_the_first_host_is_one_for_the_others(
    connection: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `localhost` as the first of a hostfile, the others looked for rank 0 on themselves."""
    monkeypatch.setenv("SSH_CONNECTION", connection)
    says = SimpleNamespace(stdout="198.51.100.3 2001:db8::3 \n")
    monkeypatch.setattr(agent.subprocess, "run", lambda *_, **__: says)
    assert agent._address() == address


def test_a_host_without_the_program_is_one_line(tmp_path: Path) -> None:
    """It was a traceback of that host's agent."""
    request = {"command": ["/nowhere/bin/deepspeed"], "cwd": "/", "env": {}, "hosts": ""}
    with pytest.raises(UserError, match="/nowhere/bin/deepspeed cannot be started: No such file"):
        agent._start(request, tmp_path, "name", 1)
