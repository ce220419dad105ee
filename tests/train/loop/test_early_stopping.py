"""Which evaluation was the best, and when to stop."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.task import build
from palm_ds.train.evaluate.evaluate import TaskScore
from palm_ds.train.loop.early_stopping import BestTracker, check_held_out
from palm_ds.train.recipe.sections import EvaluateSettings, SaveSettings

TASKS = {
    name: build(name, {"kind": "classification", "source": name, "auxiliary": name == "helper"})
    for name in ("a", "b", "helper")
}
OF_CORPUS = {
    "masks": build("masks", {"kind": "knowledge_masking", "source": "text"}),
    "replaced": build("replaced", {"kind": "replaced_token_detection", "source": "text"}),
}


def score(accuracy: float, loss: float = 1.0, **metrics: float) -> TaskScore:
    return TaskScore(
        count=10,
        loss=loss,
        accuracy=accuracy,
        baseline_loss=1.0,
        baseline_accuracy=0.5,
        metrics=metrics,
    )


def best(**settings: Any) -> BestTracker:
    return BestTracker(EvaluateSettings(**settings), TASKS)


def test_tracking_is_off_by_default() -> None:
    assert not best().enabled and not best().should_stop
    assert best(best="mean").enabled


def test_scores_without_a_value_are_refused_at_the_start() -> None:
    bare, message = {"a": score(math.nan)}, "evaluate.best: .*: there is no score but the loss"
    for name in ("mean", "a"):
        with pytest.raises(UserError, match=message):
            best(best=name).check_scores(bare)
        best(best=name).check_scores(bare | {"b": score(0.5)})
        best(best=name).check_scores({"a": score(math.nan, f1=0.0)})
    best(best="a.loss").check_scores(bare)
    with pytest.raises(UserError, match="evaluate.best: a has no 'f2'"):
        best(best="a.f2").check_scores({"a": score(0.5, f1=0.0)})
    chosen = [best(best=name).compared for name in ("mean", "a", "a.f1", "")]
    assert chosen == [["a", "b"], ["a"], ["a"], []]


def test_ties_go_to_the_first() -> None:
    chosen = best(best="a")
    seen = [
        chosen.update(step, {"a": score(x)}) for step, x in enumerate([0.5, 0.7, 0.7, 0.6, 0.8])
    ]
    assert seen == [True, True, False, False, True]
    assert (chosen.step, chosen.value, chosen.evals_since_best) == (4, 0.8, 0)


def test_the_mean_covers_first_metrics_of_non_auxiliary_tasks() -> None:
    chosen = best(best="mean")
    scores = {"a": score(0.9, f1=0.4, other=1.0), "b": score(0.6), "helper": score(0.1)}
    assert chosen.update(1, scores) and chosen.value == pytest.approx((0.4 + 0.6) / 2)
    # The auxiliary task improves a lot, the others get worse: not an improvement.
    worse = {"a": score(0.9, f1=0.3), "b": score(0.6), "helper": score(1.0)}
    assert not chosen.update(2, worse) and chosen.step == 1


def test_a_task_that_has_only_a_loss_does_not_count_in_the_mean() -> None:
    """Such as class_pairs: the mean would never be better than before."""
    chosen, nothing = best(best="mean"), score(math.nan)
    assert chosen.update(1, {"a": nothing, "b": score(0.6)}) and chosen.value == 0.6
    assert chosen.update(2, {"a": nothing, "b": score(0.7)}) and chosen.value == 0.7
    for name in ("mean", "a"):
        with pytest.raises(UserError, match=f"best: {name}: there is no score but the loss; name"):
            best(best=name).update(1, {"a": nothing})
    assert best(best="a.loss").update(1, {"a": nothing})


@pytest.mark.parametrize(
    ("name", "value"),
    [("a", 0.4), ("a.f1", 0.4), ("a.other", 0.9), ("a.accuracy", 0.7), ("a.loss", -2.5)],
)
def test_any_metric_of_a_task_can_be_tracked(name, value) -> None:
    chosen = best(best=name)
    chosen.update(1, {"a": score(0.7, loss=2.5, f1=0.4, other=0.9)})
    assert chosen.value == value


@pytest.mark.parametrize(
    "metric", ["mse", "rmse", "mae", "perplexity", "mean_absolute_error", "hinge_loss"]
)
def test_a_smaller_error_is_better(metric: str) -> None:
    chosen = best(best=f"a.{metric}")
    seen = [
        chosen.update(step, {"a": score(0.5, pearson=0.1, **{metric: x})})
        for step, x in enumerate([3.0, 4.0, 2.0])
    ]
    assert seen == [True, False, True]
    assert str(chosen) == f"a.{metric} 2.0000"


@pytest.mark.parametrize("name", ["a", "mean"])
def test_a_smaller_error_is_better_as_the_first_metric_too(name: str) -> None:
    """Such as a metric of the user's own, of a task that has none."""
    chosen = best(best=name)
    seen = [
        chosen.update(step, {"a": score(math.nan, mean_squared_error=x)})
        for step, x in enumerate([3.0, 4.0, 2.0])
    ]
    assert seen == [True, False, True]


