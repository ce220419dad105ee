"""benchmarks/study.py: arms of equal FLOPs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scipy.stats import ttest_1samp

from benchmarks import study
from palm_ds.common.errors import UserError
from palm_ds.common.files import locked
from palm_ds.corpus.mine_ngrams import mine_ngrams
from palm_ds.train.recipe.recipe import read_values
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.warm_python import python

TINY = ["backbone={preset: tiny, hidden_size: 32, max_positions: 64}", "length=64"]
TINY += ["batch=1024 tokens", "held_out=0.2"]


@pytest.mark.parametrize(
    ("arm", "body"),
    [
        ("masked_30_15", "bert"),
        ("with_sentence_distance", "modern"),
        ("random_distance", "modern"),
        ("hybrid", "modern"),
        ("retromae", "modern"),
        ("ngrams", "modern"),
    ],
)
def test_every_arm_has_the_same_flops(arm: str, body: str, tmp_path: Path) -> None:
    """Also where a task has a head of its own, or several stages."""
    corpus = write_small_corpus(tmp_path / "corpus").path
    mine_ngrams(corpus, tmp_path / "ngrams.tsv", sizes=(60, 40), least=3)
    args = study.parse(
        ["--corpus", str(corpus), "--out", str(tmp_path), "--tokens", "5e5", "--set", *TINY]
    )
    budget = study.budget_of(tmp_path, args)
    run = study.Run(arm=arm, body=body, seed=1, out=tmp_path)
    values = run.values(corpus, TINY)
    whole = study.flops_of(values)
    values["stages"] = study.scaled(values["stages"], values["tasks"], budget / whole)
    assert whole != pytest.approx(budget, rel=0.05)
    assert study.flops_of(values) == pytest.approx(budget, rel=0.01)


def test_stages_keep_their_settings() -> None:
    stages = [{"a + b": 10, "rate": [0.3, 0.15]}, {"a": 20, "lr": 1}]
    scaled = [{"a + b": 15, "rate": [0.3, 0.15]}, {"a": 30, "lr": 1}]
    assert study.scaled(stages, {"a": {}, "b": {}}, 1.5) == scaled


def test_chinese_has_no_capitals() -> None:
    values = read_values(study.RECIPES / "continual_30_15.yaml", [])
    chinese = study.in_chinese(values)
    tasks = [
        "knowledge_masking + token_document_relation",
        "sentence_reordering + knowledge_masking",
        "sentence_distance + knowledge_masking",
        "discourse_relation + knowledge_masking",
    ]
    assert chinese["stages"] == {**values["stages"], "continual": tasks}
    assert set(values["tasks"]) - set(chinese["tasks"]) == {"capitalization"}
    assert chinese["tasks"]["discourse_relation"]["markers"] == "zh"
    assert values["tasks"]["discourse_relation"]["markers"] == "en"
    written = [{"a + capitalization": 10, "rate": [0.3, 0.15]}, {"a": 20}]
    assert study.in_chinese({"tasks": {"a": {}}, "stages": written})["stages"] == [
        {"a": 10, "rate": [0.3, 0.15]},
        {"a": 20},
    ]


def test_a_page_gets_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    english, chinese = map(study.marks, ("en", "zh"))
    others = f"before\n{english[0]}\nEnglish\n{english[1]}\n"
    page.write_text(f"{others}{chinese[0]}\nold\n{chinese[1]}\nafter\n")
    runs = [study.Run(arm="joint", body="bert", seed=seed, out=tmp_path) for seed in (1, 2, 3)]
    for run, loss in zip(runs, (2.0, 4.0), strict=False):  # the third is not there yet
        run.folder.mkdir(parents=True)
        times = {"flops": 1, "seconds": 1800, "cpu_seconds": 900, "deepspeed_config": "cpu.json"}
        run.measures.write_text(json.dumps({**times, "parts": ["masked"], "masked": loss}))
    study.write_table(page, study.table(runs), "zh")
    text = page.read_text()
    assert "| bert | joint | 2 | 3.000 ± 1.414 |" in text and "old" not in text
    assert "took 1.0 hours, 0.5 of processor time." in text
    assert text.startswith(others) and text.endswith(f"{chinese[1]}\nafter\n")
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="no lines"):
        study.write_table(page, "", "zh")


@pytest.fixture
def no_corpus(monkeypatch) -> None:
    monkeypatch.setattr(study, "language_of", lambda corpus: "en")


def train_nothing(run: study.Run, values: object, args: object) -> None:
    (run.folder / "run").mkdir()


@pytest.mark.usefixtures("no_corpus")
def test_measures_that_are_asked_for_later_are_added(tmp_path: Path, monkeypatch) -> None:
    """Also sets of the suite."""
    suite = tmp_path / "suite.yaml"
    counted, asked = iter(range(100)), []

    def finetuned(run: study.Run, names: list[str], args: object) -> dict[str, int]:
        asked.append(names)
        return {name: next(counted) for name in names}

    monkeypatch.setattr(study, "flops_of", lambda values: 1.0)
    monkeypatch.setattr(study, "train", train_nothing)
    monkeypatch.setattr(study, "stage_scores", lambda folder: ())
    monkeypatch.setattr(study, "masked_words", lambda *_: {"masked": next(counted)})
    monkeypatch.setattr(study, "minimal_pairs", lambda *_: {"pairs": next(counted)})
    monkeypatch.setattr(study, "finetuned", finetuned)
    run = study.Run(arm="masked_15", body="modern", seed=1, out=tmp_path)
    for sets, more in (("[a]", []), ("[a, b]", ["--pairs", "x"]), ("[a, b]", ["--pairs", "x"])):
        suite.write_text(f"only: {sets}")
        args = ["--corpus", "c", "--out", str(tmp_path), "--suite", str(suite), *more]
        study.run_all([run], study.parse(args))
    found = json.loads(run.measures.read_text())
    assert [found[name] for name in ("masked", "a", "pairs", "b")] == [0, 1, 2, 3]
    assert found["parts"] == ["tasks", "masked", "suite", "pairs"] and asked == [["a"], ["b"]]
    assert found["deepspeed_config"] == "cpu.json"


def test_an_encoder_without_words_is_not_asked_for_any(tmp_path: Path) -> None:
    run = study.Run(arm="replaced_tokens_gdes", body="modern", seed=1, out=tmp_path)
    args = study.parse(["--corpus", "c", "--out", str(tmp_path), "--pairs", "x"])
    values = read_values(study.RECIPES / f"{run.arm}.yaml", [])
    assert [*study.missing_parts(run, values, {"parts": []}, args)] == ["tasks"]
    assert [*study.missing_parts(run, {"tasks": {}, "held_out": 0.1}, {"parts": []}, args)] == [
        *("tasks", "pairs", "masked")
    ]


def test_a_command_that_fails_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python())
    with pytest.raises(UserError, match=r"palm-ds evaluate: failed \(exit code 2\)"):
        study.printed_by("evaluate", "--pairs", "nowhere.txt", "--model", "nowhere")
    assert "error: " in capfd.readouterr().err


STOPPED = """
import sys
from pathlib import Path
from benchmarks import study

