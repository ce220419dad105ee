"""Training from Python equals the commands; several trainers can share a process."""

from __future__ import annotations

import logging
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
import torch
from safetensors.torch import load_file

import palm_ds as palm
from palm_ds.common.errors import UserError
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.processes.launch_env import is_single_process
from palm_ds.tasks.multi_label import MultiLabel
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.report.metrics_file import read_metrics
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.train import train
from tests.distributed.turns import gan
from tests.helpers.own_encoder import PreNorm
from tests.helpers.own_optimizer import Lion
from tests.helpers.own_task import Counting, HowMany
from tests.helpers.pages import same_but_numbers
from tests.helpers.small_tables import TINY, rows, write_tables
from tests.helpers.warm_python import run

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's
ROOT = Path(__file__).resolve().parents[2]
QUIET: dict[str, Any] = {
    "batch": 8,
    "epochs": 2,
    "lr": 2e-3,
    "length": 32,
    "deepspeed_config": {"zero_optimization": {"stage": 0}},
    "recipe": {"export_onnx": []},
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Training leaves the state of the process unchanged."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.stdout
    logger = logging.getLogger("palm_ds")
    level = logger.level
    yield
    logger.setLevel(level)  # a page shows how to change it
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.stdout) == before


def test_data_sets_of_the_hub_are_named(tables: Path) -> None:
    """For the model card: those that rows were loaded from, and those that the user names."""
    rows = datasets.Dataset.from_dict({"text_a": ["so good", "bad"] * 8, "label": [1, 0] * 8})
    url = "hf://datasets/stanfordnlp/sst2@1f/train.parquet"
    rows.info.download_checksums = {url: {"num_bytes": 1, "checksum": None}}
    task = palm.tasks.Classification.on(train=datasets.DatasetDict({"train": rows}))
    assert palm.Trainer(task, backbone=backbone(tables)).recipe.datasets == ("stanfordnlp/sst2",)
    named = palm.Trainer(task, backbone=backbone(tables), recipe={"datasets": ["a/b"]})
    assert named.recipe.datasets == ("a/b",)


@pytest.mark.parametrize("folder", [None, "run"])
def test_no_onnx_is_written_unless_asked_for(folder: str | None, tables: Path) -> None:
    """It may take longer than the training."""
    task = palm.tasks.Classification.on(train=tables / "train.tsv")
    place = {"folder": tables / folder} if folder else {}
    assert palm.Trainer(task, backbone=backbone(tables), **place).recipe.export_onnx == ()
    asked = {"export_onnx": ["fp32"]}
    trainer = palm.Trainer(task, backbone=backbone(tables), recipe=asked, **place)
    assert trainer.recipe.export_onnx == ("fp32",)


def backbone(tables: Path) -> Any:
    return palm.Backbone.from_config(TINY, tokenizer=tables / "vocab.txt")


def classification(tables: Path, **values: Any) -> Any:
    return palm.tasks.Classification.on(
        **{"train": tables / "train.tsv", "dev": tables / "dev.tsv", **values}
    )


def trainer(tables: Path, **values: Any) -> Any:
    return palm.Trainer(classification(tables), backbone=backbone(tables), **{**QUIET, **values})


def weights_of(made: Any) -> dict[str, torch.Tensor]:
    return load_file(made.folder / "weights/weights.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module")
def trained(tables: Path) -> Any:
    """A finished training and its events."""
    made = trainer(tables, epochs=3)
    events: list[Any] = []
    scores = made.train(events.append)
    return types.SimpleNamespace(
        trainer=made, events=events, scores=scores, weights=weights_of(made)
    )


# What is trained -------------------------------------------------------------------------------


def test_a_trainer_has_the_recipe_and_the_final_weights_of_the_command(tables, tmp_path, trained):
    values = {
        "backbone": TINY,
        "length": 32,
        "batch": "8 examples",
        "optimizer": {"lr": 2e-3},
        "schedule": {"warmup": 0.1},
        "held_out": 0,
        "sources": {
            "classification": {
                "table": str(tables / "train.tsv"),
                "validation": str(tables / "dev.tsv"),
                "tokenizer": str(tables / "vocab.txt"),
            }
        },
        "tasks": {"classification": {"source": "classification"}},
        "stages": [{"classification": "3 epochs"}],
        "export_onnx": [],
    }
    recipe = make_recipe(values, "recipe.yaml")
    assert trained.trainer.recipe.learned() == recipe.learned()
    ds_config = trained.trainer.run.ds_config
    assert train(RunSpec(recipe=recipe, ds_config=ds_config, folder=tmp_path / "run")) == 0
    theirs = load_file(tmp_path / "run/weights/weights.safetensors")
    assert same(theirs, trained.weights)


def test_a_trainer_learns_scores_and_predicts(tables, trained, monkeypatch):
    made = trained.trainer
    assert (made.num_examples, made.steps_per_epoch, made.num_epochs) == (48, 6, 3)
    assert made.cur_train_step == made.steps == 18
    found = trained.scores["classification"]
    assert found["accuracy"] > 0.9 and list(found)[0] == "accuracy"
    again = made.evaluate()["classification"]
    assert again == pytest.approx({name: found[name] for name in again})
    asked = rows(random.Random(5), 30)
    unlabeled = [{"text_a": row["text_a"]} for row in asked]
    (labels,) = made.predict(unlabeled).values()
    odd = [{**row, "label_desc": 5, "gold_label": [7]} for row in unlabeled]  # not looked at
    assert made.predict(odd) == {"classification": labels}
    for spare in (True, False):  # batches are built during encoder passes, or between
        monkeypatch.setattr("palm_ds.inference.predictor._core_to_spare", lambda device, s=spare: s)
        assert made.predict(unlabeled) == {"classification": labels}
    right = sum(p["label"] == row["label"] for p, row in zip(labels, asked, strict=True))
    assert right >= 27
    assert made.evaluate(asked)["classification"]["accuracy"] == pytest.approx(right / 30)
    one = made.predict_one_batch(unlabeled[3:4])["classification"][0]
    assert one["logits"] == pytest.approx(labels[3]["logits"], abs=1e-4)


