"""What ends a run before its last step, and what it leaves; with a small model."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import palm_ds as palm
from palm_ds.common.errors import STOPPED, TemporaryError, UserError
from palm_ds.corpus.store import open_corpus
from palm_ds.engine import Engine
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.train import export
from palm_ds.train.export import write_best
from palm_ds.train.loop import loop as loop_module
from palm_ds.train.loop.early_stopping import BestTracker
from palm_ds.train.loop.loop import Loop
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.report.metrics_file import FILE, read_metrics
from palm_ds.train.setup.corpus_check import CorpusCheck
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.train import train
from palm_ds.weights.formats.native import WEIGHTS
from palm_ds.weights.formats.weights_info import INFO, read_info
from palm_ds.weights.model_folder import encoder_config, open_model
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.small_tables import TINY, write_tables

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"), train=32, dev=8)


def trainer(tables: Path, folder: Path, settings: dict[str, Any]) -> palm.Trainer:
    """A trainer of 8 steps in a run folder."""
    usual = {"batch": 8, "epochs": 2, "lr": 2e-3, "length": 32, "recipe": {"export_onnx": []}}
    return palm.Trainer(
        palm.tasks.Classification.on(train=tables / "train.tsv", dev=tables / "dev.tsv"),
        backbone=palm.Backbone.from_config(TINY, tokenizer=tables / "vocab.txt"),
        deepspeed_config={"zero_optimization": {"stage": 0}},
        folder=folder,
        **{**usual, **settings},
    )


def loop_of(trainer: palm.Trainer) -> Loop:
    opened = trainer.session.opened
    assert opened
    return opened.loop


def events_in(folder: Path) -> dict[str, str]:
    """{event of the log: its last message}"""
    return {each["event"]: each.get("message", "") for each in read_metrics(folder / FILE).events}


def test_patience_does_not_end_with_weights_that_the_last_step_ruined(
    tables: Path, tmp_path: Path
) -> None:
    """They were saved before they were checked, and the rollback did not replace them."""
    run = tmp_path / "run"
    settings = {"best": "mean", "patience": 1, "evaluate_every": 2, "save_every": 2}
    settings |= {"recipe": {"export_onnx": [], "nonfinite": "rollback"}}
    made = trainer(tables, run, settings)

    def ruin(event: object) -> None:
        if isinstance(event, palm.event.EndIteration) and event.batch_id + 1 == 4:
            for parameter in loop_of(made).model.parameters():
                parameter.data.fill_(torch.nan)

    made.train(ruin)
    assert made.cur_train_step == 4
    assert checkpoint.steps_in(run / "checkpoints")[0] == 4
    text = "restored step 2, steps 3 to 4 are left out of training; the run ends with these weights"
    assert text in events_in(run)["rollback"]
    again = trainer(tables, run, settings)
    assert again.train() and again.cur_train_step == 4  # weights that are not finite are refused


def test_weights_say_after_how_many_steps_patience_ended_without_a_best_evaluation(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a metric that is not defined on the rows: they said all steps of the plan."""
    run = tmp_path / "run"
    monkeypatch.setattr(BestTracker, "_value", lambda tracker, scores: math.nan)
    trainer(tables, run, {"best": "mean", "patience": 2, "evaluate_every": 2}).train()
    assert events_in(run)["patience"] == "no improvement at all; done"
    assert checkpoint.steps_in(run / "checkpoints") == [4]
    for _ in range(2):  # again, after a restart
        assert read_info(run / "weights" / INFO).made_by["steps"] == 4
        shutil.rmtree(run / "weights")
        trainer(tables, run, {"best": "mean", "patience": 2, "evaluate_every": 2}).train()


