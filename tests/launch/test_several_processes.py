"""What the processes of one start print together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.test_commands import MASKS, PRETRAIN, write_machine, write_recipe
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.warm_python import Program, clear_away, start_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
PATIENCE = 120


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("together")
    write_small_corpus(folder / "corpus")
    recipe = write_recipe(folder, folder / "corpus", stages=[{MASKS: 200}], evaluate={})
    return recipe, write_machine(folder)


@pytest.fixture
def started() -> Iterator[list[Program]]:
    programs: list[Program] = []
    yield programs
    clear_away(programs)


def outputs(programs: list[Program]) -> str:
    return "".join(program.communicate(PATIENCE)[0] for program in programs)


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("early", [True, False], ids=["before they have met", "once they have"])
def test_a_mistake_that_all_make_is_one_line(early: bool, files, started, tmp_path: Path) -> None:
    recipe, ds_config = files
    words = [PRETRAIN, recipe, "--deepspeed_config", ds_config, "--run_dir", tmp_path / "run"]
    wrong = "optimizer.rate=1" if early else f"sources.text.corpus={tmp_path}/nowhere"
    started += start_together(2, [*words, wrong], env={})
    started[0].wait(PATIENCE)
    if early:
        os.kill(started[1].pid, 15)  # as a launcher does
    text = outputs(started)
    assert len(errors(text)) == 1 and "Traceback" not in text, text
    assert started[0].wait() == 2 and (early or started[1].wait() == 2)


def test_a_mistake_of_one_process_is_printed(files, started, tmp_path: Path) -> None:
    """Nobody ends it: rank 0 has not made it."""
    recipe, ds_config = files
    words = [PRETRAIN, recipe, "--deepspeed_config", ds_config, "optimizer.rate=1"]
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    started.append(Program(words, env=place | {"MASTER_PORT": "29500"}))
    text = outputs(started)
    assert len(errors(text)) == 1 and started[0].wait() == 2


def test_more_processes_than_cores_are_named(files, started, tmp_path: Path) -> None:
    recipe, ds_config = files
    run = tmp_path / "run"
    words = [PRETRAIN, recipe, "--deepspeed_config", ds_config, "--run_dir", run, "--check"]
    code = f"import os, runpy, sys; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); "
    code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    started += start_together(2, ["-c", code, *words], env={})
    text = outputs(started)
    assert "all checks passed" in text, text
    assert text.count("its 2 processes may use 1 core only: ask the batch system for more") == 1