def test_rows_in_memory_are_not_written_to_files(trained, monkeypatch):
    made = trained.trainer
    made.predict([{"text_a": "w1"}])  # opens the model
    monkeypatch.setattr("tempfile.mkdtemp", None)
    rows = [{"text_a": "w1 w2", "label": "no"}, {"text_a": "w30 w31", "label": "yes"}]
    assert [x["label"] for x in made.predict(iter(rows))["classification"]] == ["no", "yes"]
    assert made.evaluate(rows)["classification"]["accuracy"] == 1.0
    expected = "a mapping with columns, a text or a pair of texts"
    with pytest.raises(UserError, match=rf"^rows\[1\]: expected {expected}, got 5$"):
        made.predict([rows[0], 5])
    with pytest.raises(UserError, match=r"^rows\[1\]: label: unknown label 'maybe'"):
        made.evaluate([rows[0], {**rows[1], "label": "maybe"}])


def test_no_rows_have_no_predictions(trained):
    for nothing in ([], (), iter([]), list):
        assert trained.trainer.predict(nothing) == {"classification": []}


def test_messages_name_the_argument_and_the_row(tables, caplog):
    good = [{"text_a": "w1", "label": "no"}, {"text_a": "w30", "label": "yes"}]
    wrong = {
        r"^train\[2\]: label is empty; `read: ": {"train": [*good, {"text_a": "w1", "label": " "}]},
        r"^dev\[1\]: label: unknown label 'maybe'": {
            "train": good,
            "dev": [good[0], {"text_a": "w1", "label": "maybe"}],
        },
        r"^train\[0\]: no field `body`": {"train": good, "columns": {"text_a": "body"}},
    }
    for message, values in wrong.items():
        made = palm.Trainer(
            palm.tasks.Classification.on(**values), backbone=backbone(tables), **QUIET
        )
        with pytest.raises(UserError, match=message):
            made.train()
    task = palm.tasks.Classification.on(train=[*good, {"text_a": "", "label": "no"}])
    made = palm.Trainer(task, backbone=backbone(tables), **{**QUIET, "epochs": 1})
    with caplog.at_level("INFO", "palm_ds"):
        made.train()
    assert "empty text_a; the first: train[2]" in caplog.text and ".jsonl:" not in caplog.text


def test_masked_words_are_predicted(tables, tmp_path):
    """And a trainer that is closed leaves the checkpoint that it was writing."""
    rows = [{"text_a": f"w{n} w{n + 1} w{n + 2}"} for n in range(8)]
    hidden = palm.tasks.MaskedWords(rate=0.5).on(name="hidden", train=rows)
    given = {**QUIET, "folder": tmp_path / "run", "save_every": 1}
    made = palm.Trainer(hidden, backbone=backbone(tables), **given)
    made.train_one_step()
    for line in made.predict(rows)["hidden"]:
        assert len(line["word_id"]) == len(line["words"]) > 0
    scores = made.evaluate(rows)
    assert set(scores["hidden"]) == {"accuracy", "perplexity"}
    assert made.evaluate([*rows, {"text_a": ""}]) == scores  # has no word to hide
    assert made.evaluate([{"text_a": ""}]) == {"hidden": {}}
    made.close()
    assert checkpoint.steps_in(tmp_path / "run" / "checkpoints") == [1]
    with pytest.raises(UserError, match=r"closed; another trainer with this folder= resumes"):
        made.train()


def test_the_best_auc_where_a_row_of_the_batch_has_one_class(tables):
    """The first one, by which an unknown metric is refused early, has none."""
    dev = [{"text_a": "w1 " * 30, "label": "no"}, {"text_a": "w30 " * 30, "label": "yes"}]
    task, given = classification(tables, dev=dev), {**QUIET, "epochs": 1}
    made = palm.Trainer(task, backbone=backbone(tables), best="classification.auc", **given)
    assert "auc" in made.train()["classification"]
    made = palm.Trainer(task, backbone=backbone(tables), best="classification.acu", **given)
    with pytest.raises(UserError, match=r"has no 'acu'; did you mean .auc"):
        made.train()


def test_further_evaluation_sets_are_reported_separately(tables):
    sets = {
        "test": {"table": str(tables / "train.tsv")},
        "again": {"table": str(tables / "dev.tsv")},
    }
    sets["again"]["read"] = {"columns": {"text_a": "text_a", "label": "label"}}
    changes = {"sources": {"classification": {"evaluation_sets": sets}}}
    made = trainer(tables, epochs=2, recipe={**changes, "evaluate": {"best": "mean"}})
    scores = made.train()
    assert list(scores) == ["classification", "classification (test)", "classification (again)"]
    assert scores["classification (again)"] == scores["classification"]
    metrics = read_metrics(made.folder / "metrics.jsonl")
    last = metrics.evaluations[-1]["scores"]
    assert last["classification (test)"]["count"] == 48 and last["classification"]["count"] == 24
    assert "classification (test)" in (made.folder / "report.html").read_text()
    wrong = {"sources": {"classification": {"evaluation_sets": {"x": {"table": "none.tsv"}}}}}
    with pytest.raises(UserError, match=r"none.tsv: no such file"):
        trainer(tables, recipe=wrong).train()
    no_validation = palm.tasks.Classification.on(train=tables / "train.tsv")
    with pytest.raises(UserError, match="evaluation_sets: needs a table as `validation`"):
        palm.Trainer(no_validation, backbone=backbone(tables), recipe=changes).recipe  # noqa: B018