def test_a_lower_patience_that_ends_a_resumed_run_is_named(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended without a word."""
    falls = iter(range(9))
    monkeypatch.setattr(BestTracker, "_value", lambda tracker, scores: -next(falls))
    run, settings = tmp_path / "run", {"best": "mean", "evaluate_every": 2}
    made = trainer(tables, run, {**settings, "patience": 3})

    def stop(event: object) -> None:
        if isinstance(event, palm.event.BeginIteration) and event.batch_id + 1 == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        made.train(stop)
    again = trainer(tables, run, {**settings, "patience": 1})
    assert again.train() and again.cur_train_step == 6
    assert events_in(run)["patience"] == "no improvement since step 2; done"


def test_patience_does_not_end_a_run_before_the_stage_of_the_task_that_it_watches(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BestTracker, "_value", lambda tracker, scores: 0.5)
    table = {"table": str(tables / "train.tsv"), "validation": str(tables / "dev.tsv")}
    values = {
        "backbone": TINY,
        "length": 32,
        "batch": "8 examples",
        "sources": {"t": {**table, "tokenizer": str(tables / "vocab.txt")}},
        "tasks": {name: {"kind": "classification", "source": "t"} for name in ("early", "late")},
        "stages": [{"early": 4}, {"late": 4}],
        "evaluate": {"every": 1, "best": "late", "patience": 2},
        "export_onnx": [],
    }
    how = make_ds_config({"zero_optimization": {"stage": 0}})
    run = RunSpec(recipe=make_recipe(values), ds_config=how, folder=tmp_path / "run")
    assert train(run) == 0
    assert checkpoint.steps_in(run.folder / "checkpoints") == [6]
    assert events_in(run.folder)["patience"] == "no improvement since step 1; done"


def damaged_corpus(folder: Path) -> CorpusCheck:
    """The comparison of a corpus with a damaged file, which has found it."""
    write_small_corpus(folder / "corpus", documents=4)
    file = folder / "corpus/index/document_starts.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    check = CorpusCheck({"a": open_corpus(folder / "corpus")}, folder, SINGLE_PROCESS)
    check._thread.join()
    return check


@pytest.mark.parametrize("end", ["SIGTERM", "stop_training"])
def test_a_run_that_is_asked_to_end_saves_nothing_of_a_damaged_corpus(
    tables: Path, tmp_path: Path, end: str
) -> None:
    made = trainer(tables, tmp_path / "run", {})

    def stop(event: object) -> None:
        if isinstance(event, palm.event.BeginIteration) and event.batch_id + 1 == 3:
            loop_of(made).corpus_check = damaged_corpus(tmp_path)
            if end == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                made.stop_training()

    with pytest.raises(UserError, match="document_starts.npy was changed or damaged"):
        made.train(stop)
    made.close()
    assert checkpoint.steps_in(tmp_path / "run/checkpoints") == []


def test_best_weights_that_a_full_disk_cannot_keep_do_not_count(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training stood still for half an hour, then ended with the exit code of a mistake, also if it
    was asked to stop meanwhile."""
    run, settings = tmp_path / "run", {"best": "mean", "evaluate_every": 2}

    def full(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "best")

    monkeypatch.setattr(loop_module, "write_best", full)
    made = trainer(tables, run, settings)
    with pytest.raises(SystemExit) as stopped:
        made.train()
    assert stopped.value.code == STOPPED
    assert checkpoint.steps_in(run / "checkpoints") == [3]
    text = "step 2 is the best so far, but not kept and not counted: best: No space left on device"
    found = events_in(run)
    assert found["best not kept"] == text and not {"best", "disk full"} & found.keys()
    monkeypatch.undo()
    trainer(tables, run, settings).train()
    first = next(each for each in read_metrics(run / FILE).events if each["event"] == "best")
    assert first["step"] == 4  # better than none, though perhaps not than that of step 2
    assert read_info(run / "weights" / INFO).made_by["steps"] >= 4


def several_evaluations(tables: Path, folder: Path) -> RunSpec:
    """A run of 6 steps, evaluated on two sets every 2 steps, in several batches each, which ends
    after the second evaluation."""
    dev = str(tables / "dev.tsv")
    table = {"table": str(tables / "train.tsv"), "tokenizer": str(tables / "vocab.txt")}
    table |= {"validation": dev, "evaluation_sets": {"more": {"table": dev}}}
    values = {
        "backbone": TINY,
        "length": 16,
        "batch": "8 examples",
        "sources": {"t": table},
        "tasks": {"c": {"kind": "classification", "source": "t"}},
        "stages": [{"c": 6}],
        "optimizer": {"ema": 0.5},
        "evaluate": {"every": 2, "best": "c.loss", "patience": 1},
        "export_onnx": [],
    }
    how = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    return RunSpec(recipe=make_recipe(values), ds_config=make_ds_config(how), folder=folder)


def signal_in(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """SIGTERM in one of the batches that are evaluated."""
    passed, evaluate = [0], Engine.evaluate

    def signalled(*given: Any) -> dict[str, Any]:
        passed[0] += 1
        if passed[0] == batch:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*given)

    monkeypatch.setattr(Engine, "evaluate", signalled)


def test_a_stop_abandons_an_evaluation_which_the_resumed_run_makes_again(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was heeded after the evaluation, when the grace period had passed."""
    falls = iter(range(100))
    monkeypatch.setattr(BestTracker, "_value", lambda tracker, scores: -next(falls))
    whole, stopped = (several_evaluations(tables, tmp_path / name) for name in ("a", "b"))
    assert train(whole) == 0
    every = read_metrics(whole.folder / FILE).evaluations
    assert [each["step"] for each in every] == [2, 4]
    falls = iter(range(100))

    def crash(event: str, facts: Any) -> None:
        if event == "next" and facts["step"] == 3:
            raise InterruptedError

    for batch, step in ((3, 2), (1, 2), (14, 4), (7, 4)):
        with monkeypatch.context() as patch:
            signal_in(patch, batch)
            assert train(stopped) == STOPPED
        assert checkpoint.steps_in(stopped.folder / "checkpoints")[0] == step
        text = events_in(stopped.folder)["stopped"]
        assert text.startswith(f"stopped; step {step} is saved; run the same command again to ")
        assert text.endswith("; its evaluation is made then")
        if step == 2:
            with pytest.raises(InterruptedError):  # after the evaluation, which no checkpoint has
                train(stopped, crash)
            falls = iter(range(100))
    assert train(stopped) == 0
    again = read_metrics(stopped.folder / FILE)
    one, other = ([(x["step"], x["scores"]) for x in made] for made in (every, again.evaluations))
    assert one == other
    assert [each["event"] for each in again.events].count("patience") == 1
    for folder in ("best", "weights"):
        one, other = (read_info(run.folder / folder / INFO).made_by for run in (whole, stopped))
        assert one["steps"] == other["steps"]
        one, other = ((run.folder / folder / WEIGHTS).read_bytes() for run in (whole, stopped))
        assert one == other


@pytest.mark.parametrize("in_evaluation", [True, False])
def test_a_run_that_is_stopped_after_the_step_that_is_to_end_it_trains_no_further(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_evaluation: bool
) -> None:
    """Resumed, it went on to the end of its plan."""
    settings = {"evaluate_every": 2, "batch": 4}
    for name in ("whole", "stopped"):
        made = trainer(tables, tmp_path / name, settings)

        def end(event: object, made: palm.Trainer = made, name: str = name) -> None:
            asks = name == "stopped" and isinstance(event, palm.event.BeginIteration)
            if asks and event.batch_id == 1 and not in_evaluation:
                os.kill(os.getpid(), signal.SIGTERM)
            if isinstance(event, palm.event.EndIteration) and event.batch_id == 1:
                made.stop_training()

        with monkeypatch.context() as patch:
            if name == "whole":
                made.train(end)
                continue
            if in_evaluation:
                signal_in(patch, 1)
            with pytest.raises(SystemExit):
                made.train(end)
    for _ in range(2):  # as it is resumed, and once more
        again = trainer(tables, tmp_path / "stopped", settings)
        again.train()
        assert again.cur_train_step == 2
    one, other = (read_metrics(tmp_path / name / FILE) for name in ("whole", "stopped"))
    scores = [[(x["step"], x["scores"]) for x in each.evaluations] for each in (one, other)]
    assert scores[0] == scores[1] and [step for step, _ in scores[0]] == [2]
    assert events_in(tmp_path / "whole")["ended"] == events_in(tmp_path / "stopped")["ended"]
    one, other = (tmp_path / name / "weights" / WEIGHTS for name in ("whole", "stopped"))
    assert one.read_bytes() == other.read_bytes()


def test_an_evaluation_stays_in_the_log_if_a_resumed_run_measures_otherwise_and_later(
    tables: Path, tmp_path: Path
) -> None:
    """That of the checkpoint's step was removed, but not made again."""
    run = tmp_path / "run"

    def crash(event: object) -> None:
        if isinstance(event, palm.event.BeginIteration) and event.batch_id == 4:
            raise InterruptedError

    settings = {"evaluate_every": 2, "save_every": 4, "best": "mean"}
    made = trainer(tables, run, settings)
    with pytest.raises(InterruptedError):
        made.train(crash)
    made.close()
    trainer(tables, run, {**settings, "evaluate_every": 3, "best": "classification.loss"}).train()
    assert "best forgotten" in events_in(run)
    assert [each["step"] for each in read_metrics(run / FILE).evaluations] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (shutil.rmtree, "weights.json: .*"),
        (lambda best: os.truncate(best / WEIGHTS, 999), f"{WEIGHTS} has 999 bytes instead of .*"),
    ],
)
def test_best_weights_that_are_lost_are_named_and_the_last_ones_taken(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Any, why: str
) -> None:
    """Deleted ones were replaced in silence; damaged ones ended the finished run in a traceback."""
    run = tmp_path / "run"

    def write(*given: Any) -> None:
        write_best(*given)
        lose(run / "best")

    monkeypatch.setattr(loop_module, "write_best", write)
    trainer(tables, run, {"best": "mean", "evaluate_every": 4}).train()
    text = f"the best weights by mean are lost: .*{why}; the final weights are those of step 8, the"
    assert re.match(text, events_in(run)["best lost"])
    assert read_info(run / "weights" / INFO).made_by["steps"] == 8


