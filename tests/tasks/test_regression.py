"""Numbers: equal to BertForSequenceClassification, in the units of the file, clipped."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.tasks.regression import Regression
from tests.helpers.text_tables import built_of, dataset_of, make_task, source_of

ROWS = [
    {"text_a": "so good", "text_b": "good", "label": 4.5},
    {"text_a": "bad", "text_b": "very good ?", "label": 1},
    {"text_a": "", "text_b": "x", "label": "2.5"},
]
VALUES = np.array([4.5, 1, 2.5])


task_of = partial(make_task, Regression, "degree")


def test_statistics_of_the_training_rows_are_kept_by_default(tmp_path: Path) -> None:
    task = task_of().resolved(source_of(tmp_path, ROWS))
    assert (task.mean, task.deviation) == pytest.approx((VALUES.mean(), VALUES.std()))
    assert task.resolved(source_of(tmp_path, ROWS[:2])) == task
    same = task_of().resolved(source_of(tmp_path, ROWS[:1] * 2))
    assert (same.mean, same.deviation) == (4.5, 1.0)
    rounded = task_of().resolved(source_of(tmp_path, [{"text_a": "x", "label": 0.1}] * 3))
    assert rounded.deviation == 1.0  # that of NumPy is 1e-17
    plain = task_of(scale=False)
    assert plain.resolved(source_of(tmp_path, ROWS)) == plain


@pytest.mark.parametrize(("score", "value"), [(-3.0, 1.0), (2.25, 2.25), (9.0, 5.0)])
def test_predictions_are_clipped(score: float, value: float) -> None:
    task = task_of(low=1, high=5)
    scores = np.array([[score]], np.float32)
    assert task.decode(scores, None, None) == {"value": value}  # type: ignore[arg-type]
    # in the units of the file: 0 deviations from the mean is the mean
    scaled = replace(task, mean=4.0, deviation=2.0)
    expected = min(max(score * 2 + 4, 1), 5)
    assert scaled.decode(scores, None, None)["value"] == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("scale", "offset"), [(True, 0.0), (True, 1000.0), (False, 0.0)])
def test_small_differences_are_kept(tmp_path: Path, scale: bool, offset: float) -> None:
    """Metrics read what is written, so that a perfect head has the best scores."""
    numbers = [offset + i * 1e-7 for i in range(10)]
    source = source_of(tmp_path, [{"text_a": "x", "label": x} for x in numbers])
    task = task_of(scale=scale).resolved(source)
    heads = (np.array(numbers) - task.mean) / (task.deviation or 1)
    made = {
        i: task.decode(np.array([[x]]), None, source)  # type: ignore[arg-type]
        for i, x in enumerate(heads)
    }
    assert [each["value"] for each in made.values()] == pytest.approx(numbers, abs=1e-12)
    assert task.metrics(made, source)["pearson"] == pytest.approx(1.0)


def test_scores_equal_scipys_over_rows_with_a_number(tmp_path: Path) -> None:
    from scipy.stats import pearsonr, spearmanr

    rows = [{"text_a": "x", "label": y} for y in (1, 2, "n/a", 3.5, 2, 0)]
    source, found = source_of(tmp_path, rows), [0.5, 2.5, 9, 3, 1, 1]
    scores = task_of().metrics({i: {"value": x} for i, x in enumerate(found)}, source)
    truth, guess = [1, 2, 3.5, 2, 0], [0.5, 2.5, 3, 1, 1]
    linear, ranks = pearsonr(guess, truth).statistic, spearmanr(guess, truth).statistic
    expected = {
        "pearson_and_spearman": (linear + ranks) / 2,
        "pearson": linear,
        "spearman": ranks,
        "mse": np.mean(np.subtract(guess, truth) ** 2),
    }
    assert list(scores) == list(expected)
    assert scores == pytest.approx(expected)
    assert task_of().metrics({2: {"value": 1.0}}, source) == {}


def test_the_baseline_predicts_the_mean(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    for task, unit in ((task_of(scale=False), 1.0), (task_of().resolved(source), VALUES.std())):
        _, batch = built_of(dataset_of(source, task))
        loss, right = task.baseline(batch.labels["degree"][1].numpy(), source)
        assert loss.mean() == pytest.approx(VALUES.var() / unit**2)
        assert np.isnan(right).all()


def test_numbers_that_cannot_be_learned_are_remarked_on(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": "a", "label": 3}, {"text_a": "b", "label": 3}])
    assert task_of().describe(source) == "degree: labels: all are 3; there is nothing to learn"
    source = source_of(tmp_path, [{"text_a": "a", "label": x} for x in (0, 1, 2)])
    assert "1 are outside low and high" in task_of(high=1).describe(source)
    assert task_of(low=0, high=2).describe(source) == ""


def test_rows_without_a_number_do_not_count_in_the_scale(tmp_path: Path) -> None:
    rows = [*ROWS, {"text_a": "a", "text_b": "b", "label": None}]
    source = source_of(tmp_path, rows, missing_labels="keep")
    assert task_of().resolved(source) == task_of().resolved(source_of(tmp_path, ROWS))
    with pytest.raises(UserError, match="has no number in column 'label'; set `scale: false`"):
        task_of().resolved(source_of(tmp_path, rows[3:], missing_labels="keep"))