def test_the_best_weights_are_written_like_the_final_ones(tables, capsys):
    """In a program that wants only warnings, which prints nothing."""
    logging.getLogger("palm_ds").setLevel(logging.WARNING)
    simplified = {"sources": {"classification": {"read": {"simplify": True}}}}
    made = trainer(tables, epochs=1, recipe={**simplified, "evaluate": {"best": "mean"}})
    made.train()
    assert capsys.readouterr().out == ""
    best, final = (made.folder / name for name in ("best", "weights"))
    written = {str(path.relative_to(final)) for path in final.rglob("*")}
    assert written == {str(path.relative_to(best)) for path in best.rglob("*")}
    assert "text_tokenizer/tokenizer.json" in written


def test_the_events_of_a_training(trained):
    event = palm.event
    names = [type(each).__name__ for each in trained.events]
    each_pass = ["BeginPass", *["BeginIteration", "EndIteration"] * 6, "Evaluation", "EndPass"]
    last_pass = [*each_pass[:-1], "Saved", "EndPass"]
    assert names == ["BeginTraining", *each_pass * 2, *last_pass, "EndTraining"]
    ends = [each for each in trained.events if isinstance(each, event.EndIteration)]
    assert [each.batch_id for each in ends] == list(range(18))
    assert [each.pass_id for each in ends] == [0] * 6 + [1] * 6 + [2] * 6
    assert ends[-1].cost < 0.5 < ends[0].cost
    for each in ends:
        assert each.cost == pytest.approx(each.metrics["classification"]["loss"])
    last = [each for each in trained.events if isinstance(each, event.EndPass)][-1]
    assert last.metrics == trained.events[-1].metrics == trained.scores


def test_a_hand_written_loop_next_to_another_model_gives_the_same_weights(tables, trained):
    mine, other = trainer(tables, epochs=3), trainer(tables, seed=7, lr=1e-2)
    while mine.cur_train_step < mine.steps:
        losses = mine.train_one_step(mine.get_one_batch())
        assert losses.keys() == {"classification"}
        if other.cur_train_step < other.steps:
            other.train_one_step()
        if mine.cur_train_step == 4:
            mine.predict([{"text_a": "w1"}])  # of the weights as they are
    assert same(weights_of(mine), trained.weights)
    assert not same(weights_of(other), trained.weights)
    assert mine.scores["classification"]["accuracy"] == trained.scores["classification"]["accuracy"]
    with pytest.raises(UserError, match="training has finished after 18 steps"):
        mine.train_one_step()


def test_a_handler_that_fails_does_not_repeat_steps(tables, trained):
    """A cell of a notebook is run again, with the handler corrected."""
    made = trainer(tables, epochs=3)

    def fails(event: object) -> None:
        if isinstance(event, palm.event.EndIteration) and event.batch_id == 4:
            raise RuntimeError("a mistake in a handler")

    with pytest.raises(RuntimeError, match="a mistake in a handler"):
        made.train(fails)
    assert made.cur_train_step == 5
    events: list[Any] = []
    made.train(events.append)
    steps = [each.batch_id for each in events if isinstance(each, palm.event.BeginIteration)]
    assert steps == list(range(5, 18))
    assert same(weights_of(made), trained.weights)


def test_averaged_weights_are_those_of_predictions_and_saves_between_steps(tables, tmp_path):
    """As of the evaluations: what a callback saves has the scores that it was told."""
    seen: list[Any] = []

    class Save(palm.Callback):
        def on_evaluate(self, trainer: Any, event: Any) -> None:
            trainer.save(tmp_path / "last")
            seen[:] = [event.metrics, trainer.evaluate(), trainer.predict(tables / "dev.tsv")]

    averaged = {"recipe": {"optimizer": {"ema": 0.9}}, "callbacks": [Save()]}
    made = trainer(tables, **averaged)
    made.train()
    told, evaluated, predicted = seen
    assert evaluated["classification"].items() <= told["classification"].items()
    later = made.predict(tables / "dev.tsv")["classification"]
    for one, other in zip(predicted["classification"], later, strict=True):
        assert one["logits"] == pytest.approx(
            other["logits"], abs=1e-5
        )  # rounding of other batches
    assert same(load_file(tmp_path / "last/weights.safetensors"), weights_of(made))


