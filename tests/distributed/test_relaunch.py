"""The complete command with other processes and another ZeRO stage than before, and extended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.distributed.test_commands import (
    APART,
    MASKS,
    ORDER,
    PACED,
    PRETRAIN,
    ROOT,
    SECONDS,
    SHORT_STAGES,
    largest_difference,
    losses,
    plain,
    records,
    wait_for,
    write_machine,
    write_recipe,
)
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.warm_python import clear_away, start_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ALONE, TWO = 1, 2
SAVE = {"every": 2, "keep": 3}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_small_corpus(folder / "corpus")
    return folder / "corpus"


class Started:
    """A running command, which is killed or waited for; nothing of it remains."""

    def __init__(
        self, world: int, recipe: Path, ds_config: Path, run: Path, *more: str, slowly: bool = False
    ):
        words = [PRETRAIN, recipe, "--deepspeed_config", ds_config, "--run_dir", run, *more]
        words = [PACED, *words] if slowly else words
        self.programs = start_together(world, words, env={"PYTHONPATH": str(ROOT)})
        self.run = run

    def cut(self, after: int) -> None:
        """SIGKILL all of its processes once that many steps are logged."""
        try:
            wait_for(self.run, after, self.programs[0], self.programs[0].output)
        finally:
            clear_away(self.programs)

    def end(self, code: int = 0) -> str:
        """The output of process 0, when all have ended with `code`."""
        try:
            outputs = [program.communicate(timeout=SECONDS)[0] for program in self.programs]
            for program, output in zip(self.programs, outputs, strict=True):
                assert program.returncode == code, output[-4000:]
            return outputs[0]
        finally:
            clear_away(self.programs)


def test_two_processes_then_one_then_two(small, tmp_path) -> None:
    """With ZeRO 1, 3 and 2, just by starting it again: the curve of a plain torch loop."""
    recipe, run = write_recipe(tmp_path, small, stages=SHORT_STAGES, save=SAVE), tmp_path / "run"
    machines = [write_machine(tmp_path, zero_optimization={"stage": s}) for s in (1, 3, 2)]
    first = Started(TWO, recipe, machines[0], run, slowly=True)
    try:
        wait_for(run, 1, first.programs[0], first.programs[0].output)
        second = Started(ALONE, recipe, machines[0], run).end(code=2)
    finally:
        first.cut(after=5)
    assert "another run is using it: process" in second and "Traceback" not in second
    Started(ALONE, recipe, machines[1], run, slowly=True).cut(after=9)
    output = Started(TWO, recipe, machines[2], run).end()
    assert "resumes with 2 processes, ZeRO 2, fp32; saved with 1 process, ZeRO 3, fp32" in output
    assert "run.lock: taken over from process" in output
    assert not (run / "run.lock").exists()
    found = losses(run)
    assert len(found) == 12
    assert largest_difference(found, plain(tmp_path, recipe)) < 1e-5


def write_longer_recipe(folder: Path, recipe: Path) -> Path:
    """The same encoder and text, with one more task and another plan."""
    values = yaml.safe_load(recipe.read_text())
    values["tasks"][APART] = {"source": "text"}
    values["stages"] = [{f"{ORDER} + {MASKS}": 4, f"{APART} + {MASKS}": 6}]
    values["schedule"] = {"kind": "constant", "warmup": 100_000}
    path = folder / "longer.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.exhaustive  # test_engine.py extends a run by default
def test_extended_by_a_task(small, tmp_path) -> None:
    tasks = {MASKS: {"source": "text"}, ORDER: {"source": "text"}}
    stages = [{MASKS: 4}, {f"{ORDER} + {MASKS}": 4}]
    recipe = write_recipe(tmp_path, small, tasks=tasks, stages=stages, save=SAVE)
    one = write_machine(tmp_path, zero_optimization={"stage": 1})
    three = write_machine(tmp_path, zero_optimization={"stage": 3})
    old, new = tmp_path / "old", tmp_path / "new"
    Started(ALONE, recipe, one, old).end()
    longer = write_longer_recipe(tmp_path, recipe)
    missing = Started(ALONE, longer, one, new, "--extend", str(tmp_path / "none")).end(code=2)
    assert "no checkpoint in" in missing and "Traceback" not in missing
    extend = ("--extend", str(old))
    Started(ALONE, longer, three, new, *extend, slowly=True).cut(after=6)
    output = Started(TWO, longer, one, new, *extend).end()
    assert "resumes with 2 processes, ZeRO 1" in output
    assert len(losses(new)) == 10
    # With a learning rate of next to nothing the old weights are what they were (how losses go on
    # with moments and all is in test_engine.py).
    weights = [load_file(run / "weights" / "weights.safetensors") for run in (old, new)]
    added = set(weights[1]) - set(weights[0])
    assert added == {f"heads.{APART}.out.weight", f"heads.{APART}.out.bias"}
    # Names are sorted in these recipes: the new task's id is 1, and the row of 1 is that of 2 now.
    before, after = (each.pop("backbone.task.weight") for each in weights)
    assert (after[[0, 2]] - before[[0, 1]]).abs().max() < 1e-4
    assert (after[1] - before[2]).abs().max() > 1e-2
    for name, before in weights[0].items():
        assert (weights[1][name] - before).abs().max() < 1e-4, name
    events = " ".join(str(record) for record in records(new, "event"))
    assert "resume" in events


def test_a_run_that_cannot_be_extended_is_one_clear_line(small, tmp_path) -> None:
    tasks = {MASKS: {"source": "text"}, ORDER: {"source": "text", "most": 3}}
    recipe = write_recipe(tmp_path, small, tasks=tasks, stages=[{f"{ORDER} + {MASKS}": 2}])
    ds_config, old = write_machine(tmp_path), tmp_path / "old"
    Started(ALONE, recipe, ds_config, old).end()
    longer = write_longer_recipe(tmp_path, recipe)
    values: dict[str, Any] = yaml.safe_load(longer.read_text())
    for change, wanted in (
        ({"backbone": {**values["backbone"], "num_layers": 3}}, "backbone.num_layers: 2 -> 3"),
        (
            {"tasks": {**values["tasks"], ORDER: {"source": "text", "most": 4}}},
            "settings and classes that it has there",
        ),
        ({"init_from": str(old / "weights")}, "leave one out"),
    ):
        longer.write_text(yaml.safe_dump({**values, **change}))
        output = Started(ALONE, longer, ds_config, tmp_path / "new", "--extend", str(old)).end(
            code=2
        )
        assert wanted in output and "Traceback" not in output
        assert len([line for line in output.splitlines() if "error" in line]) == 1
