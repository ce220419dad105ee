"""Programs that run in several processes, started by the real launchers and always cleared away."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).resolve().parent
MARK = "PALM_TEST_RUN"


@dataclass(frozen=True)
class Finished:
    """How a program ended, and what its rank 0 wrote to --out."""

    code: int
    output: str
    result: Any


Runner = Callable[..., Finished]


@pytest.fixture
def run_distributed(tmp_path: Path) -> Iterator[Runner]:
    """run_distributed("losses.py", "--steps", 3, processes=2, launcher="deepspeed")

    `launcher` is deepspeed, torchrun or python (one process). The program is a file of this folder
    that writes JSON to --out (`writes=False`: one that does not know it). A code other than `code`
    fails the test with the program's output."""
    marks: list[str] = []

    def run(
        script: str,
        *arguments: object,
        processes: int = 2,
        launcher: str = "deepspeed",
        timeout: float = 240,
        code: int = 0,
        environment: dict[str, str] | None = None,
        writes: bool = True,
    ) -> Finished:
        out = tmp_path / f"out-{len(marks)}.json"
        mark = uuid.uuid4().hex
        marks.append(mark)
        command = [*_launch(launcher, processes), str(HERE / script), *map(str, arguments)]
        process = subprocess.Popen(
            [*command, *(["--out", str(out)] if writes else [])],
            env=_environment(tmp_path, mark) | (environment or {}),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _clear_away(mark)
            output, _ = process.communicate()
            pytest.fail(f"{script}: still running after {timeout} s\n{output[-4000:]}")
        finally:
            _clear_away(mark)
        assert process.returncode == code, f"exit code {process.returncode}\n{output[-6000:]}"
        result = json.loads(out.read_text()) if out.exists() else None
        return Finished(process.returncode, output, result)

    yield run
    for mark in marks:
        _clear_away(mark)


def _launch(launcher: str, processes: int) -> list[str]:
    if launcher == "python":
        return [sys.executable]
    port = str(_free_port())
    programs = Path(sys.executable).parent
    if launcher == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run"]
        return [*run, f"--nproc_per_node={processes}", "--master_port", port]
    assert launcher == "deepspeed", launcher
    run = [sys.executable, str(programs / "deepspeed")]
    return [*run, "--num_gpus", str(processes), "--master_port", port]


def _environment(folder: Path, mark: str) -> dict[str, str]:
    """As few of the caller's variables as will do, so that a test does not depend on them."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "MASTER"))}
    return kept | {
        MARK: mark,
        "PYTHONPATH": str(HERE.parent.parent),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _clear_away(mark: str) -> None:
    """Kill whatever carries the mark, orphans included."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                process.kill()
                process.wait(10)
        except (psutil.Error, OSError):
            continue
