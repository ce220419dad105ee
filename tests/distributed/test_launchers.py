"""A run as users start it: by the real launchers, stopped, killed and resumed to the last bit.

Most tests of several processes fork them from a warm Python (tests/helpers/warm_python.py). What
such a start cannot show is here: the launchers' command lines and ports, the variables that reach
the processes, what becomes of a signal and of a process that dies, exit codes, and orphans.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from tests.distributed.test_commands import (
    MASKS,
    PRETRAIN,
    ROOT,
    losses,
    recipe_values,
    records,
    wait_for,
    write_machine,
)
from tests.helpers.launchers import (
    clear_away,
    deepspeed,
    deepspeed_node,
    environment,
    marked,
    mpirun,
    openmpi,
    torchrun,
    wait_until_gone,
)
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.warm_python import clear_away as clear_away_programs
from tests.helpers.warm_python import free_port, start_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LAUNCH = {"deepspeed": deepspeed, "torchrun": torchrun, "mpirun": mpirun, "Open MPI": openmpi}
STEPS, SOME_STEPS = 60, 16
"""The latter for a single life."""
SAVE = {"every": 2, "keep": 3}
PATIENCE = 180  # seconds; a launcher and what it started end within 3 on a quiet machine


@dataclass(frozen=True)
class Case:
    """What every start of a run is given, and the run that nobody interrupted."""

    arguments: list[str]
    folder: Path
    whole: Path
    steps: int

    @property
    def run(self) -> Path:
        return self.folder / "run"


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest) -> int:
    return STEPS if request.config.getoption("--exhaustive") else SOME_STEPS


@pytest.fixture(scope="module")
def files(tmp_path_factory, steps: int) -> tuple[list[str], Path]:
    """Recipe and DeepSpeed file as arguments, and the run folder of two processes that ended."""
    folder = tmp_path_factory.mktemp("launched")
    write_small_corpus(folder / "corpus")
    backbone = recipe_values(folder)["backbone"] | {"dropout": 0.1, "attention_dropout": 0.1}
    tasks = {MASKS: {"source": "text", "kind": "tests.helpers.paced_task.Paced"}}
    values = recipe_values(
        folder / "corpus", backbone=backbone, tasks=tasks, evaluate={}, save=SAVE
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values | {"stages": [{MASKS: steps}]}))
    arguments = [str(recipe), "--deepspeed_config", str(write_machine(folder))]
    run_to_the_end([*arguments, "--run_dir", str(folder / "run")])
    return arguments, folder / "run"


def run_to_the_end(arguments: list[str]) -> str:
    """The output of process 0 of two that no launcher starts."""
    programs = start_together(2, [PRETRAIN, *arguments], env={})
    try:
        outputs = [program.communicate(PATIENCE)[0] for program in programs]
        assert [program.returncode for program in programs] == [0, 0], outputs[0][-4000:]
        return outputs[0]
    finally:
        clear_away_programs(programs)


@pytest.fixture
def case(files, tmp_path, steps: int) -> Case:
    return Case([*files[0], "--run_dir", str(tmp_path / "run")], tmp_path, files[1], steps)


def commands(case: Case, way: str) -> list[list[str]]:
    """What is entered, on each machine."""
    script = [PRETRAIN, *case.arguments]
    if way == "hostfile":
        hosts, port = case.folder / "hosts", free_port()
        hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
        return [[*deepspeed_node(hosts, rank, port), *script] for rank in (0, 1)]
    if way == "palm-ds run":
        supervisor = [sys.executable, "-m", "palm_ds.cli.run", "--"]
        module = ["--module", "palm_ds.cli.pretrain", *case.arguments]
        return [[*supervisor, *deepspeed(2)[:-2], *module]]  # which chooses the port
    return [[*LAUNCH[way](2), *script]]


class Started:
    """A run in a terminal of its own; nothing of it stays."""

    def __init__(self, case: Case, way: str, step_seconds: float):
        self.case, self.mark = case, uuid.uuid4().hex
        variables = environment(case.folder, self.mark) | {
            "PALM_TEST_STEP_SECONDS": str(step_seconds),
            "MASTER_PORT": str(free_port()),  # for mpirun; the other launchers set their own
        }
        self.log = case.folder / f"log-{self.mark}.txt"
        with self.log.open("wb") as log:
            self.launchers = [
                subprocess.Popen(
                    command,
                    env=variables,
                    cwd=case.folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command in commands(case, way)
            ]

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        clear_away(self.mark)
        for launcher in self.launchers:
            launcher.wait(PATIENCE)

    def reach(self, steps: int) -> None:
        """Wait until that many steps are logged."""
        wait_for(self.case.run, steps, self.launchers[0], self.log.read_text)

    def suffer(self, event: str) -> None:
        launcher = self.launchers[0]
        if event == "SIGTERM":
            launcher.terminate()
        elif event == "Ctrl-C":
            os.killpg(launcher.pid, signal.SIGINT)
        elif event == "kill -9":
            launcher.kill()
        elif event == "kill -9 rank":
            self.rank(1).kill()
        elif event == "restart":
            done = len(records(self.case.run))
            self.rank(1).kill()
            self.reach(done + 3)
            launcher.terminate()

    def rank(self, number: int) -> psutil.Process:
        for process in marked(self.mark):
            variables = process.environ()
            names = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
            if next((variables[name] for name in names if name in variables), "") == str(number):
                return process
        raise AssertionError(f"no process {number}: {self.log.read_text()[-4000:]}")

    def end(self) -> tuple[list[int], str]:
        """Exit codes of the launchers, and what was printed, once nothing runs any more."""
        codes = [launcher.wait(PATIENCE) for launcher in self.launchers]
        left = wait_until_gone(self.mark, PATIENCE)
        output = self.log.read_text()
        assert not left, f"{left}\n{output[-4000:]}"
        return codes, output


GRACEFUL = ("SIGTERM", "Ctrl-C", "kill -9", "restart")
"""The processes save and stop, also those whose launcher is killed."""
ENDS = {
    "SIGTERM": (-15, 1, 75, 143),
    "Ctrl-C": (1, 75, 130, -2),
    "kill -9": (-9,),
    "restart": (75,),
}
"""What the launchers make of 75: `palm-ds run` sees the true one."""
LIVES = {
    "deepspeed and torchrun": [
        ("deepspeed", "SIGTERM"),
        ("torchrun", "kill -9"),
        ("palm-ds run", "restart"),
        ("torchrun", "the end"),
    ],
    "a hostfile and mpirun": [
        ("hostfile", "Ctrl-C"),
        ("mpirun", "kill -9 rank"),
        ("mpirun", "SIGTERM"),
        ("palm-ds run", "the end"),
    ],
    "Open MPI": [("Open MPI", "kill -9 rank"), ("Open MPI", "the end")],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("lives", LIVES.values(), ids=LIVES)
def test_one_run_through_launchers_signals_and_kills(lives, case) -> None:
    """Two processes each time; every loss and the weights equal those of a run left in peace."""
    done = 0
    for way, event in lives:
        with Started(case, way, step_seconds=0 if event == "the end" else 0.5) as started:
            done = check_life(case, started, event, done)
    assert_as_in_peace(case)


def test_a_run_that_deepspeed_starts_and_a_signal_stops(case) -> None:
    """It ends as if nobody had stopped it."""
    with Started(case, "deepspeed", step_seconds=0.5) as started:
        done = check_life(case, started, "SIGTERM", 0)
    assert f"resumes from step {done}" in run_to_the_end(case.arguments)
    assert_as_in_peace(case)


def assert_as_in_peace(case: Case) -> None:
    assert losses(case.run) == losses(case.whole)
    for name in ("weights/weights.safetensors", "hf/model.safetensors"):
        assert (case.run / name).read_bytes() == (case.whole / name).read_bytes()


def supervised(folder: Path) -> list[str]:
    """`palm-ds run` around DeepSpeed with a hostfile."""
    hosts = folder / "hosts"
    hosts.write_text("localhost slots=2\n")
    launcher = deepspeed_node(hosts, 0, free_port())
    return [sys.executable, "-m", "palm_ds.cli.run", "--", *launcher]


@pytest.mark.parametrize("way", ["torchrun", "mpirun", "Open MPI", "palm-ds run and a hostfile"])
def test_a_launcher_numbers_its_processes(way: str, tmp_path: Path) -> None:
    """Without torch, which takes most of the time of a start."""
    command = LAUNCH[way](2) if way in LAUNCH else supervised(tmp_path)
    mark = uuid.uuid4().hex
    try:
        done = subprocess.run(
            [*command, str(ROOT / "tests/distributed/rank.py")],
            env=environment(tmp_path, mark),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    finally:
        clear_away(mark)
    said = [line for line in done.stdout.splitlines() if line.endswith(" of 2")]
    assert done.returncode == 0 and sorted(said) == ["0 of 2", "1 of 2"]


def check_life(case: Case, started: Started, event: str, done: int) -> int:
    """The steps that are done when nothing runs any more."""
    if event == "the end":
        codes, output = started.end()
        assert codes == [0] and f"step {case.steps}/{case.steps}" in output, output[-4000:]
        return case.steps
    started.reach(done + 5)  # past a checkpoint, which exists a step or two after its own
    started.suffer(event)
    codes, output = started.end()
    last = records(case.run)[-1]["step"]
    assert last < case.steps, "ended before the event"
    assert "2 x 1 x 4 rows (processes, accumulation, micro-batch)" in output
    assert not done or "resumes from step" in output
    if event in GRACEFUL:
        assert f"step {last} is saved; run the same command again" in output, output[-4000:]
        assert (case.run / "checkpoints" / f"step_{last:08}" / "manifest.json").exists()
        assert codes[0] in ENDS[event], output[-4000:]
    else:
        assert codes[0] in (9, 137, 247), output[-4000:]  # MPICH's, Open MPI's and deepspeed's
    return last