study._ENVIRONMENT = {{"PYTHONPATH": {folder!r}}}
study.run_all = lambda *_: study.call("pretrain")
sys.argv = ["study.py", "--corpus", "c", "--out", "o"]
study.start()
"""
SAVES = """
import signal, sys, time

def save(*_):
    time.sleep(0.7)
    open("saved", "w").close()
    sys.exit(75)

signal.signal(signal.SIGINT, save)
print("trains", flush=True)
time.sleep(30)
"""
"""`palm-ds` that takes a moment to save."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_study_that_is_stopped_waits_until_its_run_has_saved(
    number: int, tmp_path: Path, root: Path
) -> None:
    """Its run was killed a quarter of a second after Ctrl-C, and trained on after SIGTERM."""
    (tmp_path / "palm_ds").mkdir()
    (tmp_path / "palm_ds" / "__main__.py").write_text(SAVES)
    command = [sys.executable, "-c", STOPPED.format(folder=str(tmp_path))]
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(root)}
    program = subprocess.Popen(command, cwd=tmp_path, env=environment, **output)
    assert program.stdout is not None and program.stdout.readline() == "trains\n"
    program.send_signal(number)
    _, error = program.communicate(timeout=60)
    assert (program.returncode, error) == (130, "stopped; the same command continues the study\n")
    assert (tmp_path / "saved").exists()


