"""Callbacks are called in order, on their events, and can end the training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import palm_ds as palm
from palm_ds.api.event_dispatcher import HOOKS
from palm_ds.common.errors import UserError
from palm_ds.weights.formats.weights_info import INFO, read_info
from tests.helpers.small_tables import TINY, write_tables

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"), train=32, dev=8)


def trainer(tables: Path, **values: Any) -> Any:
    task = palm.tasks.Classification.on(train=tables / "train.tsv", dev=tables / "dev.tsv")
    backbone = palm.Backbone.from_config(TINY, tokenizer=tables / "vocab.txt")
    usual = {"batch": 8, "epochs": 2, "lr": 2e-3, "length": 32, "log_every": 3}
    usual["recipe"] = {"export_onnx": []}
    ds_config = {"zero_optimization": {"stage": 0}}
    return palm.Trainer(task, backbone=backbone, deepspeed_config=ds_config, **{**usual, **values})


class Recorder(palm.Callback):
    """Notes every call."""

    def __init__(self, name: str, calls: list[tuple[str, str, Any]]):
        self.name, self.calls = name, calls

    def __getattribute__(self, name: str) -> Any:
        if name not in HOOKS:
            return super().__getattribute__(name)
        return lambda trainer, event: self.calls.append((self.name, name, event))


def right(predictions: list[dict[str, Any]], labels: list[str]) -> float:
    return sum(p["label"] == x for p, x in zip(predictions, labels, strict=True)) / len(labels)


def surest(predictions: list[dict[str, Any]], labels: list[str]) -> dict[str, float]:
    return {"surest": max(max(each["probs"]) for each in predictions)}


def test_the_calls_of_a_training_and_metrics_of_the_users_own(
    tables: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[str, str, Any]] = []
    handled: list[Any] = []
    first, second = Recorder("first", calls), Recorder("second", calls)
    made = trainer(
        tables, callbacks=[first, second], metrics=[right, surest], best="classification.right"
    )
    scores = made.train(handled.append)["classification"]
    assert [x for x in calls if x[0] == "first"] == [("first", *x[1:]) for x in calls[1::2]]
    hooks = [hook for name, hook, _ in calls if name == "first"]
    step = ["on_step_begin", "on_step_end"]
    epoch = ["on_epoch_begin", *step * 4, "on_evaluate", "on_epoch_end"]
    assert [hook for hook in hooks if hook not in ("on_log", "on_save")] == [
        "on_train_begin",
        *epoch * 2,
        "on_train_end",
    ]
    logs = [event.batch_id for name, hook, event in calls if (name, hook) == ("first", "on_log")]
    assert logs == [2, 5] and hooks.count("on_save") == 1
    events = [event for name, hook, event in calls if name == "first" and hook != "on_log"]
    assert events == handled
    assert list(scores) == ["accuracy", "f1", "auc", "matthews", "right", "surest", "loss"]
    assert scores["right"] == scores["accuracy"] and 0.5 <= scores["surest"] <= 1
    assert made.recipe.evaluate.metrics == {
        "classification": [f"{__name__}.right", f"{__name__}.surest"]
    }
    again = palm.load(made.folder).evaluate(tables / "dev.tsv")["classification"]
    assert again["right"] == pytest.approx(again["accuracy"])
    monkeypatch.delattr(sys.modules[__name__], "surest")  # as where the notebook is not
    elsewhere = palm.load(made.folder).evaluate(tables / "dev.tsv")["classification"]
    assert elsewhere == {name: again[name] for name in again if name not in ("right", "surest")}
    assert "classification: not scored by metrics of your own: " in caplog.text


def test_steps_by_hand_have_the_calls_of_a_training(tables: Path) -> None:
    calls: list[tuple[str, str, Any]] = []
    trainer(tables, callbacks=[Recorder("whole", calls)]).train()
    made = trainer(tables, callbacks=[Recorder("by hand", calls)])
    while made.cur_train_step < made.steps:
        made.train_one_step()
    hooks = [[hook for name, hook, _ in calls if name == who] for who in ("whole", "by hand")]
    assert hooks[0] == hooks[1]


def test_steps_by_hand_end_with_early_stopping(tables: Path) -> None:
    made = trainer(tables, epochs=8, best="mean", patience=1)
    while not made.finished:
        made.train_one_step()
    assert 0 < made.cur_train_step < made.steps
    with pytest.raises(
        UserError, match=rf"training has finished after {made.cur_train_step} steps"
    ):
        made.train_one_step()


def test_evaluations_end_epochs_or_are_as_the_recipe_says(tables: Path) -> None:
    """An epoch has four steps."""

    def every(**values: Any) -> int:
        return trainer(tables, **values).run.recipe.evaluate.every

    assert [every(epochs=epochs) for epochs in (0.5, 1, 1.5, 3)] == [4] * 4
    assert every(evaluate_every=3) == every(recipe={"evaluate": {"every": 3}}) == 3
    assert every(recipe={"evaluate": {"passes": True}}) == 0  # the epochs themselves
    calls: list[tuple[str, str, Any]] = []
    own = {"callbacks": [Recorder("a", calls)], "recipe": {"log": {"every": 2}, "export_onnx": []}}
    trainer(tables, epochs=1, **own).train()
    assert [event.batch_id for _, hook, event in calls if hook == "on_log"] == [1, 3]


def test_callbacks_and_metrics_of_a_trainer_count_among_others(tables: Path) -> None:
    calls: list[tuple[str, str, Any]] = []
    one = trainer(tables, callbacks=[Recorder("one", calls)], metrics=right)
    other = palm.tasks.Classification.on(
        name="other", train=tables / "train.tsv", dev=tables / "dev.tsv"
    )
    own = {"callbacks": [Recorder("both", calls)], "metrics": {"other": surest}}
    usual = {"batch": 8, "epochs": 1, "length": 32, "recipe": {"export_onnx": []}}
    scores = palm.MultiHeadTrainer([one, other], **own, **usual).train()
    assert "right" in scores["classification"] and "surest" in scores["other"]
    assert [name for name, hook, _ in calls if hook == "on_train_end"] == ["one", "both"]


def test_metrics_of_scikit_learn_get_labels_and_values(tables: Path) -> None:
    from sklearn.metrics import accuracy_score, f1_score

    scores = trainer(tables, metrics=accuracy_score, epochs=1).train()["classification"]
    assert scores["accuracy_score"] == pytest.approx(scores["accuracy"])
    with pytest.raises(
        UserError, match=r"^metrics: f1_score: pos_label=1 is not a valid label"
    ) as e:
        trainer(tables, metrics=f1_score, epochs=1).train()
    assert "write a function of (predictions, labels)" in str(e.value)


def test_every_method_of_callback_is_called() -> None:
    methods = {name for name in vars(palm.Callback) if not name.startswith("_")}
    assert set(HOOKS) == methods and len(HOOKS) == len(methods)


class StopAfter:
    """Not derived from palm.Callback."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_step_end(self, trainer: Any, event: Any) -> None:
        assert trainer.cur_train_step == event.batch_id + 1
        if trainer.cur_train_step == self.steps:
            trainer.stop_training()