def test_an_interrupted_training_saves_and_another_one_resumes_it(tables, tmp_path, trained):
    def interrupt(event: Any) -> None:
        if isinstance(event, palm.event.EndIteration) and event.batch_id == 4:
            os.kill(os.getpid(), signal.SIGINT)

    first = trainer(tables, epochs=3, folder=tmp_path / "run")
    with pytest.raises(
        KeyboardInterrupt, match=r"^step \d+ of \d+ is saved; train\(\) with folder="
    ):
        first.train(interrupt)
    assert first.cur_train_step == 6
    stopped = read_metrics(tmp_path / "run/metrics.jsonl").events[-1]["message"]
    call = f"call train() with folder='{tmp_path / 'run'}' again to continue"
    assert stopped == f"stopped; step 6 is saved; {call}; its evaluation is made then"
    second = trainer(tables, epochs=3, folder=tmp_path / "run")
    events: list[Any] = []
    second.train(events.append)
    assert events[0] == palm.event.BeginTraining(step=6)
    assert same(weights_of(second), trained.weights)
    with pytest.raises(UserError, match="holds a finished run of a different recipe: .*lr.*init_"):
        trainer(tables, epochs=3, lr=1e-4, folder=tmp_path / "run").train()


def test_changed_rows_are_reported_with_the_name_of_their_file(tables, tmp_path):
    changing = Path(shutil.copytree(tables, tmp_path / "tables"))
    trainer(changing, folder=tmp_path / "run").train_one_step()
    train = changing / "train.tsv"
    lines = train.read_text().splitlines()
    train.write_text("\n".join([*lines[:-1], lines[-1].replace("w", "v")]) + "\n")
    message = rf"run: holds a run of a different recipe: the contents of {train}\. Choose another"
    with pytest.raises(UserError, match=message):
        trainer(changing, folder=tmp_path / "run").train()


def test_training_in_a_thread_and_starting_from_saved_weights(tables, tmp_path, trained):
    saved = trained.trainer.save(tmp_path / "model")
    start = palm.Backbone.from_pretrained(saved)
    made = palm.Trainer(classification(tables), backbone=start, **QUIET, best="mean", patience=1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(made.train()))
    thread.start()
    thread.join()
    assert found[0]["classification"]["accuracy"] > 0.9
    theirs = trained.trainer.save(tmp_path / "hf", huggingface=True)
    assert (theirs / "config.json").is_file()


# Many tasks ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_many_heads_in_paddlepalms_proportions(tables):
    main = palm.Trainer(classification(tables, name="main"), backbone=backbone(tables))
    helping = palm.Trainer(classification(tables, name="helping"), mix_ratio=0.5)
    helping.set_as_aux()
    shared = palm.Trainer(classification(tables, name="shared"), reuse_head_with=main)
    own = HowMany(unit=2).on(name="own", train=Counting(20), dev=lambda: Counting(6))
    made = palm.MultiHeadTrainer(
        [main, helping, shared, own], reference="own", mix_ratio={"own": 1.5, "shared": 1}, **QUIET
    )
    # int(epochs * ratio * steps of an epoch of `own`, 20 // 8), as multihead_trainer.py has it
    assert made.expected_steps == {"main": 4, "helping": 2, "shared": 4, "own": 6}
    assert made.mix_ratio == {"main": 1.0, "helping": 0.5, "shared": 1, "own": 1.5}
    assert made.recipe.built_tasks["helping"].auxiliary
    events: list[Any] = []
    scores = made.train(events.append)
    ends = [each for each in events if isinstance(each, palm.event.EndIteration)]
    seen = [task for each in ends for task in each.metrics]
    assert {task: seen.count(task) for task in made.tasks} == made.expected_steps
    names = weights_of(made)
    assert {name.split(".")[1] for name in names if name.startswith("heads.")} == {
        "main",
        "helping",
        "own",
    }
    assert scores.keys() == {"main", "helping", "shared", "own"}
    assert scores["own"]["minus_error"] < 0
    predictions = made.predict([{"text_a": "w1 w2"}])
    assert predictions["main"][0]["logits"] == predictions["shared"][0]["logits"]
    assert isinstance(predictions["own"][0]["value"], float)
    alone_ = made.predict([{"text_a": "w1 w2"}], task="own")
    assert alone_ == {"own": predictions["own"]}


def test_parts_that_train_in_turns(tables, monkeypatch):
    """The GAN of docs/turns.md: its two modules change in their own steps alone, the encoder never,
    bit for bit."""
    monkeypatch.setitem(sys.modules, "gan", gan())
    rows = [{"text_a": f"w{n} w{n + 1}"} for n in range(20)]
    parts = {"judge": "heads.judge.D.", "fool": "heads.judge.G."}
    judge = gan().Judge(trains=[parts["judge"] + "*"], optimizer={"betas": (0.5, 0.9)})
    fool = gan().Fool(share="judge", trains=[parts["fool"] + "*"], optimizer={"lr": 1e-2})
    made = palm.MultiHeadTrainer(
        [judge.on(train=rows, name="judge"), fool.on(train=rows, name="fool")],
        mix="turns",
        backbone=backbone(tables),
        **QUIET,
    )
    before: dict[str, torch.Tensor] = {}
    for task in ("judge", "fool", "judge", "fool"):
        assert made.train_one_step().keys() == {task}
        opened = made.session.opened
        assert opened
        after = opened.loop.engine.full_state_dict()
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {name for name in before if name.startswith(parts[task])}
        before = after
    made.close()


def test_tasks_that_share_a_text(tables):
    made = palm.MultiHeadTrainer(
        [(classification(tables, name="first"), palm.tasks.Classification.on(name="second"))],
        backbone=backbone(tables),
        **QUIET,
    )
    assert made.recipe.curriculum_spec.task_groups == ("first + second",)
    assert made.train_one_step().keys() == {"first", "second"}
    assert made.num_examples == {"first": 48, "second": 48}