def test_the_score_of_a_set_is_its_best_or_first_metric(tmp_path: Path, monkeypatch) -> None:
    """Of all sets of the shipped suite, which has no settings for one of them."""
    suite = Path(study.__file__).parent / "study_suite.yaml"
    metrics = {"accuracy": {"median": 1.0}, "matthews": {"median": 2.0}}
    metrics |= {"ndcg@10": {"median": 3.0}, "f1": {"median": 4.0}}

    def write_scores(command: str, file: Path, *rest: object) -> str:
        sets = {name: {"tasks": {name: metrics}} for name in study.sets_of(file)}
        (tmp_path / "suite").mkdir()
        (tmp_path / "suite/suite.json").write_text(json.dumps({"sets": sets}))
        return ""

    monkeypatch.setattr(study, "call", write_scores)
    run = study.Run(arm="masked_15", body="modern", seed=1, out=tmp_path)
    monkeypatch.setattr(study.Run, "folder", property(lambda _: tmp_path))
    args = study.parse(["--corpus", "c", "--out", str(tmp_path), "--suite", str(suite)])
    found = study.finetuned(run, study.sets_of(suite), args)
    chosen = {"cola": 2.0, "cranfield": 3.0, "xquad": 4.0}
    assert found == {name: chosen.get(name, 1.0) for name in study.sets_of(suite)}


@pytest.mark.usefixtures("no_corpus")
def test_a_run_without_its_weights_is_left_as_it_is(tmp_path: Path, capsys) -> None:
    run = study.Run(arm="masked_15", body="modern", seed=1, out=tmp_path)
    run.folder.mkdir(parents=True)
    known = {"flops": 1.0, "seconds": 1.0, "cpu_seconds": 1.0, "parts": ["tasks", "masked"]}
    run.measures.write_text(json.dumps(known))
    args = study.parse(["--corpus", "c", "--out", str(tmp_path), "--pairs", "x"])
    study.run_one(run, 1.0, args)
    assert "since the weights are elsewhere: pairs" in capsys.readouterr().out
    assert json.loads(run.measures.read_text()) == known


