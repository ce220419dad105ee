"""Which runs an ablation plans, which are still to do, and its table; a small program stands for
the training."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from palm_ds.common.errors import UserError
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.recipe.recipe import read_recipe
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import write_folder
from palm_ds.train.setup.sources import open_data
from palm_ds.train.sweeps.ablation import (
    Ablation,
    Variant,
    compare,
    run_all,
    table,
    variants,
)
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.small_tables import write_tables
from tests.helpers.warm_python import Program, run

ROOT = Path(__file__).resolve().parents[3]
MASKS, ORDER, APART = "knowledge_masking", "sentence_reordering", "sentence_distance"


def write_recipe(folder: Path, stages: Any, **changes: Any) -> Path:
    values = {
        "backbone": {"preset": "tiny", "max_positions": 64},
        "length": 64,
        "batch": "8 rows",
        "sources": {"text": {"corpus": str(folder / "corpus")}},
        "held_out": 0.1,
        "tasks": {name: {"source": "text"} for name in (MASKS, ORDER, APART)},
        "stages": stages,
        **changes,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def ablation(folder: Path, stages: Any, *, recipe: Any = None, **values: Any) -> Ablation:
    return Ablation(
        recipe=write_recipe(folder, stages, **(recipe or {})),
        ds_config=make_ds_config({"zero_optimization": {"stage": 0}}),
        out=folder / "out",
        **values,
    )


def plans(found: list[Variant]) -> dict[str, list[dict[str, Any]]]:
    return {variant.name: variant.run.recipe.curriculum.explicit() for variant in found}


CONTINUAL = {"continual": [MASKS, ORDER], "steps": 9}


def test_one_recipe_under_three_schedules_with_equal_budgets(tmp_path):
    assert plans(variants(ablation(tmp_path, CONTINUAL))) == {
        "sequential": [{MASKS: 9}, {ORDER: 9}],
        "joint": [{MASKS: 9, ORDER: 9}],
        "continual": [{MASKS: 6}, {MASKS: 3, ORDER: 9}],
    }


def test_budgets_are_those_of_the_recipe_for_any_curriculum(tmp_path):
    stages = [{MASKS: 4}, {MASKS: 2, f"{ORDER}+{MASKS}": 6}]
    both = f"{ORDER} + {MASKS}"
    found = variants(ablation(tmp_path, stages, schedules=["continual", "alternate"]))
    assert plans(found) == {
        "continual": [{MASKS: 4}, {MASKS: 2, both: 6}],
        "alternate": [{MASKS: 6, both: 6, "mix": "step"}],
    }
    tokens = {"joint": [MASKS, ORDER], "steps": "2048 tokens", "mix": "step"}
    found = variants(ablation(tmp_path, tokens, schedules=["joint"]))
    assert plans(found) == {"joint": [{MASKS: 4, ORDER: 4, "mix": "step"}]}


def test_given_steps_and_a_task_in_every_group(tmp_path):
    asked = ablation(
        tmp_path, CONTINUAL, schedules=["continual", "alternate"], steps="3", always=MASKS
    )
    both = f"{ORDER} + {MASKS}"
    assert plans(variants(asked)) == {
        "continual": [{MASKS: 2}, {MASKS: 1, ORDER: 3}],
        "alternate": [{MASKS: 3, ORDER: 3, "mix": "step"}],
        "continual+": [{MASKS: 2}, {MASKS: 1, both: 3}],
        "alternate+": [{MASKS: 3, both: 3, "mix": "step"}],
    }


def test_overrides_apply_to_all_runs(tmp_path):
    found = variants(ablation(tmp_path, CONTINUAL, overrides=["optimizer.lr=0.5", "seed=3"]))
    assert {(v.run.recipe.optimizer.lr, v.run.recipe.seed) for v in found} == {(0.5, 3)}
    assert [variant.run.folder.name for variant in found] == ["sequential", "joint", "continual"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedules": []}, "--schedules: names none; some of continual, joint"),
        ({"schedules": ["jont"]}, "--schedules: no 'jont'; did you mean \"joint\""),
        ({"schedules": ["joint", "joint"]}, "--schedules: contains a duplicate"),
        ({"steps": "many"}, "--steps: expected a whole number of steps"),
        ({"steps": "0"}, "--steps: stages: no task group has any steps"),
        ({"always": "knowledge_maskin"}, 'did you mean "knowledge_masking"'),
        ({"overrides": ["seed"]}, "expected key=value"),
        ({"recipe": {"held_out": 0}}, "held_out: 0 leaves nothing to compare on"),
        ({"recipe": {"lenght": 3}}, 'lenght: unknown key; did you mean "length"'),
    ],
)
def test_invalid_ablations_are_one_clear_line(tmp_path, values, message):
    with pytest.raises(UserError) as error:
        variants(ablation(tmp_path, CONTINUAL, **values))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_of_stages_are_refused(tmp_path):
    with pytest.raises(UserError, match="stages: a stage has 'rate' of its own, for which other"):
        variants(ablation(tmp_path, [{MASKS: 4}, {MASKS: 2, ORDER: 3, "rate": 0.3}]))


def test_tables_to_evaluate_on_are_something_to_compare_on(tmp_path):
    sources = {"text": {"corpus": "corpus", "validation": "other"}}
    asked = ablation(tmp_path, CONTINUAL, recipe={"held_out": 0, "sources": sources})
    assert len(variants(asked)) == 3


def test_a_task_in_every_group_already_is_refused(tmp_path):
    stages = {"joint": [MASKS, f"{ORDER} + {MASKS}"], "steps": 3}
    with pytest.raises(UserError, match="is already in every task group of the recipe"):
        variants(ablation(tmp_path, stages, always=MASKS))


# Running ---------------------------------------------------------------------------------------

TRAINING = '''
"""Stands for a training run: it writes a log and ends, early, as by evaluate.patience."""
import json, sys
from pathlib import Path

folder, steps, end = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder.mkdir(parents=True, exist_ok=True)
score = dict(loss=2.0, accuracy=0.5, baseline_accuracy=0.25, standard_error=0.01)
records = [
    dict(kind="evaluation", step=steps // 2, scores={}, elapsed=2.0),
    dict(kind="evaluation", step=steps - 1, scores={"knowledge_masking": score}, elapsed=4.5),
    dict(kind="event", event="end", step=steps - 1, elapsed=5.0),
]
with (folder / "metrics.jsonl").open("a") as file:
    for record in records[: 1 if end == "stopped" else None]:
        file.write(json.dumps(record) + chr(10))
sys.exit({"broken": 7, "stopped": 75}.get(end, 0))
'''


def trained(folder: Path, end: str = "done") -> Any:
    """Starts the program above, and lists the names of the runs it was started for."""
    program = folder / "training.py"
    program.write_text(TRAINING)
    started: list[str] = []

    def command(variant: Variant) -> list[str]:
        started.append(variant.name)
        assert read_recipe(variant.file).learned() == variant.run.recipe.learned()
        steps = variant.run.recipe.curriculum.steps
        return [sys.executable, str(program), str(variant.run.folder), str(steps), end]

    return command, started


def test_completed_runs_are_skipped(tmp_path, caplog):
    caplog.set_level("INFO", "palm_ds")
    write_small_corpus(tmp_path / "corpus", documents=20)
    asked = ablation(tmp_path, CONTINUAL, schedules=["joint", "sequential"])
    command, started = trained(tmp_path)
    run_all(variants(asked), command)
    assert started == ["joint", "sequential"]
    assert caplog.messages[0] == f"== joint (1 of 2): 18 steps, in {tmp_path / 'out' / 'joint'}"
    run_all(variants(asked), command)
    assert started == ["joint", "sequential"]
    assert (
        caplog.messages[-1] == f"== sequential (2 of 2): done, in {tmp_path / 'out' / 'sequential'}"
    )
    more = ablation(tmp_path, CONTINUAL, schedules=["joint", "continual"])
    run_all(variants(more), command)
    assert started == ["joint", "sequential", "continual"]
    written = read_recipe(tmp_path / "out" / "continual.yaml")
    assert written.curriculum == variants(more)[1].run.recipe.curriculum


@pytest.mark.parametrize(
    ("end", "message"),
    [("broken", "joint: the run failed with exit code 7"), ("stopped", "joint: the run stopped")],
)
def test_an_unfinished_run_stops_the_ablation_and_is_resumed_by_the_next(tmp_path, end, message):
    write_small_corpus(tmp_path / "corpus", documents=20)
    found = variants(ablation(tmp_path, CONTINUAL, schedules=["joint", "sequential"]))
    command, started = trained(tmp_path, end)
    with pytest.raises(UserError, match=message) as error:
        run_all(found, command)
    assert "\n" not in str(error.value)
    assert started == ["joint"]
    if end == "broken":  # its log says that it was done
        (tmp_path / "out" / "joint" / "metrics.jsonl").unlink()
    command, started = trained(tmp_path)
    run_all(found, command)
    assert started == ["joint", "sequential"]


def test_a_folder_of_another_recipe_is_refused_before_anything_runs(tmp_path):
    write_small_corpus(tmp_path / "corpus", documents=20)
    found = variants(ablation(tmp_path, CONTINUAL, schedules=["joint", "sequential"]))
    other = found[1].run
    other.folder.mkdir(parents=True)
    kept = other.recipe.learned() | {"seed": 5, "corpora": {}}
    (other.folder / "recipe.yaml").write_text(yaml.safe_dump(kept))
    command, started = trained(tmp_path)
    with pytest.raises(UserError, match="sequential: holds a run of a different.*seed: 5 -> 1"):
        run_all(found, command)
    assert started == []


def test_the_table_and_its_files(tmp_path):
    write_small_corpus(tmp_path / "corpus", documents=20)
    asked = ablation(tmp_path, CONTINUAL, schedules=["joint", "continual"])
    found = variants(asked)
    command, _ = trained(tmp_path)
    run_all(found, command)
    text = compare(asked, found)
    assert text.splitlines() == [
        "| task              | held out       |       joint |   continual |",
        "| ----------------- | -------------- | ----------: | ----------: |",
        "| knowledge_masking | loss           |       2.000 |       2.000 |",
        "|                   | accuracy, %    |        50.0 |        50.0 |",
        "|                   | above baseline | +25.0 ± 1.0 | +25.0 ± 1.0 |",
    ]
    page = (asked.out / "ablation.md").read_text()
    assert page.startswith("# Schedules of recipe.yaml\n\n| task")
    assert found[1].run.recipe.plan_table() in page
    record = json.loads((asked.out / "ablation.json").read_text())["schedules"]["continual"]
    assert record["steps"] == 18 and record["tokens"] == 18 * 512 and record["seconds"] == 5.0
    assert record["stages"] == [{MASKS: 6}, {MASKS: 3, ORDER: 9}]
    assert record["scores"][MASKS]["loss"] == 2.0


def test_a_task_that_only_some_schedules_have():
    score = {"loss": 1.0, "accuracy": 0.1, "baseline_accuracy": 0.2, "standard_error": 0.05}
    lines = table({"joint": {"a": score}, "alternate": {"a": score, "b": score}}).splitlines()
    assert [cell.strip() for cell in lines[4].split("|")] == [
        *("", "", "above baseline", "-10.0 ± 5.0", "-10.0 ± 5.0", ""),
    ]
    assert [cell.strip() for cell in lines[5].split("|")] == ["", "b", "loss", "-", "1.000", ""]


def test_a_task_without_baseline_or_accuracy():
    """A custom task need not define them."""
    score = {"loss": 1.0, "accuracy": None, "baseline_accuracy": None, "standard_error": None}
    cells = [line.split("|")[3].strip() for line in table({"joint": {"a": score}}).splitlines()]
    assert cells[2:] == ["1.000", "-", "-"]


# The command -----------------------------------------------------------------------------------

SLOW = """
import os, signal, subprocess, sys, time
from pathlib import Path

