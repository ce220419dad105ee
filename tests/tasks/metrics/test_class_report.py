"""Scores by class equal scikit-learn's; of many classes a reader gets the worst, a file all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.metrics import classification_report, confusion_matrix

from palm_ds.tasks.metrics.class_report import (
    ClassReport,
    calibration_bins,
    class_report,
    expected_calibration_error,
    multilabel_report,
)

RNG = np.random.default_rng(1)


def same_scores(report: ClassReport, theirs: Any, names: list[str]) -> None:
    ours = report.record()
    averages = {f"{kind} avg": means for kind, means in ours["averages"].items()}
    assert list(ours["classes"]) == names
    for name, found in {**ours["classes"], **averages}.items():
        for key, value in found.items():
            assert value == pytest.approx(theirs[name][key.replace("f1", "f1-score")])


def test_one_class_per_row() -> None:
    names = ["no", "maybe", "yes", "never seen"]
    right, found = RNG.integers(0, 3, 200), RNG.integers(0, 3, 200)
    report = class_report(found, right, names)
    theirs = classification_report(
        right, found, labels=range(4), target_names=names, output_dict=True, zero_division=0
    )
    same_scores(report, theirs, names)
    matrix = confusion_matrix(right, found, labels=range(4)).tolist()
    assert [row[1:] for row in report.tables()["Confusion"][1:]] == matrix
    sparse = report.record()["confusion"]
    assert [[sparse.get(a, {}).get(b, 0) for b in names] for a in names] == matrix


def test_several_classes_per_row() -> None:
    names = ["x", "y", "z"]
    right, found = (RNG.integers(0, 2, (50, 3)) for _ in range(2))
    report = multilabel_report(found, right, names)
    theirs = classification_report(
        right, found, target_names=names, output_dict=True, zero_division=0
    )
    same_scores(report, theirs, names)
    assert "confusion" not in report.record()


def test_calibration() -> None:
    probs = np.concatenate([RNG.uniform(size=300), [0.0, 0.1, 0.5, 1.0]])
    right = RNG.uniform(size=304) < probs**2
    bins = calibration_bins(probs, right)
    accuracy, confidence = calibration_curve(right, probs, n_bins=10)
    assert [each.accuracy for each in bins] == pytest.approx(accuracy)
    assert [each.confidence for each in bins] == pytest.approx(confidence)
    assert all(each.low <= each.confidence <= each.high for each in bins)
    rows = np.histogram(probs, np.linspace(0, 1, 11) + 1e-12)[0] + np.eye(10, dtype=int)[0]
    assert [each.rows for each in bins] == rows.tolist()
    error = (np.abs(accuracy - confidence) * rows).sum() / 304
    assert expected_calibration_error(bins) == pytest.approx(error)
    report = class_report([0, 1], [0, 0], ["a", "b"], bins)
    assert report.record()["calibration"]["ece"] == pytest.approx(error)
    total = report.tables()["Calibration"][-1]
    assert total == [
        "all",
        *(pytest.approx(x, abs=1e-4) for x in (probs.mean(), right.mean(), error)),
        304,
    ]


def test_of_many_classes_the_worst_come_first() -> None:
    names = [f"class {i}" for i in range(200)]
    right = np.repeat(np.arange(199), 5)
    found = right.copy()
    found[35:38] = 9
    report = class_report(found, right, names)
    tables = report.tables()
    assert tables["Classes"][1][0] == "macro average"
    assert [row[0] for row in tables["Classes"][3:5]] == ["class 7", "class 9"]
    assert tables["Classes"][-1][0] == "class 199", "that no row has"
    assert tables["Confusion, the most frequent"][1:] == [["class 7", "class 9", 3]]
    assert len(report.record()["classes"]) == 200
    assert expected_calibration_error([]) != expected_calibration_error([])  # NaN