@pytest.mark.usefixtures("no_corpus")
def test_the_time_of_a_stopped_run_counts(tmp_path: Path, monkeypatch) -> None:
    clock = iter((100.0, 160.0, 500.0, 530.0))  # 60 seconds until it was stopped, 30 afterwards

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    # not in `time` itself: threads that other tests have left ask it too
    monkeypatch.setattr(study, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(study, "flops_of", lambda values: 1.0)
    monkeypatch.setattr(study, "missing_parts", lambda *_: {})
    monkeypatch.setattr(study, "train", stop)
    run = study.Run(arm="masked_15", body="modern", seed=1, out=tmp_path)
    run.folder.mkdir(parents=True)
    args = study.parse(["--corpus", "c", "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        study.run_one(run, 1.0, args)
    assert "masked_15" not in study.table([run])
    stopped, record = run.measures.read_text(), tmp_path / "study.jsonl"
    record.write_text('{"body": "modern", "arm": "masked_15", "seed": 1, "parts": ["masked"]}')
    study.restore(record, [run])  # another machine has finished it
    assert json.loads(run.measures.read_text()) == {"parts": ["masked"]}
    run.measures.write_text(stopped)
    monkeypatch.setattr(study, "train", train_nothing)
    study.run_one(run, 1.0, args)
    assert json.loads(run.measures.read_text())["seconds"] == 90.0


@pytest.mark.usefixtures("no_corpus")
def test_a_record_continues_a_study_elsewhere(tmp_path: Path, monkeypatch) -> None:
    trained: list[study.Run] = []

    def train(run: study.Run, values: object, args: object) -> None:
        trained.append(run)
        train_nothing(run, values, args)

    budgets = iter((1.0, 1.001, 2.0))
    monkeypatch.setattr(study, "budget_of", lambda out, args: next(budgets))
    monkeypatch.setattr(study, "flops_of", lambda values: 1.0)
    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(study, "stage_scores", lambda folder: ())
    monkeypatch.setattr(study, "masked_words", lambda *_: {"masked": 3.0})
    file = tmp_path / "study.jsonl"
    runs = {}
    for machine, seeds in (("here", ["2"]), ("elsewhere", ["1", "2"])):
        out = ["--out", str(tmp_path / machine), "--record", str(file)]
        words = ["--corpus", "c", *out, "--arms", "joint", "--seeds", *seeds]
        monkeypatch.setattr("sys.argv", ["study.py", *words])
        study.main()
        runs[machine] = [run.seed for run in trained]
    assert runs == {"here": [2], "elsewhere": [2, 1]}
    assert list(study.read_record(file)) == [("modern", "joint", 1), ("modern", "joint", 2)]
    with pytest.raises(SystemExit, match="of a run of 1 FLOPs, not 2; give the --tokens"):
        study.main()


def test_processes_share_the_runs(tmp_path: Path, monkeypatch) -> None:
    begun = []
    monkeypatch.setattr(study, "budget_of", lambda out, args: 1.0)
    monkeypatch.setattr(study, "run_one", lambda run, budget, args: begun.append(run.arm))
    runs = [study.Run(arm=arm, body="modern", seed=1, out=tmp_path) for arm in ("joint", "phrases")]
    runs[0].folder.mkdir(parents=True)
    with locked(runs[0].folder / "lock"):  # by another process
        study.run_all(runs, study.parse(["--corpus", "c", "--out", str(tmp_path)]))
    assert begun == ["phrases"]


def test_the_interval_of_a_difference_leaves_out_0() -> None:
    seeds = {s: {"loss": value} for s, value in enumerate((3.0, 3.1, 3.2))}
    reference = {s: {"loss": value} for s, value in enumerate((2.9, 2.98, 3.11))}
    assert study.cell("loss", seeds, reference) == "**3.100 ± 0.100**"
    assert study.cell("loss", reference, reference) == "2.997 ± 0.106"
    assert study.cell("loss", {0: seeds[0]}, reference) == "3.000"
    assert study.cell("loss", {**reference, 3: {}}, reference) == "2.997 ± 0.106 (3)"
    differences = [0.1, 0.2, 0.4]  # 2.6 times their standard error, but there are only three
    assert ttest_1samp(differences, 0).pvalue > 0.05 and not study.is_difference(differences)


def test_forgetting_has_a_table() -> None:
    """Of the arms with several stages."""
    several = {"tasks: a, stage 1": 0.5, "tasks: b, stage 1": 0.1, "tasks: a, stage 2": 0.25}
    seeds = {1: several, 2: {"tasks: a, stage 1": 0.75, "tasks: a, stage 2": 0.75}}
    known = {("bert", "joint"): {1: {"tasks: a, stage 1": 0.5}}, ("bert", "sequential"): seeds}
    header, *lines = study.stage_lines(known)
    assert header == ["body", "arm", "task", "stage 1", "stage 2"]
    assert lines == [["bert", "sequential", "a", "0.625", "0.500"]]