@pytest.mark.parametrize("metric", ["minus_error", "neg_mean_squared_error", "negative_log_loss"])
def test_a_larger_negated_error_is_better(metric: str) -> None:
    """The first is that of docs/api.md, the second is scikit-learn's."""
    chosen = best(best="a")
    seen = [
        chosen.update(step, {"a": score(math.nan, **{metric: x})})
        for step, x in enumerate([-3.0, -4.0, -2.0])
    ]
    assert seen == [True, False, True]
    assert str(chosen) == "a -2.0000"


def test_a_correlation_below_zero_is_shown_with_its_sign() -> None:
    chosen = best(best="a.matthews")
    assert chosen.update(1, {"a": score(0.4, matthews=-0.25)})
    assert str(chosen) == "a.matthews -0.2500"


def test_a_smaller_loss_is_better() -> None:
    chosen = best(best="a.loss")
    seen = [
        chosen.update(step, {"a": score(0.5, loss=x)}) for step, x in enumerate([2.0, 1.0, 1.5])
    ]
    assert seen == [True, True, False] and chosen.step == 1


def test_nan_is_never_the_best() -> None:
    chosen = best(best="a", patience=2)
    assert not chosen.update(1, {"a": score(0.9, pearson=math.nan)})
    assert chosen.step == -1 and chosen.evals_since_best == 1 and not chosen.should_stop
    assert not chosen.update(2, {"a": score(0.9, pearson=math.nan)})
    assert chosen.should_stop


def test_patience_counts_evaluations_since_the_best() -> None:
    chosen = best(best="a", patience=2)
    exhausted = []
    for step, x in enumerate([0.5, 0.4, 0.6, 0.6, 0.5]):
        chosen.update(step, {"a": score(x)})
        exhausted.append(chosen.should_stop)
    assert exhausted == [False, False, False, False, True]


@pytest.mark.parametrize(("name", "counted"), [("b", 0), ("a", 2), ("mean", 0)])
def test_patience_waits_for_the_stage_of_a_compared_task(name: str, counted: int) -> None:
    """It ended the run before that stage."""
    chosen = best(best=name, patience=2)
    scores = {"a": score(0.5), "b": score(0.5), "helper": score(0.5)}
    for step in (1, 2, 3):
        chosen.update(step, scores, started={"a"})
    assert chosen.evals_since_best == counted and chosen.should_stop == (counted > 0)
    for step in (4, 5):
        chosen.update(step, scores, started={"a", "b"})
    assert chosen.evals_since_best == counted + 2 and chosen.should_stop


def test_patience_does_not_wait_for_a_task_that_is_in_no_stage() -> None:
    chosen = best(best="mean", patience=2)
    for step in (1, 2, 3):
        chosen.update(step, {"a": score(0.5)}, started={"a"})
    assert chosen.should_stop


def test_a_resumed_tracker_equals_an_uninterrupted_one() -> None:
    values = [0.5, 0.7, 0.6, 0.65, 0.64, 0.63]
    for cut in range(len(values) + 1):
        whole, first = best(best="a", patience=3), best(best="a", patience=3)
        for step, x in enumerate(values):
            whole.update(step, {"a": score(x)})
        for step, x in enumerate(values[:cut]):
            first.update(step, {"a": score(x)})
        second = best(best="a", patience=3)
        second.restore(json.loads(json.dumps(first.record())))
        for step, x in enumerate(values[cut:], cut):
            second.update(step, {"a": score(x)})
        assert second.record() == whole.record() and second.should_stop == whole.should_stop
    empty = best(best="a")
    empty.restore({})
    nothing = {"value": None, "step": -1, "since": 0, "values": {}}
    measured = {"examples": None, "mask_rate": None, "metrics": {}}
    assert empty.record() == {"best": "a", "measured": measured, **nothing}