def test_tasks_that_share_a_text_may_name_the_same_rows(tables: Path) -> None:
    frame = pandas.DataFrame(rows(random.Random(0), 8))
    both = [palm.tasks.Classification.on(name=name, train=frame) for name in ("first", "second")]
    made = palm.MultiHeadTrainer([both], backbone=backbone(tables), **QUIET)
    assert made.num_examples == {"first": 8, "second": 8}
    both[1].train = frame.head(4)
    other = palm.MultiHeadTrainer([both], backbone=backbone(tables), **QUIET)
    with pytest.raises(UserError, match="second: labels the rows of first, so that its own train"):
        _ = other.recipe


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mix_ratio": 0.5}, "mix_ratio: 0.5 for 'second', which trains in the steps of 'fi"),
        ({"train": "dev.tsv"}, "second: labels the rows of first, so that its own train would no"),
        ({"dev": "train.tsv"}, "its own dev would not be used; give it to first, or train the two"),
        ({"columns": {"label": "text_a"}}, "its own columns or read would not be used; give it"),
    ],
)
def test_a_task_has_no_rows_or_steps_of_its_own_beside_one_that_reads_its_text(
    tables: Path, given: dict[str, Any], message: str
) -> None:
    own = {key: str(tables / x) if key in ("train", "dev") else x for key, x in given.items()}
    second = palm.tasks.Classification.on(name="second", **own)
    with pytest.raises(UserError, match=message):
        _ = palm.MultiHeadTrainer(
            [(classification(tables, name="first"), second)], backbone=backbone(tables), **QUIET
        ).recipe
    same = {"train": tables / "train.tsv", "dev": tables / "dev.tsv"}
    second = palm.tasks.Classification.on(name="second", **same)
    made = palm.MultiHeadTrainer(
        [(classification(tables, name="first"), second)],
        backbone=backbone(tables),
        mix_ratio={"first": 0.5, "second": 0.5},
        **QUIET,
    )
    assert made.expected_steps == {"first": 6, "second": 6}


def test_a_batch_in_rows_has_epochs_too(tables: Path) -> None:
    made = trainer(tables, recipe={"batch": "2 rows"})
    assert made.steps - made.num_epochs < made.num_epochs * made.steps_per_epoch <= made.steps
    made.session.opened_at = 2 * made.steps_per_epoch
    assert made.cur_train_epoch == 2


def test_epochs_are_those_of_windows_and_of_passes(tables: Path) -> None:
    """Which the training counts in."""
    long = {"tokens": [f"w{i % 40}" for i in range(100)], "tags": ["B-X", *["O"] * 99]}
    tags = palm.tasks.Tagging.on(train=[long] * 4)  # five windows each
    made: Any = palm.Trainer(tags, backbone=backbone(tables), **QUIET)
    assert (made.num_examples, made.steps_per_epoch, made.steps) == (4, 2, 5)
    made.session.opened_at = made.steps
    assert made.cur_train_epoch == made.num_epochs
    passes = classification(tables, train=endless, pass_examples=2000)
    made = palm.Trainer(passes, backbone=backbone(tables), **QUIET)
    assert (made.num_examples, made.steps_per_epoch, made.steps) == (2000, 250, 500)
    made.session.opened_at = 499
    assert made.cur_train_epoch == 1


def endless() -> Iterator[dict[str, str]]:
    while True:
        yield from rows(random.Random(0), 2)


def test_stages_may_leave_out_the_task_whose_epochs_are_counted(tables: Path) -> None:
    two = [classification(tables, name=name) for name in ("first", "second")]
    settings = {**QUIET, "recipe": {"stages": [{"second": 2}]}}
    made = palm.MultiHeadTrainer(two, backbone=backbone(tables), **settings)
    assert made.steps_per_epoch == {"first": 6, "second": 6}
    assert made.train_one_step().keys() == {"second"}
    made.close()


@pytest.mark.slow
def test_a_custom_encoder_and_a_custom_optimizer(tables, tmp_path):
    """They train, save, resume, and predict the same after reloading."""

    def made(name: str) -> Any:
        own = {
            "backbone": {"kind": PreNorm, "options": {"scale": 2.0}},
            "optimizer": {"kind": Lion, "options": {"betas": [0.9, 0.95]}, "ema": 0.2},
        }
        return trainer(tables, recipe=own, lr=1e-3, epochs=4, folder=tmp_path / name)

    def interrupt(event: Any) -> None:
        if isinstance(event, palm.event.EndIteration) and event.batch_id == 4:
            os.kill(os.getpid(), signal.SIGINT)

    whole, first = made("whole"), made("stopped")
    scores = whole.train()["classification"]
    assert scores["accuracy"] > 0.9
    assert whole.recipe.optimizer.kind == "tests.helpers.own_optimizer.Lion"
    assert whole.recipe.backbone_config.kind == "tests.helpers.own_encoder.PreNorm"
    again = whole.evaluate()["classification"]
    assert again == pytest.approx({name: scores[name] for name in again})
    with pytest.raises(
        KeyboardInterrupt, match=r"^step \d+ of \d+ is saved; train\(\) with folder="
    ):
        first.train(interrupt)
    asked = [{"text_a": "w1 w2"}, {"text_a": "w30"}]
    found = made("stopped").predict(asked)["classification"]  # of the checkpoint alone
    assert len(found) == 2 and found[0]["label"] in ("no", "yes")
    second = made("stopped")
    second.train()
    assert same(weights_of(second), weights_of(whole))
    assert "backbone.wide" in weights_of(whole) and not (tmp_path / "whole/hf").exists()
    start = palm.Backbone.from_pretrained(whole.save(tmp_path / "model"))
    assert palm.Trainer(classification(tables), backbone=start).recipe.backbone_config.options
    with pytest.raises(
        UserError, match="save: Hugging Face has no encoder like tests.helpers.own_enc"
    ):
        whole.save(tmp_path / "hf", huggingface=True)