def test_a_callback_ends_the_training_with_weights(tables: Path, tmp_path: Path) -> None:
    """Those after the steps that were done. The folder is finished then, until a step is asked
    for."""
    made = trainer(tables, callbacks=[StopAfter(3)], folder=tmp_path / "run")
    scores = made.train()
    assert made.cur_train_step == 3 and made.steps == 8
    assert read_info(tmp_path / "run/weights" / INFO).made_by["steps"] == 3
    assert len(made.predict(["w1"])["classification"]) == 1
    by_hand = trainer(tables)
    for _ in range(3):
        by_hand.train_one_step()
    by_hand.save(tmp_path / "by_hand")
    one, other = (
        load_file(tmp_path / x / "weights.safetensors") for x in ("run/weights", "by_hand")
    )
    assert all(torch.equal(one[name], other[name]) for name in other)
    again = trainer(tables, folder=tmp_path / "run")
    assert again.train() == scores and again.cur_train_step == 3
    assert read_info(tmp_path / "run/weights" / INFO).made_by["steps"] == 3
    longer = trainer(tables, folder=tmp_path / "run")
    longer.train_one_step()
    assert longer.cur_train_step == 4
    longer.train()
    assert longer.cur_train_step == 8
    assert read_info(tmp_path / "run/weights" / INFO).made_by["steps"] == 8


def test_gradient_checkpointing_gives_the_same_weights(tables: Path, tmp_path: Path) -> None:
    """With dropout, bit for bit, from fewer stored numbers."""
    found, stored = [], []
    for on in (False, True):
        made = trainer(tables, epochs=1, gradient_checkpointing=on)
        assert made.run.ds_config.activation_checkpointing is on
        assert made.recipe.backbone_config.dropout > 0
        kept: list[int] = []

        def pack(x: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            made.train_one_step()
        stored.append(sum(kept))
        made.train()
        found.append(load_file(made.folder / "weights/weights.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert found[0].keys() == found[1].keys() and stored[1] < 0.6 * stored[0]


def test_mistakes_are_one_line(tables: Path) -> None:
    import transformers

    class Misspelled(palm.Callback):
        def on_step_ended(self, trainer: Any, event: Any) -> None:
            pass

    class WrongShape:
        def on_step_end(self) -> None:
            pass

    class NoMethod:
        on_step_end = 5

    theirs = transformers.EarlyStoppingCallback()
    wrong: dict[str, dict[str, Any]] = {
        r"callbacks\[1\]: EarlyStoppingCallback is a callback of transformers; derive it": {
            "callbacks": [palm.Callback(), theirs]
        },
        r"callbacks\[0\]: no event 'on_step_ended'; did you mean \"on_step_end\"\?": {
            "callbacks": [Misspelled()]
        },
        r"callbacks\[0\]: expected an object with methods": {"callbacks": [Misspelled]},
        r"callbacks\[0\]: expected an object with": {"callbacks": [5]},
        r"callbacks: expected a list of objects with methods of palm.Callback, got": {
            "callbacks": palm.Callback()
        },
        r"callbacks\[0\]: on_step_end: expected a method of": {"callbacks": [WrongShape()]},
        r"callbacks\[0\]: on_step_end: expected a method of \(": {"callbacks": [NoMethod()]},
        r"metrics: <lambda>: takes other arguments than": {"metrics": lambda p: 1.0},
        r"metrics: expected functions \(predictions, labels\), got \['f1'\]": {"metrics": ["f1"]},
        r"<lambda>: recipes cannot name a nested function or lambda; define it at": {
            "metrics": lambda p, x: 1.0
        },
    }
    for message, values in wrong.items():
        with pytest.raises(UserError, match=message) as error:
            trainer(tables, **values).recipe  # noqa: B018
        assert "\n" not in str(error.value)