def test_best_weights_whose_server_is_away_are_not_lost(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settings = tmp_path / "run", {"best": "mean", "evaluate_every": 4}
    problem = f"{WEIGHTS} cannot be read: {os.strerror(errno.ESTALE)}"
    monkeypatch.setattr(export, "damaged_files", lambda *given: [problem])
    made = trainer(tables, run, settings)
    with pytest.raises(TemporaryError, match=f"^{problem}; the same command tries again$"):
        made.train()
    made.close()
    monkeypatch.undo()
    assert trainer(tables, run, settings).train()
    assert "best lost" not in events_in(run) and (run / "weights" / WEIGHTS).exists()


@pytest.mark.parametrize("lost", ["run", "run/recipe.yaml"])
def test_a_run_whose_folder_is_moved_or_deleted_can_be_resumed(
    tables: Path, tmp_path: Path, lost: str
) -> None:
    """Its checkpoints were "not a run folder", and its end was a traceback."""
    run, settings = tmp_path / "run", {"save_every": 3}
    made = trainer(tables, run, settings)

    def lose(event: object) -> None:
        if isinstance(event, palm.event.BeginIteration) and event.batch_id + 1 == 5:
            os.rename(tmp_path / lost, tmp_path / "old")

    made.train(lose)
    assert "it is written again" in events_in(run)["folder"]
    assert checkpoint.steps_in(run / "checkpoints")[0] == 8
    shutil.rmtree(run / "weights")
    again = trainer(tables, run, settings)
    assert again.train() and again.cur_train_step == 8


def phases(folder: Path, corpus: Path) -> RunSpec:
    """A run of two stages of four steps, the first with rotary bases of its own."""
    masks = "knowledge_masking"
    values = {
        "backbone": {"preset": "modern-tiny", "hidden_size": 16, "max_positions": 32},
        "length": 32,
        "batch": "4 rows",
        "sources": {"text": {"corpus": str(corpus)}},
        "held_out": 0.3,
        "tasks": {masks: {"source": "text"}},
        "stages": [{masks: 4, "rope_base": 9.0, "local_rope_base": 5.0}, {masks: 4}],
        "optimizer": {"lr": 2e-2},
        "evaluate": {"best": f"{masks}.accuracy"},
        "save": {"every": 4},
        "export_onnx": [],
    }
    how = make_ds_config({"zero_optimization": {"stage": 0}})
    return RunSpec(recipe=make_recipe(values, "recipe.yaml"), ds_config=how, folder=folder)


def test_weights_are_those_of_their_stage_s_rotary_bases(tmp_path: Path) -> None:
    """They were described with the bases of the last stage, and a run that was stopped between two
    stages was evaluated with those of the second."""
    write_small_corpus(tmp_path / "corpus", documents=24)
    whole, stopped = (phases(tmp_path / name, tmp_path / "corpus") for name in ("whole", "stopped"))
    assert train(whole) == 0

    def stop(event: str, facts: Any) -> None:
        if event == "next" and facts["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(stopped, stop) == STOPPED
    assert encoder_config(stopped.folder).options["global_rotary_base"] == 9.0
    assert train(stopped) == 0
    one, other = (read_metrics(run.folder / FILE).evaluations for run in (whole, stopped))
    assert [each["step"] for each in one] == [each["step"] for each in other] == [4, 8]
    for its, mine in zip(one, other, strict=True):
        assert its["scores"] == mine["scores"]
    (first, last) = sorted((whole.folder / "checkpoints").iterdir())
    best = read_info(whole.folder / "best" / INFO).made_by["steps"]
    assert best == 4
    names = "global_rotary_base", "local_rotary_base"
    stated = first, last, whole.folder / "best", whole.folder / "weights", whole.folder / "hf"
    for path, bases in zip(stated, [[9.0, 5.0], [None, None], *[[9.0, 5.0]] * 3], strict=True):
        options = open_model(path).config.options
        assert [options.get(name) for name in names] == bases
