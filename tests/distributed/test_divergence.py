"""The complete command after a step that ruins the weights: back to good ones, or a true report."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from palm_ds.common.errors import MISTAKE, NONFINITE, STOPPED
from palm_ds.runtime.checkpoint import checkpoint
from tests.distributed.random_spikes import ruin
from tests.distributed.test_commands import (
    MASKS,
    PRETRAIN,
    ROOT,
    SECONDS,
    losses,
    records,
    write_machine,
    write_recipe,
)
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.warm_python import clear_away, start_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SPIKING = str(ROOT / "tests" / "distributed" / "spiking.py")
BAD = 13
"""The step (from 0) whose update ruins the weights; the losses show it from the next one on."""
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spiking")
    write_small_corpus(folder / "corpus")
    return write_recipe(
        folder,
        folder / "corpus",
        tasks={MASKS: {"source": "text"}},
        stages=[{MASKS: 22}],
        held_out=0.0,
        log={"every": 3},
        save={"every": 6},
    )


def train(
    recipe: Path, run: Path, *overrides: str, code: int = 0, world: int = 2, **variables: int
) -> str:
    """The output of process 0. `variables`: of spiking.py."""
    ds_config = write_machine(run.parent, zero_optimization={"stage": 1})
    words = [SPIKING, PRETRAIN, recipe, "--deepspeed_config", ds_config, "--run_dir", run]
    given = {f"PALM_TEST_{name.upper()}": str(value) for name, value in variables.items()}
    programs = start_together(world, [*words, *overrides], env={"PYTHONPATH": str(ROOT), **given})
    try:
        output = programs[0].communicate(timeout=SECONDS)[0]
        assert programs[0].returncode == code, output[-4000:]
        return output
    finally:
        clear_away(programs)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in records(run, "event") if event["event"] == kind]


def test_rolled_back_killed_and_resumed_to_the_same_curve(recipe: Path, tmp_path: Path) -> None:
    """Killed before the spike is seen and after the rollback."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    back = "loss_spike.action=rollback"
    output = train(recipe, whole, back, bad_step=BAD, slow_rank=1)
    assert len(re.findall(r"rank 1 on \S+ is slow: its forward passes: [\d.]+ times", output)) == 1
    assert "rank 0 on" not in output
    assert "step 15: the loss of knowledge_masking is " in output
    assert "restored step 12, steps 13 to 15 are left out of training; continues with step 16 " in (
        output
    )
    assert len(json.loads((whole / "corpora_verified.json").read_text())) == 1
    for moment in (14, 17):
        train(recipe, killed, back, code=KILLED, bad_step=BAD, killed_step=moment)
    train(recipe, killed, back, bad_step=BAD)
    assert losses(killed) == losses(whole)
    assert losses(whole)[-1][MASKS] < losses(whole)[0][MASKS]
    last = [checkpoint.open_published(run / "checkpoints/step_00000022") for run in (whole, killed)]
    assert set(last[0].parameters.values()) == {22 - 3}
    hashes = [json.loads((one.path / "manifest.json").read_text())["files"] for one in last]
    assert hashes[0] == hashes[1]


def test_ruined_weights_that_were_saved_are_never_returned_to(recipe: Path, tmp_path: Path) -> None:
    """A good run that is resumed with an absurd learning rate, which is then corrected."""
    run, often = tmp_path / "run", "save.every=5"
    train(recipe, run, often, code=STOPPED, world=1, stopped_step=13)
    back = [often, "loss_spike.action=rollback", "failure_limit=1"]
    output = train(recipe, run, *back, "optimizer.lr=300", code=NONFINITE, world=1)
    assert "The weights are not good" in output and "rollbacks in a row" in output
    kept = checkpoint.steps_in(run / "checkpoints")[0]
    assert kept <= 14, kept
    train(recipe, run, *back, world=1)
    assert losses(run)[-1][MASKS] < losses(run)[0][MASKS]


@pytest.mark.exhaustive  # a chosen step by default
def test_runs_ruined_in_random_steps_never_end_as_if_they_were_good(
    tmp_path: Path, every: bool
) -> None:
    """More of them: python -m tests.distributed.random_spikes."""
    runs = 6 if every else 2
    ends = ruin(tmp_path, runs=runs, seed=2)
    assert ends.total() == runs and set(ends) <= {"good", "stopped", "stopped, then good"}


def test_a_damaged_corpus_ends_the_run_before_it_saves(recipe: Path, tmp_path: Path) -> None:
    """Sizes are right: only the hash differs."""
    corpus = shutil.copytree(recipe.parent / "corpus", tmp_path / "corpus")
    shard = next(corpus.glob("data-*.arrow"))
    data = bytearray(shard.read_bytes())
    at = data.rindex(b"w")  # in the name of a document or a column
    data[at - 400] ^= 1
    shard.write_bytes(data)
    override = f"sources.text.corpus={corpus}"
    output = train(recipe, tmp_path / "run", override, code=MISTAKE)
    assert f"{shard.name} was changed or damaged (its sha256 differs from" in output
    assert checkpoint.steps_in(tmp_path / "run" / "checkpoints") == []


def test_a_stopped_run_says_so_and_resumes_with_other_settings(
    recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    output = train(recipe, run, "loss_spike.action=stop", code=NONFINITE, world=1, bad_step=BAD)
    (line,) = [line for line in output.splitlines() if line.startswith("Stopped: ")]
    assert "The weights are not good: since step 15 the loss of knowledge_masking is " in line
    assert "the last checkpoint from before is step 12. Run the command again with a lower" in line
    assert checkpoint.steps_in(run / "checkpoints") == [12, 6]
    change = ("loss_spike.action=rollback", "optimizer.lr=0.001", "optimizer.clip=0.5")
    output = train(recipe, run, *change, "log.every=2", world=1)
    assert "resumes from step 12" in output
    wanted = ["loss_spike.action: 'stop' -> 'rollback'", "log.every: 3 -> 2"]
    wanted += ["optimizer.lr: 0.002 -> 0.001", "optimizer.clip: 1.0 -> 0.5"]
    (event,) = events(run, "changed")
    assert (event["step"], set(event["changes"])) == (12, set(wanted))
    (record,) = map(json.loads, (run / "changes.jsonl").read_text().splitlines())
    assert (record["step"], set(record["changes"])) == (12, set(wanted))
    assert yaml.safe_load((run / "recipe.yaml").read_text())["optimizer"]["lr"] == 0.001
    assert checkpoint.steps_in(run / "checkpoints")[0] == 22
