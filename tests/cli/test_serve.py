"""The command as a process: it drains, and says in one line what is wrong."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from palm_ds.cli.main import main
from tests.helpers.saved_model import save_model
from tests.helpers.warm_python import Program


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("serve") / "run", ["mood"])


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line with which the command refuses."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words])
    assert ended.value.code == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_mistakes_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(run)
    assert "no such file or folder" in error_of(capsys, "nowhere", "--port", "0")
    assert "not a checkpoint of a known format" in error_of(capsys, str(tmp_path), "--port", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port}: in use on 127.0.0.1" in error_of(capsys, model, "--port", port)
    assert "--port 99999" in error_of(capsys, model, "--port", "99999")
    assert "--host no.such.host" in error_of(capsys, model, "--host", "no.such.host")
    assert "another model is named 'run'" in error_of(capsys, model, model, "--port", "0")
    assert "--max_texts: 9 do not fit" in error_of(
        capsys, model, "--max_texts", "9", "--max_queue", "8"
    )
    assert "error: --timeout: expected a number above 0, got 0.0" in error_of(
        capsys, model, "--timeout", "0"
    )
    assert "--timeout: expected a finite number, got NaN" in error_of(
        capsys, model, "--timeout", "nan"
    )
    assert 'precision: no "fp31"' in error_of(capsys, model, "--precision", "fp31", "--port", "0")
    token = tmp_path / "token"
    assert "No such file" in error_of(capsys, model, "--token_file", str(token))
    token.write_text("two words")
    assert "expected one word" in error_of(capsys, model, "--token_file", str(token))
    assert "--texts: needs --index" in error_of(capsys, model, "--texts", "a.txt", "--port", "0")


@pytest.fixture
def server(run: Path) -> Iterator[Program]:
    command = ["-m", "palm_ds.cli.serve", run, "--port", "0"]
    program = Program(command, env={"PALM_DS_TOKEN": "secret"})
    yield program
    program.clear_away()


@pytest.mark.slow
def test_sigterm_answers_what_was_accepted(server: Program) -> None:
    """Many texts are in work when the signal comes; all are answered, and then the process ends."""
    wait_for(server, "serving on")
    found = re.search(r"^serving on (\S+)", server.output(), re.MULTILINE)
    assert found
    answers: list[int] = []
    threads = [threading.Thread(target=_ask, args=(found[1], answers)) for _ in range(4)]
    for thread in threads:
        thread.start()
    _get(found[1] + "/info")
    wait_for(server, "GET /info")
    server.send_signal(signal.SIGHUP)  # a reload meanwhile loses nothing either
    wait_for(server, "reloaded run")
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0
    for thread in threads:
        thread.join(30)
    assert answers == [250] * 4
    assert "stopping: " in server.output()


def wait_for(server: Program, text: str) -> None:
    """Until the server has said it."""
    deadline = time.monotonic() + 60
    while text not in server.output():
        assert server.poll() is None and time.monotonic() < deadline, server.output()
        time.sleep(0.02)


def _get(url: str) -> None:
    request = urllib.request.Request(url, headers={"Authorization": "Bearer secret"})
    urllib.request.urlopen(request, timeout=30).close()


def _ask(url: str, answers: list[int]) -> None:
    body = json.dumps({"inputs": ["good bad so " * 9] * 250}).encode()
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    request = urllib.request.Request(url + "/predict/mood", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answers.append(len(json.load(answer)["predictions"]))