@pytest.mark.parametrize("metric", ["", "a.f1", "mean"])
def test_values_of_saved_evaluations_survive_a_restart(metric: str) -> None:
    """Without `evaluate.best`, the mean loss of the tasks that are not auxiliary."""
    tracker = best(best=metric)
    for step, loss in enumerate([3.0, 1.0, math.nan, 2.0]):
        f1 = {"f1": 1 - loss / 10}
        scores = {"a": score(0.5, loss, **f1), "b": score(0.5, loss + 1, **f1)}
        better = tracker.update(step, scores | {"helper": score(0.1, 9.0)}, saved=step > 0)
        assert better == (bool(metric) and step < 2)
    assert tracker.values == pytest.approx({1: 0.9, 3: 0.8} if metric else {1: -1.5, 3: -2.5})
    other = best(best=metric)
    other.restore(json.loads(json.dumps(tracker.record())))
    assert other == tracker


@pytest.mark.parametrize(("before", "now"), [("a.accuracy", "a.loss"), ("", "a"), ("a", "mean")])
def test_values_of_another_metric_are_not_compared(before: str, now: str) -> None:
    """No negated loss is above an accuracy."""
    first, second = best(best=before), best(best=now, patience=2)
    for step in (1, 2):
        first.update(step, {"a": score(0.8, loss=0.5)}, saved=True)
    line = second.restore(json.loads(json.dumps(first.record())))
    assert repr(now) in line and (repr(before) if before else "was none") in line
    assert second == best(best=now, patience=2)
    assert second.update(3, {"a": score(0.7, loss=0.6)}, saved=True) and second.step == 3


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("examples", 100, 200),
        ("mask_rate", None, 0.15),
        ("metrics", {}, {"a": ["mine.kappa"]}),
    ],
)
def test_values_that_were_measured_otherwise_are_not_compared(
    key: str, before: object, now: object
) -> None:
    first, second = best(best="a", **{key: before}), best(best="a", **{key: now})
    first.update(1, {"a": score(0.8)}, saved=True)
    line = second.restore(json.loads(json.dumps(first.record())))
    shown = "none" if key != "examples" else "100"
    assert line.startswith(f"evaluate.{key} was {shown} and is {now!r} now: the best evaluation, ")
    assert second == best(best="a", **{key: now})
    again = best(best="a", **{key: before})
    assert again.restore(json.loads(json.dumps(first.record()))) == "" and again == first


def test_metrics_of_a_task_that_is_not_compared_change_nothing() -> None:
    first, second = best(best="a"), best(best="a", metrics={"b": ["mine.kappa"]})
    first.update(1, {"a": score(0.8)}, saved=True)
    assert second.restore(json.loads(json.dumps(first.record()))) == "" and second.step == 1


def test_the_metric_of_the_first_checkpoints_is_taken_as_the_same() -> None:
    first, second = best(best="a"), best(best="a")
    first.update(1, {"a": score(0.8)}, saved=True)
    record = first.record()
    del record["best"], record["measured"]
    assert second.restore(record) == "" and second == first


def test_the_best_checkpoints_need_rows_to_evaluate() -> None:
    check_held_out(SaveSettings(best=2), {"a"})
    check_held_out(SaveSettings(), set())
    with pytest.raises(UserError, match="save.best: there are no rows to evaluate on"):
        check_held_out(SaveSettings(best=1), set())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("c", "'c' is neither `mean` nor `task.metric` of a task"),
        ("halper.f1", 'did you mean "helper"'),
        ("meen", "evaluate.best: 'meen'"),
    ],
)
def test_an_unknown_name_is_refused_immediately(name, message) -> None:
    with pytest.raises(UserError, match=message):
        best(best=name)


def test_an_unknown_metric_is_refused_with_the_known_ones() -> None:
    for metric, known in (
        ("acuracy", 'did you mean "accuracy"\\?'),
        ("f2", "known: accuracy, f1, loss"),
    ):
        with pytest.raises(UserError, match=f"a has no '{metric}'; {known}$"):
            best(best=f"a.{metric}").update(1, {"a": score(0.5, f1=0.5)})
    with pytest.raises(UserError, match="no rows to evaluate 'b' on; give its source `validation`"):
        best(best="b").update(1, {"a": score(0.5)})
    with pytest.raises(UserError, match="evaluate.best: masks has no 'f1'; known: accuracy, loss$"):
        BestTracker(EvaluateSettings(best="masks.f1"), OF_CORPUS).check({"masks"})
    for name in ("masks", "masks.loss", "replaced.f1"):  # its head counts more
        BestTracker(EvaluateSettings(best=name), OF_CORPUS).check({"masks", "replaced"})
    with pytest.raises(UserError, match="evaluate.patience: needs `best`"):
        EvaluateSettings(patience=2)


def test_tracking_needs_rows_to_evaluate() -> None:
    best(best="mean").check({"a"})
    best().check(set())
    for name, scored in (("mean", set()), ("mean", {"helper"}), ("b", {"a", "helper"})):
        with pytest.raises(UserError, match="evaluate.best: .*give .* `validation`"):
            best(best=name).check(scored)
