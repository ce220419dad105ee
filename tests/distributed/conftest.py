"""Programs that run in several processes and are always cleaned up."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launchers import MARK, deepspeed, torchrun
from tests.helpers.launchers import clear_away as clear_away_marked
from tests.helpers.launchers import environment as environment_of
from tests.helpers.warm_python import clear_away, start_together

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Finished:
    """How a program ended, its output, and the result of a worker's function on rank 0."""

    code: int
    output: str
    result: Any = None


Runner = Callable[..., Finished]


@pytest.fixture(params=["some", pytest.param("all", marks=pytest.mark.exhaustive)])
def every(request: pytest.FixtureRequest) -> bool:
    """Whether a test goes through every combination of stages, precisions, processes and so on;
    `some` of them have each value at least once."""
    return request.param == "all"


@pytest.fixture
def run_program(tmp_path: Path) -> Iterator[Runner]:
    """run_program("launch/pretrain.py", "recipe.yaml", processes=2, launcher="deepspeed")

    `launcher` is deepspeed, torchrun, fork (no launcher: `processes` of warm_python with torchrun's
    environment) or python (one process of warm_python). A real launcher takes about twenty seconds
    of CPU time, a fork three: the launchers are for tests of starting. An exit code other than
    `code` fails the test and shows the program's output."""
    marks: list[str] = []

    def run(
        *words: object,
        processes: int = 2,
        launcher: str = "deepspeed",
        timeout: float = 300,
        code: int = 0,
        environment: dict[str, str] | None = None,
    ) -> Finished:
        mark = uuid.uuid4().hex
        marks.append(mark)
        variables = environment_of(tmp_path, mark) | (environment or {})
        if launcher in ("fork", "python"):
            world = 1 if launcher == "python" else processes
            found, output = _fork(world, list(words), variables, tmp_path, timeout)
        else:
            command = [*_launch(launcher, processes), *map(str, words)]
            found, output = _start(command, variables, tmp_path, timeout)
        assert found is not None, f"{words[0]}: still running after {timeout} s\n{output[-4000:]}"
        assert found == code, f"exit code {found}\n{output[-6000:]}"
        return Finished(found, output)

    yield run
    for mark in marks:
        clear_away_marked(mark)


@pytest.fixture
def run_distributed(run_program: Runner, tmp_path: Path) -> Runner:
    """run_distributed("engine_runs.losses", {"runs": ["1:fp32:4"]}, launcher="fork").result

    A function of a module of this folder with these arguments, in each process (worker.py); the
    options are those of `run_program`."""
    numbers = count()

    def run(function: str, values: Mapping[str, Any] | None = None, **options: Any) -> Finished:
        out = tmp_path / f"out-{next(numbers)}.json"
        given = json.dumps(values or {}, default=str)  # paths are text
        done = run_program(HERE / "worker.py", function, given, "--out", out, **options)
        return replace(done, result=json.loads(out.read_text()) if out.exists() else None)

    return run


def _fork(
    world: int, words: list[Any], variables: dict[str, str], folder: Path, timeout: float
) -> tuple[int | None, str]:
    """The first exit code other than 0 (the others are then ended; None: a timeout), and the
    output of all."""
    deadline = time.monotonic() + timeout
    output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the programs
    programs = start_together(world, words, env=variables, cwd=folder, output=output)
    try:
        while None in (codes := [program.poll() for program in programs]):
            if any(codes) or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        code = next(filter(None, codes), None if None in codes else 0)
        return code, programs[0].output()
    finally:
        clear_away(programs)


def _start(
    command: list[str], variables: dict[str, str], folder: Path, timeout: float
) -> tuple[int | None, str]:
    process = subprocess.Popen(
        command,
        env=variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        clear_away_marked(variables[MARK])
        return None, process.communicate()[0]
    finally:
        clear_away_marked(variables[MARK])


def _launch(launcher: str, processes: int) -> list[str]:
    if launcher == "torchrun":
        return torchrun(processes)
    assert launcher == "deepspeed", launcher
    return deepspeed(processes)