# Mistakes --------------------------------------------------------------------------------------


def test_mistakes_are_one_line(tables, tmp_path):
    task, start = classification(tables), backbone(tables)
    two = [classification(tables), classification(tables)]

    class Local(palm.TextTask):
        pass

    class LocalLion(Lion):
        pass

    abstract = type("Local", (palm.TextTask,), {"__module__": "tests.helpers.own_task"})  # no head

    wrong: dict[str, Any] = {
        "Trainer.epoch: unknown key; did you mean": lambda: palm.Trainer(task, epoch=3),
        "batch: expected a number above 0": lambda: palm.Trainer(task, batch=0),
        "backbone: missing": lambda: palm.Trainer(task).train(),
        "two tasks are called 'classification'": lambda: (
            palm.MultiHeadTrainer(two, backbone=start).recipe
        ),
        "mix_ratio: no task 'x'": lambda: palm.MultiHeadTrainer([task], mix_ratio={"x": 1}),
        "mix_ratio: 2 numbers for 1 task; give one each": lambda: palm.MultiHeadTrainer(
            [task], mix_ratio=[1, 2]
        ),
        "reference: no task 'x'": lambda: palm.MultiHeadTrainer([task], reference="x"),
        "no rows to train on": lambda: (
            palm.Trainer(palm.tasks.Classification.on(), backbone=start).recipe
        ),
        "define it at the top level": lambda: Local.on(train=[]),
        "LocalLion: recipes cannot name a nested class": lambda: (
            palm.Trainer(task, backbone=start, recipe={"optimizer": {"kind": LocalLion}}).recipe
        ),
        "optimizer.options.beta: unknown key; did you mean": lambda: trainer(
            tables, recipe={"optimizer": {"kind": Lion, "options": {"beta": 1}}}
        ).train(),
        "tests.helpers.own_encoder.Idle: spare.weight is not used": lambda: trainer(
            tables, recipe={"backbone": {"kind": "tests.helpers.own_encoder.Idle"}}
        ).train(),
        "deepspeed config: DeepSpeed refuses it: gradient_predivide_factor != 1.0": lambda: trainer(
            tables,
            deepspeed_config={"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 2},
        ).train(),
        r"train\[1\]: expected a mapping with columns, a text or a pair of texts, got 5": lambda: (
            palm.Trainer(
                palm.tasks.Classification.on(train=[{"text_a": "a"}, 5]), backbone=start
            ).recipe
        ),
        'no model "elsewhere"': lambda: palm.Trainer(task, backbone="elsewhere"),
        "Trainer.folder: expected a path, got 3": lambda: trainer(tables, folder=3),
        "save: nothing was trained": lambda: palm.Trainer(task, backbone=start).save(
            tmp_path / "x"
        ),
        'nowhere: no such folder, and cannot be downloaded: no model "nowhere"': lambda: (
            palm.Backbone.from_pretrained("nowhere")
        ),
        "nothing was trained: call train": lambda: trainer(tables).predict([{"text": "a"}]),
        'Classification.dropuot: unknown key; did you mean "dropout"': lambda: (
            palm.tasks.Classification(**{"dropuot": 0.1})
        ),
        "Classification.dropout: expected a number, got": lambda: palm.tasks.Classification(
            dropout="much"
        ).on(train=[]),  # type: ignore[arg-type]
        "Classification.smoothing: expected a number below 1, got 2": lambda: (
            palm.tasks.Classification(smoothing=2)
        ),
        r"unexpected keyword argument 'dropout'; its settings are arguments of the task: "
        r"Classification\(KEY=...\).on": lambda: classification(tables, dropout=0.1),
        "^Local.on lacks head; derive it from": lambda: abstract.on(train=[]),
        "Generation.generate: expected palm.DecodingSettings": lambda: palm.tasks.Generation(
            generate={"beams": 4}
        ),  # type: ignore[arg-type]
    }
    for message, do in wrong.items():
        with pytest.raises(UserError, match=message) as error:
            do()
        assert "\n" not in str(error.value)
    assert {"Classification", "MultipleChoice", "Tagging"} <= set(dir(palm.tasks))
    assert palm.tasks.MultiLabel is MultiLabel
    with pytest.raises(AttributeError, match="no task 'Classificatio'; did you mean"):
        palm.tasks.Classificatio  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        palm.Nothing  # noqa: B018  # type: ignore[attr-defined]


def test_tasks_cannot_change_after_training_has_started(tables):
    made = trainer(tables)
    made.mix_ratio = 2
    made.train_one_step()
    with pytest.raises(UserError, match="cannot be changed after training has started"):
        made.set_as_aux()


def test_all_names_exist():
    for name in palm.__all__:
        assert getattr(palm, name) is not None
    shown = {name for name in dir(palm) if not name.startswith("_")}
    assert shown == {*palm.__all__, "downloader", "heads", "metrics", "tasks"}
    assert is_single_process()


# A program, and the pages ----------------------------------------------------------------------

PROGRAM = """
import palm_ds as palm
from dataclasses import dataclass
from tests.helpers.own_task import Counting, HowMany
from tests.helpers.small_tables import TINY

@dataclass(frozen=True, kw_only=True)
class Mine(HowMany):
    pass

start = palm.Backbone.from_config(TINY, tokenizer="vocab.txt")
task = Mine.on(train=Counting(20), dev=Counting(6))
trainer = palm.Trainer(task, backbone=start, batch=8, epochs=1, length=32)
trainer.train()
print(sorted(trainer.evaluate()["mine"]))
"""


@pytest.mark.slow
def test_a_notebook_class_and_a_quiet_exit(tables):
    """Code typed into a notebook belongs to a module without a file."""
    done = run(["-c", PROGRAM], cwd=tables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['minus_error']"
    assert "Error" not in done.stderr and "terminate" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", ["api.md", "coming_from_paddlepalm.md"])
def test_the_examples_of_the_docs_run(page, tables, tmp_path, monkeypatch, trained, capsys):
    """From top to bottom, in one module, next to files with the names that they use. What is shown
    below an example is printed by it, up to numbers."""
    monkeypatch.chdir(tmp_path)
    trained.trainer.save(tmp_path / "models/mine")
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_bytes((tables / f"{name}.tsv").read_bytes())
    (tmp_path / "new.tsv").write_text("text_a\nw1 w2\nw30 w31\n")
    (tmp_path / "pairs.tsv").write_text(
        "text_a\ttext_b\tlabel\n" + "".join(f"w{i}\tw{i + 1}\t{i % 2}\n" for i in range(16))
    )
    (tmp_path / "names.conll").write_text("w1 B-X\nw2 O\n\nw3 O\nw4 B-X\n\n" * 8)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    blocks = r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```)?"
    examples = re.findall(blocks, (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert examples
    for number, (example, shown) in enumerate(examples):
        exec(compile(example, f"{page}, example {number}", "exec"), vars(module))
        printed = capsys.readouterr().out
        for line in same_but_numbers(shown if "print(" in example else ""):
            assert line in same_but_numbers(printed), f"{page}, example {number}"


def test_a_stop_from_outside_ends_the_program_with_its_code(tables, tmp_path):
    """As `palm-ds run` expects, which then starts it again."""

    def stop(event: Any) -> None:
        if isinstance(event, palm.event.EndIteration) and event.batch_id == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        trainer(tables, folder=tmp_path / "run").train(stop)
    assert ended.value.code == 75 and checkpoint.steps_in(tmp_path / "run/checkpoints") == [3]


def test_a_finished_folder_gives_its_scores(tables, tmp_path):
    before = sys.excepthook
    first = trainer(tables, epochs=1, folder=tmp_path / "run")
    scores = first.train()
    assert scores["classification"]["accuracy"] >= 0
    assert first.train() == scores  # a notebook's cell that is run again
    again = trainer(tables, epochs=1, folder=tmp_path / "run")
    found = again.train()
    assert found.keys() == scores.keys() and again.scores
    assert all(found[task] == pytest.approx(scores[task]) for task in scores)
    assert list(again.scores["classification"]) == list(scores["classification"])
    assert sys.excepthook is before  # torch's would put [rank0] before every traceback
    assert again.report()._repr_html_().startswith("<iframe")


def test_task_names_that_no_file_can_have_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"text_a": "w1", "label": "no"}]
    for name in ("a.b", "a/b", "../../x", "a + b", "type", "x" * 81, "a\nb", " a", "a "):
        with pytest.raises(UserError, match="Classification.on: name: "):
            palm.tasks.Classification.on(name=name, train=rows)
    for name in ("a", "a b", "情感", "x-1_y"):
        assert palm.tasks.Classification.on(name=name, train=rows).name == name
    assert list(tmp_path.iterdir()) == []


SENTENCES = [(f"w{i}", f"w{i} w{i + 1}") for i in range(1, 16)]


@pytest.mark.parametrize(
    ("kind", "given", "columns"),
    [
        ("Retrieval", ["anchor", "positive"], {"query", "positive"}),
        ("Retrieval", ["anchor", "positive", "negative"], {"query", "positive", "negatives"}),
        (
            "Retrieval",
            ["anchor", "positive", "negative_1", "negative_2"],
            {"query", "positive", "negatives"},
        ),
        ("Retrieval", 2, {"query", "positive"}),
        ("Retrieval", 4, {"query", "positive", "negatives"}),
        ("Similarity", ["sentence1", "sentence2", "score"], {"text_a", "text_b", "label"}),
        ("Similarity", ["sentence_A", "sentence_B", "label"], {"text_a", "text_b", "label"}),
        ("Similarity", 3, {"text_a", "text_b", "label"}),
        ("Regression", 2, {"text_a", "label"}),
    ],
)
def test_rows_of_sentence_transformers(tables, kind, given, columns):
    """By their columns' names, or as tuples; without rows to evaluate on."""
    many = given if isinstance(given, int) else len(given)
    scored = kind != "Retrieval"
    rows: list[Any] = []
    for i, (one, other) in enumerate(SENTENCES):
        texts = [one, other, "w30", "w31"][: many - scored]
        values = [*texts, i / 20] if scored else texts
        named = dict(zip(given, values, strict=True)) if isinstance(given, list) else tuple(values)
        rows.append(named)
    task = getattr(palm.tasks, kind).on(name="vectors", train=rows)
    made = palm.Trainer(task, backbone=backbone(tables), **{**QUIET, "epochs": 1})
    assert made.train() == {}
    ((_, source, _),) = made.data.train["vectors"]
    assert set(source.columns) == columns
    if "negatives" in columns:
        assert source.row(0)["negatives"] == ["w30", "w31"][: many - 2]
    if scored:
        assert source.row(3)["label"] == "0.15"


@pytest.mark.parametrize("kind", ["Retrieval", "SparseRetrieval"])
def test_retrieval_is_scored_by_searching_also_after_the_training(tables, kind):
    rows = [{"query": one, "positive": other} for one, other in SENTENCES]
    task = getattr(palm.tasks, kind).on(name="find", train=rows, dev=rows)
    made = palm.Trainer(task, backbone=backbone(tables), **{**QUIET, "epochs": 1})
    found = dict(made.train()["find"])
    assert found.pop("loss") > 0 and found["ndcg@10"] > 0
    model = palm.load(made.folder)
    for scores in (made.evaluate(), made.evaluate(rows), model.evaluate(SENTENCES)):
        assert scores["find"] == pytest.approx(found)
    assert made.predict(rows[:1]).rows[0].keys() == {"score", "scores"}
    several = [(*pair, "w30", "w31") for pair in SENTENCES]  # with negatives, as in training
    assert [len(each["scores"]) for each in made.predict(several[:2]).rows] == [3, 3]
    assert model.predict(several).rows == made.predict(several).rows
    assert model.evaluate(several)["find"].keys() == found.keys()


def test_scores_that_are_no_numbers_are_nan_also_of_a_finished_run(tables, tmp_path):
    rows = [{"text_a": "w1", "text_b": f"w{n}", "label": int(not n)} for n in range(6)]
    task = palm.tasks.Ranking.on(name="rank", train=rows, dev=rows[1:])  # nothing is relevant
    given = {**QUIET, "epochs": 1, "folder": tmp_path / "run"}
    first, again = (palm.Trainer(task, backbone=backbone(tables), **given).train() for _ in "12")
    assert math.isnan(first["rank"]["mrr"])
    assert again["rank"] == pytest.approx(first["rank"], nan_ok=True)


def test_class_pairs_predict_nothing(tables):
    task = palm.tasks.ClassPairs.on(name="pairs", train=tables / "train.tsv")
    made = palm.Trainer(task, backbone=backbone(tables), **{**QUIET, "epochs": 1})
    made.train()
    with pytest.raises(UserError, match=r"its tasks \(pairs\) predicts anything for rows"):
        made.evaluate()


def test_retrieval_without_its_columns_names_them(tables):
    task = palm.tasks.Retrieval.on(train=[{"question": "w1", "answer": "w2"}] * 4)
    with pytest.raises(UserError, match="retrieval has no column 'positive'; it has question"):
        palm.Trainer(task, backbone=backbone(tables), **QUIET).train()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t, b: palm.Trainer([t], backbone=b),
            "Trainer: task: expected a task with its rows",
        ),
        (lambda t, b: palm.Trainer("mood", backbone=b), "palm.tasks.Classification.on"),
        (lambda t, b: palm.Trainer(t, b), "give others by name: backbone="),
        (lambda t, b: palm.Trainer(t, backbone=5), "Trainer: backbone: expected palm.Backbone"),
        (lambda t, b: palm.Trainer(t, backbone=torch.nn.Linear(1, 1)), "save_pretrained writes"),
        (lambda t, b: palm.Trainer(t, backbone=b, folder=__file__).train(), "is a file; name a f"),
        (lambda t, b: palm.Trainer(t, backbone=b, learning_rate=1), "unknown key; here it is lr$"),
        (lambda t, b: palm.Trainer(t, backbone=b, compute_metrics=len), "here it is metrics="),
        (lambda t, b: palm.Trainer(t, backbone=b, report_to="wandb"), 'here it is recipe={"track"'),
        (lambda t, b: palm.MultiHeadTrainer(t, backbone=b), "tasks: expected a list, each a task"),
        (lambda t, b: palm.MultiHeadTrainer([], backbone=b), "tasks: empty; name at least one"),
        (lambda t, b: palm.MultiHeadTrainer([t], backbone=b, mix_ratio=0.5), "{task: number}"),
        (lambda t, b: palm.MultiHeadTrainer([t], backbone=b, metrics=len), "{task: functions"),
        (lambda t, b: palm.Trainer(t, backbone=b).train(5), "event_handler: expected a function"),
        (
            lambda t, b: palm.tasks.Regression.on(columns=["a"]),
            "Regression.on: columns: expected {",
        ),
        (lambda t, b: palm.tasks.Regression("a.tsv"), "Regression: takes rows by Regression.on("),
        (lambda t, b: palm.tasks.Tagging(train="a.tsv"), "Tagging: takes rows by Tagging.on(train"),
        (lambda t, b: palm.tasks.Regression.on("a.tsv"), "give others by name: train="),
        (lambda t, b: palm.Backbone.from_pretrained(5), "name: expected text or a path, got 5"),
        (lambda t, b: palm.load(5), "load: path: expected text or a path, got 5"),
    ],
)
def test_wrong_arguments_are_one_line(tables, call, message):
    with pytest.raises(UserError, match=re.escape(message).replace("\\$", "$")) as error:
        call(classification(tables), backbone(tables))
    assert "\n" not in str(error.value)


def test_modules_of_paddlepalm_point_to_what_is_in_their_place():
    for name in ("reader", "head", "backbone", "optimizer", "lr_sched"):
        with pytest.raises(AttributeError, match=r"docs/coming_from_paddlepalm.md"):
            getattr(palm, name)
