"""Sweeps: which trials run, how they end and continue; a small program stands for the training."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from palm_ds.common.config import read_yaml
from palm_ds.common.errors import UserError
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.sweeps.search import Search, Trial, report, value_of
from palm_ds.train.sweeps.search_space import read_sweep, search_space
from tests.helpers.warm_python import Program
from tests.train.sweeps.test_search_space import write

TRAINING = '''
"""Stands for a training run whose score depends on its learning rate. Without what takes Python
most of its start: a sweep starts many."""
import json, math, sys, time
from pathlib import Path

recipe, folder, seconds = open(sys.argv[1]).read(), Path(sys.argv[2]), float(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
with (folder / "started").open("a") as file:
    file.write("once ")
lr = float(recipe.partition("  lr: ")[2].split()[0])
if (folder.parent / f"fail_{folder.name}").exists():
    print("error: rows.tsv:3: no label")
    sys.exit(2)
if (folder.parent / f"diverge_{folder.name}").exists():
    sys.exit(3)
quality = -abs(math.log10(lr) + 4) - (0.1 if "batch: 4 examples" in recipe else 0.0)
with (folder / "metrics.jsonl").open("w") as file:
    def write(**record):
        file.write(json.dumps(record) + chr(10))
        file.flush()
    for step in (5, 10, 15):
        time.sleep(seconds)
        undefined = (folder.parent / f"undefined_{folder.name}").exists()
        f1 = None if undefined else quality * 15 / step
        score = {"loss": -quality, "accuracy": 0.0, "metrics": {"f1": f1}}
        write(kind="evaluation", step=step, scores={"topic": score})
    write(kind="event", event="end", step=15)
'''
ONE: list[dict[str, str]] = [{}]
SPACE = {
    "optimizer.lr": {"low": 1e-6, "high": 1e-2, "log": True},
    "batch": ["4 examples", "8 examples"],
}


def sweep_of(folder: Path, **changes: Any) -> Callable[..., Search]:
    path = write(folder, **{"space": SPACE, "trials": 8, **changes})
    return lambda out=folder / "out": Search(search_space(read_sweep(path), "sweep.yaml"), out)


def training(folder: Path, seconds: float = 0.0) -> Callable[[Trial], Sequence[str]]:
    program = folder / "training.py"
    program.write_text(TRAINING)

    def command(trial: Trial) -> list[str]:
        given = [str(program), str(trial.file), str(trial.folder), str(seconds)]
        return [sys.executable, "-S", "-E", *given]

    return command


def trials_of(search: Search) -> list[tuple[str, float | None, dict[str, Any]]]:
    return [(x.state.name, x.value, x.params) for x in search.trials()]


def test_a_sweep_finds_the_best_and_writes_its_recipe(tmp_path: Path, capfd: Any) -> None:
    search = sweep_of(tmp_path)()
    search.run(training(tmp_path), ONE)
    text = report(search)
    found = json.loads((tmp_path / "out/sweep.json").read_text())
    assert len(found["trials"]) == 8 and found["metric"] == "topic.f1"
    values = [x["value"] for x in found["trials"] if x["state"] == "done"]
    assert values == sorted(values, reverse=True) and len(values) >= 5
    best = found["trials"][0]
    assert best["number"] == found["best"]
    assert text.splitlines()[2].split("|")[1].strip() == str(best["number"])
    recipe = read_yaml(tmp_path / "out/best.yaml")
    assert make_recipe(recipe).optimizer.lr == best["chosen"]["optimizer.lr"]
    assert recipe["batch"] == best["chosen"]["batch"]
    assert recipe == read_yaml(tmp_path / f"out/{best['folder']}.yaml")
    assert text in (tmp_path / "out/sweep.md").read_text()
    assert capfd.readouterr() == ("", "")  # nothing of Optuna's


def test_the_same_seed_gives_the_same_trials_also_if_interrupted(tmp_path: Path) -> None:
    """And more trials continue where the first ones ended."""
    make = sweep_of(tmp_path, trials=12)
    whole, command = make(), training(tmp_path)
    whole.run(command, ONE)
    (tmp_path / "parts").mkdir()
    for trials in (3, 4, 12):
        sweep_of(tmp_path, trials=trials)(tmp_path / "again").run(command, ONE)
    assert trials_of(make(tmp_path / "again")) == trials_of(whole)
    other = sweep_of(tmp_path, trials=3, seed=2)(tmp_path / "other")
    other.run(command, ONE)
    assert trials_of(other)[0][2] != trials_of(whole)[0][2]


def test_bad_trials_are_pruned_and_stopped(tmp_path: Path) -> None:
    space = {"optimizer.lr": {"low": 1e-6, "high": 1e-2, "log": True}}
    search = sweep_of(tmp_path, space=space, trials=14, sampler="random")()
    search.run(training(tmp_path, 0.05), ONE)
    states = [state for state, _, _ in trials_of(search)]
    assert states[:5] == ["COMPLETE"] * 5 and states.count("PRUNED") >= 2
    for frozen in search.trials():
        if frozen.state.name == "PRUNED":
            at = max(frozen.intermediate_values)
            before = [x for x in search.trials()[: frozen.number] if x.state.name == "COMPLETE"]
            median = statistics.median(x.intermediate_values[at] for x in before)
            assert max(frozen.intermediate_values.values()) < median


def test_a_trial_that_was_to_be_pruned_is_pruned_after_an_interruption(tmp_path: Path) -> None:
    """A sweep may end before the trial that it stops."""
    space = {"optimizer.lr": {"low": 1e-6, "high": 1e-2, "log": True}}
    make = sweep_of(tmp_path, space=space, trials=14, sampler="random")
    whole, command = make(tmp_path / "whole"), training(tmp_path, 0.05)
    whole.run(command, ONE)
    number = [state for state, _, _ in trials_of(whole)].index("PRUNED")
    at = max(whole.trials()[number].intermediate_values)
    first = sweep_of(tmp_path, space=space, trials=number, sampler="random")()
    first.run(command, ONE)
    trial = first._ask()
    with ExitStack() as open_files:
        running = first._start(trial, command, {}, 0, open_files)
        while not running.pruned:
            first._read_evaluations(running)
        running.child.wait()
    again = sweep_of(tmp_path, space=space, trials=number + 1, sampler="random")()
    again.run(command, ONE)
    frozen = again.trials()[number]
    assert (frozen.state.name, max(frozen.intermediate_values)) == ("PRUNED", at)


def test_failed_trials_are_run_again_and_diverged_ones_are_not(tmp_path: Path) -> None:
    make, command = sweep_of(tmp_path, trials=4), training(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "fail_trial_0001").touch()
    (out / "diverge_trial_0002").touch()
    first = make()
    first.run(command, ONE)
    assert first.failed == {1: "error: rows.tsv:3: no label"}
    text = report(first)
    assert "| failed" in text and "| diverged" in text
    (out / "fail_trial_0001").unlink()
    second = make()
    second.run(command, ONE)
    assert second.failed == {}
    assert [state for state, _, _ in trials_of(second)].count("COMPLETE") == 3
    started = [len((out / f"trial_000{n}/started").read_text().split()) for n in range(4)]
    assert started == [1, 2, 1, 1]


def test_three_failures_in_a_row_end_the_sweep(tmp_path: Path) -> None:
    search = sweep_of(tmp_path)()
    for number in range(8):
        (tmp_path / f"out/fail_trial_{number:04}").touch()
    with pytest.raises(UserError, match=r"3 trials in a row failed, .* rows\.tsv:3: no label; see"):
        search.run(training(tmp_path), ONE)
    assert len(search.trials()) == 3


def test_a_metric_that_the_evaluated_rows_do_not_define_fails_its_trial(tmp_path: Path) -> None:
    search = sweep_of(tmp_path, trials=2)()
    (tmp_path / "out/undefined_trial_0000").touch()
    search.run(training(tmp_path), ONE)
    assert search.failed == {0: "topic.f1 has no value on the evaluated rows"}
    assert [state for state, _, _ in trials_of(search)] == ["RUNNING", "COMPLETE"]
    assert "| failed" in report(search)
    assert json.loads((tmp_path / "out/sweep.json").read_text())["best"] == 1


def test_another_sweep_in_the_folder_is_refused(tmp_path: Path) -> None:
    sweep_of(tmp_path)()
    with pytest.raises(UserError, match="holds another sweep: seed: 1 -> 2; choose another --out"):
        sweep_of(tmp_path, seed=2)()
    sweep_of(tmp_path, trials=30)()  # more trials are not another sweep


def test_an_unknown_metric_ends_the_sweep_with_the_known_ones(tmp_path: Path) -> None:
    search = sweep_of(tmp_path, metric="topic.f2")()
    with pytest.raises(UserError, match="topic has no 'f2'; known: accuracy, f1, loss"):
        search.run(training(tmp_path, 0.05), ONE)


@pytest.mark.parametrize("metric", ["topic", "mean"])
def test_a_first_metric_of_which_less_is_better_is_not_maximized(
    metric: str, tmp_path: Path
) -> None:
    scores = {"topic": {"loss": 1.0, "accuracy": None, "metrics": {"hamming_loss": 0.25}}}
    path = write(tmp_path, space=SPACE, metric=metric)
    with pytest.raises(UserError, match=f"^metric: {metric}: lower is better for hamming_loss"):
        value_of(scores, search_space(read_sweep(path), "sweep.yaml"))
    path = write(tmp_path, space=SPACE, metric=metric, direction="minimize")
    assert value_of(scores, search_space(read_sweep(path), "sweep.yaml")) == 0.25


def test_two_jobs_run_at_the_same_time(tmp_path: Path) -> None:
    search = sweep_of(tmp_path, trials=4, pruner="none")()
    search.run(training(tmp_path), [{}, {}])
    assert [state for state, _, _ in trials_of(search)] == ["COMPLETE"] * 4


@pytest.mark.slow
def test_a_killed_sweep_continues_its_trial(tmp_path: Path) -> None:
    """The whole program is killed, with its trial."""
    make = sweep_of(tmp_path, trials=2)
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.train.sweeps.test_search import ONE, sweep_of, training\n"
        "folder = Path(sys.argv[1])\n"
        "sweep_of(folder, trials=2)().run(training(folder, 30), ONE)\n"
    )
    child = Program(["-c", program, tmp_path], cwd=Path(__file__).resolve().parents[3])
    started = tmp_path / "out/trial_0000/started"
    deadline = time.monotonic() + 60
    while not started.exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    for process in [*psutil.Process(child.pid).children(recursive=True), child]:
        process.kill()
    child.wait()
    search = make()
    search.run(training(tmp_path), ONE)
    assert [state for state, _, _ in trials_of(search)] == ["COMPLETE"] * 2
    assert started.read_text().split() == ["once", "once"]
