"""The command itself: launch/prepare.py in a separate process, and over MPI."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import warm_python
from tests.helpers.launchers import mpirun

TEXT = "\n\n".join(f"Document {i} has a sentence. And another one in New York!" for i in range(90))
OPTIONS = ("--train", "wordpiece", "--vocab_size", "100", "--shard_mb", "0.002")


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    script = Path(__file__).resolve().parents[2] / "launch" / "prepare.py"
    return warm_python.run([script, *arguments], cwd=cwd)


def corpus(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return warm_python.run(["-m", "palm_ds.cli.corpus", *arguments], cwd=cwd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path


def test_prepare_inspect_and_annotate(folder: Path) -> None:
    ended = run("out", "a.txt", *OPTIONS, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert "90 documents, 180 sentences" in ended.stdout
    assert ended.stderr == ""
    again = run("out", "a.txt", *OPTIONS, cwd=folder)
    assert again.returncode == 0 and "already complete" in again.stdout
    added = corpus("annotate", "out", "a.txt", "--annotation", "capital", cwd=folder)
    assert added.returncode == 0 and "capital" in added.stdout
    shown = corpus("inspect", "out", "--documents", "1", "--first", "89", cwd=folder)
    assert "a.txt@" in shown.stdout and "capital" in shown.stdout


def test_rejected_lines_are_summarized(folder: Path) -> None:
    (folder / "b.jsonl").write_text('{"text": "Good."}\n{"txt": 1}\n\n{"text": "Good too."}\n')
    ended = run("out", "b.jsonl", *OPTIONS, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert "2 rejected" in ended.stdout
    assert "empty line" in ended.stdout and "b.jsonl, line 3" in ended.stdout
    strict = run("strict", "b.jsonl", *OPTIONS, "--strict", cwd=folder)
    assert strict.returncode == 2
    reason = "no field `text`; it has `txt` (--text_field names another)"
    assert strict.stderr == f"error: b.jsonl: line 2: {reason} (--strict)\n"


def test_a_circle_of_links_as_a_target_is_one_line(folder: Path) -> None:
    (folder / "one").symlink_to("other")
    (folder / "other").symlink_to("one")
    for target, said in (
        ("one/out", "Too many levels of symbolic links"),
        ("one", "error: one: is a broken link; choose another folder"),
    ):
        ended = run(target, "a.txt", *OPTIONS, cwd=folder)
        assert ended.returncode == 2
        assert ended.stderr.splitlines()[-1].endswith(said)
        assert "Traceback" not in ended.stderr
    assert not (folder / "one.partial").exists()


def test_help_names_every_option(folder: Path) -> None:
    ended = run("--help", cwd=folder)
    assert ended.returncode == 0
    for option in (
        "--tokenizer",
        "--train",
        "--lexicon_phrase",
        "--segmenter",
        "--mpi",
        "--annotation",
    ):
        assert option in ended.stdout


@pytest.mark.distributed
def test_an_interrupt_is_one_line(folder: Path) -> None:
    (folder / "slow_marks.py").write_text(
        "import time, numpy as np\n"
        "def slow(document):\n    time.sleep(0.1)\n    return np.zeros(len(document), np.uint8)\n"
    )
    script = Path(__file__).resolve().parents[2] / "launch" / "prepare.py"
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    running = subprocess.Popen(
        [sys.executable, str(script), "out", "a.txt", *OPTIONS, "--annotation", "slow_marks:slow"]
        + ["--workers", "2"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list(folder.glob("out.partial/parts/*.json")):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    _, error = running.communicate(timeout=60)
    assert running.returncode == 130
    assert error == "stopped; run the same command again to continue\n"


@pytest.mark.distributed
def test_mpi_gives_the_same_bytes(folder: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "launch" / "prepare.py"
    command = [*mpirun(3), "-m", "mpi4py.futures", str(script)]
    ended = subprocess.run(
        [*command, "out", "a.txt", *OPTIONS, "--mpi"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert run("one", "a.txt", *OPTIONS, cwd=folder).returncode == 0
    files = [p.relative_to(folder / "one") for p in (folder / "one").rglob("*") if p.is_file()]
    assert len(files) > 8
    for file in files:
        assert (folder / "out" / file).read_bytes() == (folder / "one" / file).read_bytes(), file


def test_mpi_without_workers_is_refused(folder: Path) -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpi4py here: pip install mpi4py mpich")
    ended = run("out", "a.txt", *OPTIONS, "--mpi", cwd=folder)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: --mpi") and ended.stderr.count("\n") == 1