def leave(number, frame):
    time.sleep(0.5)  # saves
    with open(sys.argv[1], "a") as file:
        file.write(f"{sys.argv[2]} saved ")
    sys.exit(0)

signal.signal(signal.SIGINT, leave)
if sys.argv[2] == "starter":
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "rank"])
with open(sys.argv[1], "a") as file:
    file.write(f"{sys.argv[2]} ready ")
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_every_process_has_saved_and_left(tmp_path, number):
    (tmp_path / "slow.py").write_text(SLOW)
    marker = tmp_path / "marker"
    code = (
        "import signal, sys; from palm_ds.train.sweeps.subprocesses import interrupt; "
        "from palm_ds.train.sweeps.ablation import run_and_wait; "
        "signal.signal(signal.SIGTERM, interrupt); "
        f"run_and_wait([sys.executable, {str(tmp_path / 'slow.py')!r}, {str(marker)!r}, 'starter'])"
    )
    process = Program(["-c", code], env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not marker.exists() or marker.read_text().count("ready") < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 3  # with what ends it if this process is killed
    process.send_signal(number)
    assert process.wait(60) != 0
    assert marker.read_text().count("saved") == 2
    assert not any(each.is_running() for each in family)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--launcher", "no_such_launcher -n 2"], "there is no program 'no_such_launcher'"),
        (["--launcher", "deepspeed '"], '--launcher "deepspeed \'": No closing quotation'),
        (["--schedules", "joint,jont"], "--schedules: no 'jont'"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(tmp_path, more, message):
    recipe = write_recipe(tmp_path, CONTINUAL)
    ds_config = tmp_path / "machine.json"
    ds_config.write_text('{"zero_optimization": {"stage": 0}}')
    command = [ROOT / "launch" / "ablate.py", recipe, "--deepspeed_config", ds_config]
    done = run([*command, "--out", tmp_path / "out", *more], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "out").exists()


def test_completed_runs_over_tables_are_skipped(tmp_path: Path) -> None:
    """Their folders hold the recipe with the classes that were found in the rows."""
    tables = write_tables(tmp_path / "tables")
    source = {"table": str(tables / "train.tsv"), "tokenizer": str(tables / "vocab.txt")}
    mood = {"kind": "classification", "source": "rows"}
    recipe = {"sources": {"rows": source}, "tasks": {"mood": mood}, "batch": "8 examples"}
    asked = ablation(tmp_path, {"joint": ["mood"], "steps": 3}, recipe=recipe, schedules=["joint"])
    (found,) = variants(asked)
    data = open_data(found.run.recipe)
    resolved = resolve(found.run.recipe, data)
    write_folder(dataclasses.replace(found.run, recipe=resolved), {}, data)
    run_all([found], trained(tmp_path)[0])
    assert found.scores() is not None


def test_tasks_over_tables_are_compared_by_their_metrics() -> None:
    """Their accuracy has no baseline, or there is none: a regression."""
    near = {"loss": 1.0, "accuracy": None, "baseline_accuracy": None}
    scores = {"joint": {"near": {**near, "metrics": {"pearson": 0.5, "spearman": None}}}}
    lines = [line.split("|")[2:4] for line in table(scores).splitlines()[2:]]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["loss", "1.000"],
        ["pearson", "0.500"],
        ["spearman", "-"],
    ]
