"""The command as a process: it drains, and says in one line what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from palm_ds.cli.main import main
from tests.helpers.saved_model import save_model


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
    assert "give their vectors too" in error_of(capsys, model, "--texts", "a.txt", "--port", "0")


@pytest.mark.slow
def test_sigterm_answers_what_was_accepted(run: Path) -> None:
    """Many texts are in work when the signal comes; all are answered, and then the process ends."""
    command = [sys.executable, "-m", "palm_ds.cli.serve", str(run), "--port", "0"]
    environment = {**os.environ, "PALM_DS_TOKEN": "secret"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines: list[str] = []
        url = ""
        while not url:
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
            found = re.match(r"serving on (\S+)", lines[-1])
            url = found[1] if found else ""
        logged: list[str] = []
        reading = threading.Thread(target=lambda: logged.extend(process.stderr or ()))
        reading.start()
        answers: list[int] = []
        threads = [threading.Thread(target=_ask, args=(url, answers)) for _ in range(4)]
        for thread in threads:
            thread.start()
        while not any("GET /info" in line for line in logged):
            _get(url + "/info")
        process.send_signal(signal.SIGHUP)  # a reload meanwhile loses nothing either
        while not any("reloaded run" in line for line in logged):
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        for thread in [*threads, reading]:
            thread.join(30)
    assert answers == [250] * 4
    assert any("stopping: " in line for line in logged)


def _get(url: str) -> None:
    request = urllib.request.Request(url, headers={"Authorization": "Bearer secret"})
    urllib.request.urlopen(request, timeout=30).close()


def _ask(url: str, answers: list[int]) -> None:
    body = json.dumps({"inputs": ["good bad so " * 9] * 250}).encode()
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    request = urllib.request.Request(url + "/predict/mood", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answers.append(len(json.load(answer)["predictions"]))
