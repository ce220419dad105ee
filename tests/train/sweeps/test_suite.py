"""Which runs a suite plans, how it runs them, and its table; a small program stands for the
training in all tests but one."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from palm_ds.common.errors import UserError
from palm_ds.train.sweeps.suite import (
    KNOWN_DATA_SETS,
    Suite,
    SuiteRun,
    read_suite,
    run_all,
    suite_runs,
)
from palm_ds.train.sweeps.suite_table import compare
from tests.helpers.small_tables import TINY, write_tables
from tests.helpers.warm_python import Program, python, run

ROOT = Path(__file__).resolve().parents[3]
GLUE = {"CoLA": "tsv", "SST-2": "tsv", "STS-B": "tsv", "tnews": "json", "mine": "csv"}


RECIPES = {"template": "", "data": "", "recipes": ["x.yaml"]}


def write_layout(folder: Path) -> Path:
    """Folders as GLUE and CLUE have them; a template."""
    for name, ending in GLUE.items():
        (folder / "data" / name).mkdir(parents=True)
        for part in ("train", "dev"):
            (folder / "data" / name / f"{part}.{ending}").write_text("")
    (folder / "data/notes").mkdir()
    vocabulary = write_tables(folder / "tables") / "vocab.txt"
    template = {"backbone": TINY, "length": 32, "batch": "8 examples", "optimizer": {"lr": 1e-3}}
    (folder / "template.yaml").write_text(yaml.safe_dump(template))
    return vocabulary


def write_suite(folder: Path, **values: Any) -> Path:
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def from_template(folder: Path, **values: Any) -> Path:
    given = {"template": str(folder / "template.yaml"), "data": str(folder / "data"), "seeds": 1}
    return write_suite(folder, **{**given, **values})


TRAINING = '''
"""Stands for a training run: it writes a log and ends as instructed."""
import json, sys, time
from pathlib import Path

folder, seed, end = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder.mkdir(parents=True, exist_ok=True)
with (folder / "started").open("a") as file:
    file.write(f"{time.time()}\\n")
if end == "broken":
    print("a line")
    print("error: train.tsv:7: no label")
    print("another")
    sys.exit(2)
time.sleep(float(sys.argv[4]))
score = lambda value: {"names": {"accuracy": 0.1, "metrics": {"f1": value, "recall": 0.5}}}
records = [
    dict(kind="evaluation", step=5, scores=score(seed / 10)),
    dict(kind="evaluation", step=10, scores=score(0.05)),
    dict(kind="event", event="end", step=10),
]
if end == "best":
    records.insert(1, dict(kind="event", event="best", step=5))
with (folder / "metrics.jsonl").open("w") as file:
    for record in records[: 1 if end == "stopped" else None]:
        file.write(json.dumps(record) + chr(10))
if end == "stopped":
    sys.exit(75)
'''


def made(folder: Path, names: str = "ab", seeds: int = 3) -> list[SuiteRun]:
    return [
        SuiteRun(name=name, seed=seed, values={"seed": seed}, folder=folder / name / f"seed_{seed}")
        for name in names
        for seed in range(1, seeds + 1)
    ]


def training(folder: Path, ends: Any = None, seconds: float = 0) -> Any:
    program = folder / "training.py"
    program.write_text(TRAINING)

    def command(member: SuiteRun) -> list[str]:
        end = (ends or {}).get(member.title, "done")
        seed, sleep = str(member.seed), str(seconds)
        return [sys.executable, str(program), str(member.folder), seed, end, sleep]

    return command


# Which runs ------------------------------------------------------------------------------------


def test_folders_as_glue_and_clue_have_them(tmp_path):
    vocabulary = write_layout(tmp_path)
    sets = {
        "mine": {"task": {"kind": "multi_label"}, "best": "micro_f1", "overrides": ["length=64"]},
        "CoLA": {"overrides": ["optimizer.lr=0.5"]},
    }
    path = from_template(
        tmp_path, sets=sets, seeds=[3, 5], epochs=4, overrides=["batch=4 examples"]
    )
    found = suite_runs(read_suite(path, ["held_out=0"]), tmp_path / "out")
    assert [m.title for m in found][:2] == ["CoLA, seed 3", "CoLA, seed 5"]
    assert len(found) == 2 * len(GLUE)
    values = {m.name: m.values for m in found if m.seed == 5}
    cola = values["CoLA"]
    assert cola["sources"]["CoLA"] == {
        "table": str(tmp_path / "data/CoLA/train.tsv"),
        "validation": str(tmp_path / "data/CoLA/dev.tsv"),
        "read": {"header": False, "columns": {"text_a": 3, "label": 1}},
    }
    assert (cola["evaluate"], cola["seed"]) == ({"best": "CoLA.matthews"}, 5)
    assert (cola["optimizer"], cola["stages"]) == ({"lr": 0.5}, [{"CoLA": "4 epochs"}])
    assert all(v["batch"] == "4 examples" and v["held_out"] == 0 for v in values.values())
    assert values["STS-B"]["tasks"]["STS-B"]["kind"] == "regression"
    assert values["tnews"]["sources"]["tnews"]["read"]["format"] == "jsonl"
    assert values["mine"]["tasks"]["mine"] == {"kind": "multi_label", "source": "mine"}
    assert values["mine"]["evaluate"] == {"best": "mine.micro_f1"}
    assert (values["mine"]["length"], values["SST-2"]["length"]) == (64, 32)
    assert vocabulary.is_file()


def test_a_set_whose_files_have_other_names_and_the_same_steps_for_all(tmp_path):
    write_layout(tmp_path)
    folder = tmp_path / "data/odd"
    folder.mkdir()
    for name in ("in_domain.tsv", "probe.tsv"):
        (folder / name).write_text("text_a\tlabel\na\tb\n")
    sets = {"odd": {"train": "in_*.tsv", "dev": "probe.tsv"}}
    path = from_template(tmp_path, sets=sets, only=["odd", "CoLA"], steps=40)
    found = {m.name: m.values for m in suite_runs(read_suite(path), tmp_path / "out")}
    assert found["odd"]["sources"]["odd"]["table"] == str(folder / "in_domain.tsv")
    assert {name: v["stages"] for name, v in found.items()} == {
        "odd": [{"odd": 40}],
        "CoLA": [{"CoLA": 40}],
    }


def test_overrides_of_what_is_filled_in(tmp_path):
    """Also what KNOWN_DATA_SETS says of a set, which stays as it is."""
    write_layout(tmp_path)
    own = ["tasks.CoLA.smoothing=0.1", "sources.CoLA.read.columns.label=2", "stages=[{CoLA: 7}]"]
    path = from_template(tmp_path, sets={"CoLA": {"overrides": own}}, only=["CoLA"])
    (run,) = suite_runs(read_suite(path, ["tasks.CoLA.positive='1'"]), tmp_path / "out")
    task = {"kind": "classification", "source": "CoLA", "smoothing": 0.1, "positive": "1"}
    assert run.values["tasks"] == {"CoLA": task} and run.values["stages"] == [{"CoLA": 7}]
    assert run.values["sources"]["CoLA"]["read"]["columns"] == {"text_a": 3, "label": 2}
    assert KNOWN_DATA_SETS["cola"]["read"]["columns"] == {"text_a": 3, "label": 1}


def test_a_template_has_no_tasks(tmp_path):
    write_layout(tmp_path)
    template = yaml.safe_load((tmp_path / "template.yaml").read_text())
    (tmp_path / "template.yaml").write_text(yaml.safe_dump({**template, "tasks": {"mine": {}}}))
    with pytest.raises(UserError, match="template.yaml has `tasks`, which each data set has of"):
        suite_runs(read_suite(from_template(tmp_path)), tmp_path / "out")


def test_recipe_files_with_their_data_elsewhere(tmp_path):
    recipes = [str(ROOT / f"launch/recipes/finetune/{name}.yaml") for name in ("rte", "sst2")]
    change = ["init_from=''", "backbone={preset: tiny, max_positions: 512}"]
    suite = Suite(recipes=recipes, data="/glue", seeds=2, overrides=change)
    found = suite_runs(suite, tmp_path)
    assert [m.title for m in found] == [f"{n}, seed {s}" for n in ("rte", "sst2") for s in (1, 2)]
    assert found[0].values["sources"]["rte"]["table"] == "/glue/RTE/train.tsv"
    assert found[0].values["sources"]["rte"]["validation"] == "/glue/RTE/dev.tsv"
    named = Suite(recipes={"x": recipes[0]}, only=["x"], seeds=1, overrides=change)
    assert [m.name for m in suite_runs(named, tmp_path)] == ["x"]


@pytest.mark.parametrize("how", [{"folds": 3}, {"data": "elsewhere"}])
@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"mine": None}, "mine, seed 1.*: sources.mine: expected keys and values, got null"),
        ([], "mine, seed 1.*: sources: expected keys and values, got"),
        ({"mine": "x.tsv"}, "mine, seed 1.*: sources.mine: expected keys and values, got "),
    ],
)
def test_a_wrong_source_is_named_by_the_recipes_own_check(tmp_path, how, sources, message) -> None:
    file = tmp_path / "mine.yaml"
    task = {"kind": "classification", "source": "mine"}
    values = {"backbone": {"preset": "tiny"}, "sources": sources, "tasks": {"mine": task}}
    file.write_text(yaml.safe_dump({**values, "batch": "4 examples", "stages": [{"mine": 1}]}))
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(UserError, match=message):
        suite_runs(Suite(recipes=[str(file)], seeds=1, **how), tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"template": "", "data": ""}, "give `recipes`, or `template` and `data`"),
        ({"data": ""}, "data: missing"),
        ({"data": "nowhere"}, "data: nowhere is not a folder"),
        ({"seeds": 0}, "seeds: expected at least one"),
        ({"seeds": [1, 1]}, "seeds: expected at least one, each once"),
        ({"only": ["SST2"]}, "no data set 'SST2'; did you mean \"SST-2\""),
        ({"sets": {"x": {}}}, "no data set 'x'"),
        ({"sets": ["x"]}, "sets: expected keys and values, got "),
        (
            {"template": "", "data": "", "recipes": ["a/x.yaml", "b/x.yaml"]},
            "recipes: two are called 'x'; name them: {NAME: FILE, ...}",
        ),
        ({"sets": {"mine": {"rad": {}}}}, "sets.mine.rad: unknown key; did you mean"),
        ({"sets": {"mine": {"dev": "test.*"}}, "only": ["mine"]}, "mine: no file test.*; name it"),
        ({"sets": {"mine": {"train": "all.*"}}, "only": ["mine"]}, "mine: no file all"),
        ({"overrides": ["lenght=3"], "only": ["mine"]}, "mine, seed 1: lenght: unknown key"),
        ({"sets": {"mine": {"group": "context"}}}, "sets.mine.group: for folds; set `folds`"),
        ({"recipe": "x"}, "recipe: unknown key"),
        ({"overrides": ["seed=7"]}, "override 'seed=7': each run has one of `seeds`; list it"),
        ({"sets": {"mine": {"overrides": ["seed=7"]}}}, "override 'seed=7': each run has one of"),
        ({**RECIPES, "epochs": 1}, "epochs: is for a `template`; set it in the `recipes`"),
        ({**RECIPES, "steps": 9}, "steps: is for a `template`"),
        ({**RECIPES, "sets": {"x": {"best": "f1"}}}, "sets.x.best: is for a `template`"),
    ],
)
def test_mistakes_in_the_suite_are_errors_before_anything_runs(tmp_path, values, message):
    write_layout(tmp_path)
    path = from_template(tmp_path, **values)
    with pytest.raises(UserError, match=message) as error:
        suite_runs(read_suite(path), tmp_path / "out")
    assert "\n" not in str(error.value)


def test_files_outside_the_folder_of_the_data_set(tmp_path):
    write_layout(tmp_path)
    (tmp_path / "more").mkdir()
    for name in ("all.tsv", "held_out.tsv"):
        (tmp_path / "more" / name).write_text("")
    mine = {"train": str(tmp_path / "more" / "all.*"), "dev": "../../more/held_out.tsv"}
    path = from_template(tmp_path, sets={"mine": mine}, only=["mine"])
    (run,) = suite_runs(read_suite(path), tmp_path / "out")
    source = run.values["sources"]["mine"]
    assert source["table"] == str(tmp_path / "more" / "all.tsv")
    assert Path(source["validation"]).samefile(tmp_path / "more" / "held_out.tsv")


def test_runs_of_another_recipe_are_not_mixed_in(tmp_path):
    write_layout(tmp_path)
    path = from_template(tmp_path, only=["mine"])
    (old,) = suite_runs(read_suite(path), tmp_path / "out")
    old.folder.mkdir(parents=True)
    old.file.write_text(yaml.safe_dump(dict(old.values)))
    assert suite_runs(read_suite(path), tmp_path / "out") == [old]
    with pytest.raises(UserError, match="holds another recipe: length: 32 -> 64"):
        suite_runs(read_suite(path, ["length=64"]), tmp_path / "out")


def test_every_fold_of_a_set_is_a_run_for_every_seed(tmp_path):
    write_layout(tmp_path)
    (tmp_path / "data/mine/dev.csv").unlink()  # its rows would not be read
    sets = {"mine": {"group": "context", "folds": 3}, "SST-2": {"folds": 0}}
    path = from_template(tmp_path, sets=sets, only=["mine", "SST-2", "CoLA"], seeds=2, folds=2)
    found = suite_runs(read_suite(path), tmp_path / "out")
    assert [run.title for run in found if run.name == "SST-2"] == ["SST-2, seed 1", "SST-2, seed 2"]
    assert len([run for run in found if run.name == "CoLA"]) == 4
    mine = [run for run in found if run.name == "mine"]
    assert [(run.seed, run.fold) for run in mine] == [(s, f) for s in (1, 2) for f in (1, 2, 3)]
    last = mine[-1]
    assert last.title == "mine, seed 2, fold 3" and last.folder.name == "seed_2_fold_3"
    assert (
        last.values["sources"]["mine"]
        == {
            "table": str(tmp_path / "data/mine/train.csv"),
            "read": {},
            "folds": {"count": 3, "held_out": 3, "group": "context"},
        }
        or "read" not in last.values["sources"]["mine"]
    )
    assert len({run.file for run in found} | {run.output for run in found}) == 2 * len(found)


# Running them ----------------------------------------------------------------------------------


def test_a_failed_run_does_not_stop_the_suite_and_is_retried(tmp_path, caplog):
    caplog.set_level("INFO", "palm_ds")
    found = made(tmp_path)
    command = training(tmp_path, {"a, seed 2": "broken", "b, seed 1": "stopped"})
    failed = run_all(found, command, [{}, {}])
    assert failed == {
        "a, seed 2": "exit code 2: error: train.tsv:7: no label",
        "b, seed 1": "exit code 75: it stopped before its end, or evaluated nothing",
    }
    text = compare(found, failed, tmp_path)
    assert "2 of 3, 1 failed" in text
    assert "error: train.tsv:7" in (tmp_path / "suite.md").read_text()
    assert run_all(found, training(tmp_path), [{}]) == {}
    starts = {m.title: len((m.folder / "started").read_text().split()) for m in found}
    assert starts == {m.title: 2 if m.title in failed else 1 for m in found}
    assert "4 of 6 runs are done" in caplog.messages
    record = json.loads((tmp_path / "suite.json").read_text())
    assert record["failed"] == failed and record["sets"]["a"]["missing"] == [2]


def test_one_run_at_a_time_in_each_slot(tmp_path):
    found = made(tmp_path, "abc", 2)
    program = tmp_path / "slots.py"
    program.write_text(
        TRAINING + "import os\n(folder / 'slot').write_text("
        "f'{os.environ[\"SLOT\"]} {sys.argv[5]} {time.time()}')\n"
    )

    def command(member: SuiteRun) -> list[str]:
        arguments = [str(member.folder), str(member.seed), "done", "0.3", str(time.time())]
        return [sys.executable, str(program), *arguments]

    assert run_all(found, command, [{"SLOT": "0"}, {"SLOT": "1"}]) == {}
    spans: dict[str, list[tuple[float, float]]] = {}
    for member in found:
        slot, begin, end = (member.folder / "slot").read_text().split()
        spans.setdefault(slot, []).append((float(begin), float(end)))
    assert sorted(spans) == ["0", "1"]
    for each in spans.values():
        ordered = sorted(each)
        assert all(end <= begin for (_, end), (begin, _) in zip(ordered, ordered[1:], strict=False))


def test_an_interrupted_suite_stops_its_runs_and_resumes_later(tmp_path):
    code = (
        "import signal, sys; from pathlib import Path; "
        "from palm_ds.train.sweeps.subprocesses import interrupt; "
        "from palm_ds.train.sweeps.suite import run_all; "
        "from tests.train.sweeps.test_suite import made, training; "
        "signal.signal(signal.SIGTERM, interrupt); folder = Path(sys.argv[1]); "
        "run_all(made(folder, 'a', 2), training(folder, None, 60), [{}, {}])"
    )
    suite = Program(["-c", code, tmp_path], cwd=ROOT)
    found = made(tmp_path, "a", 2)
    deadline = time.monotonic() + 60
    while not all((m.folder / "started").exists() for m in found):
        assert suite.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    suite.send_signal(signal.SIGTERM)
    assert suite.wait(30) != 0
    assert run_all(found, training(tmp_path), [{}]) == {}


# The command -----------------------------------------------------------------------------------


@pytest.mark.distributed
def test_the_command_trains_and_marks_what_fails(tmp_path):
    tables = write_tables(tmp_path / "tables")
    for name in ("good", "bad"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for part in ("train", "dev"):
            text = (tables / f"{part}.tsv").read_text()
            (tmp_path / "data" / name / f"{part}.tsv").write_text(text + "x\n" * (name == "bad"))
    template = {"backbone": TINY, "length": 32, "batch": "8 examples"}
    (tmp_path / "template.yaml").write_text(yaml.safe_dump(template))
    path = from_template(tmp_path, epochs=1, tokenizer=str(tables / "vocab.txt"))
    command = [str(ROOT / "launch/suite.py"), str(path), "--launcher", python()]
    command += ["--deepspeed_config", str(ROOT / "ds_configs/cpu.json")]
    command += ["--out", str(tmp_path / "out"), "optimizer.lr=1e-3"]
    done = run(command)
    assert done.returncode == 1, done.stderr
    assert "bad, seed 1: failed (exit code 2): error: " in done.stdout
    assert "train.tsv:50: 1 cell" in done.stdout
    assert "| good     | accuracy" in done.stdout and (tmp_path / "out/suite.json").is_file()
