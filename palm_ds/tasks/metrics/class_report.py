"""Scores of every class: precision, recall, F1 and support, what is taken for what, calibration.

`record` has all of it, as JSON:

    {"classes": {name: {"precision", "recall", "f1", "support"}},
     "averages": {"macro": ..., "weighted": ...}, and "micro" where it is not the accuracy,
     "confusion": {class: {class predicted for it: rows}}, without what never happens,
     "calibration": {"ece": ..., "bins": [{"low", "high", "confidence", "accuracy", "rows"}]}}

`tables` are for readers: of many classes those with the lowest F1 come first, and the confusions
are the most frequent ones.

Calibration is whether predictions of 80 per cent are right in 80 of 100 cases. They are put into
ten bins of equal width by their probability; a bin's mean probability and its share of right ones
would be equal (a reliability diagram, DeGroot and Fienberg 1983). The expected calibration error is
the mean of their distances, weighted by predictions (Naeini et al. 2015; Guo et al. 2017). Bins are
those of scikit-learn's `calibration_curve`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from palm_ds.tasks.metrics.classes import binary
from palm_ds.tasks.metrics.counts import Averages, MatchCounts, averages, paired

MOST_SHOWN = 12
"""Maximum lines and columns of a confusion matrix for readers; of more classes, those with the
lowest F1 come first."""
MOST_LISTED = 500
"""Maximum classes in a table."""
CLASSES, CONFUSION, CALIBRATION = "Classes", "Confusion", "Calibration"
"""Titles of tables."""
_BINS = 10
_HEADS = ("precision", "recall", "f1")


class CalibrationBin(NamedTuple):
    """Predictions with a probability in (low, high], the lowest bin with 0."""

    low: float
    high: float
    confidence: float
    """Their mean probability."""
    accuracy: float
    """The share of them that is right."""
    rows: int

    @property
    def gap(self) -> float:
        return abs(self.accuracy - self.confidence)


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """Scores of predictions by class."""

    classes: Mapping[str, MatchCounts]
    """In the order of the task's labels."""
    confusion: Mapping[tuple[str, str], int] | None = None
    """{(class, predicted class): rows}, without what never happens; None for other than one class
    per row."""
    bins: Sequence[CalibrationBin] = ()
    """Empty if predictions have no probabilities."""

    def averages(self) -> dict[str, Averages]:
        """{kind: means over the classes}. The micro average of one class per row would be the
        accuracy."""
        counts = list(self.classes.values())
        found = {"macro": averages(counts), "weighted": weighted(counts)}
        if self.confusion is not None:
            return found
        total = sum(counts, MatchCounts())
        return {"micro": Averages(total.precision, total.recall, total.f1), **found}

    def record(self) -> dict[str, Any]:
        whole: dict[str, Any] = {
            "classes": {
                name: {**_scores(count), "support": count.expected}
                for name, count in self.classes.items()
            },
            "averages": {name: mean._asdict() for name, mean in self.averages().items()},
        }
        if self.confusion is not None:
            rows = whole["confusion"] = {}
            for (true, taken), count in self.confusion.items():
                rows.setdefault(true, {})[taken] = count
        if self.bins:
            bins = [each._asdict() for each in self.bins]
            whole["calibration"] = {"ece": expected_calibration_error(self.bins), "bins": bins}
        return whole

    def tables(self) -> dict[str, list[list[Any]]]:
        tables = {CLASSES: self._class_table()}
        if self.confusion is not None:
            tables |= confusion_table(self.confusion, list(self.classes))
        if self.bins:
            tables[CALIBRATION] = calibration_table(self.bins)
        return tables

    def _class_table(self) -> list[list[Any]]:
        support = sum(count.expected for count in self.classes.values())
        rows = [
            [f"{kind} average", *map(_rounded, mean), support]
            for kind, mean in self.averages().items()
        ]
        ordered = list(self.classes.items())
        if len(ordered) > MOST_SHOWN:
            ordered.sort(key=lambda pair: (not pair[1].expected, pair[1].f1, -pair[1].expected))
        for name, count in ordered[:MOST_LISTED]:
            rows.append([name, *map(_rounded, _scores(count).values()), count.expected])
        return [["class", *_HEADS, "support"], *rows]


def class_report(
    predicted: npt.ArrayLike,
    labels: npt.ArrayLike,
    names: Sequence[str],
    bins: Sequence[CalibrationBin] = (),
) -> ClassReport:
    """Of one class per row: (n,) numbers of classes in `names`."""
    ours, right = (each.astype(np.int64) for each in paired(predicted, labels))
    size = len(names)
    counts = (np.bincount(x, minlength=size).tolist() for x in (right[ours == right], ours, right))
    classes = {
        name: MatchCounts(*count)
        for name, count in zip(names, zip(*counts, strict=True), strict=True)
    }
    pairs, rows = np.unique(right * size + ours, return_counts=True)  # of 10,000 classes, too
    cells: list[tuple[int, int]] = [divmod(pair, size) for pair in pairs.tolist()]
    confusion: dict[tuple[str, str], int] = {
        (names[true], names[taken]): count
        for (true, taken), count in zip(cells, rows.tolist(), strict=True)
    }
    return ClassReport(classes=classes, confusion=confusion, bins=bins)


def multilabel_report(
    predicted: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    names: Sequence[str],
    bins: Sequence[CalibrationBin] = (),
) -> ClassReport:
    """Of several classes per row: (n, classes) tables of 0 and 1."""
    columns = zip(names, predicted.T, labels.T, strict=True)
    return ClassReport(
        classes={
            name: binary(ours.astype(bool), right > 0.5, True) for name, ours, right in columns
        },
        bins=bins,
    )


def weighted(counts: Sequence[MatchCounts]) -> Averages:
    """Means over classes, each as often as it is expected; NaN if none is."""
    support = sum(count.expected for count in counts)
    if not support:
        return Averages(float("nan"), float("nan"), float("nan"))
    sums = (
        sum(getattr(count, name) * count.expected for count in counts) / support for name in _HEADS
    )
    return Averages(*sums)


def confusion_table(
    counts: Mapping[tuple[str, str], int], names: Sequence[str]
) -> dict[str, list[list[Any]]]:
    """{title: rows}: the confusion matrix, true classes as rows; with more than MOST_SHOWN classes
    the most frequent confusions."""
    if len(names) <= MOST_SHOWN:
        heads = ["is", *(f"taken for {name}" for name in names)]
        rows = [[true, *(counts.get((true, taken), 0) for taken in names)] for true in names]
        return {CONFUSION: [heads, *rows]}
    wrong = [[*pair, count] for pair, count in counts.items() if pair[0] != pair[1]]
    worst = sorted(wrong, key=lambda row: -row[-1])[:MOST_SHOWN]
    return {f"{CONFUSION}, the most frequent": [["is", "taken for", "rows"], *worst]}


def calibration_bins(probabilities: npt.ArrayLike, right: npt.ArrayLike) -> list[CalibrationBin]:
    """The bins that have predictions, from the lowest. `probabilities` (n,) in 0..1; `right` (n,)
    of 0 and 1. Raises UserError if their shapes differ."""
    probs, correct = paired(probabilities, right)
    edges = np.linspace(0.0, 1.0, _BINS + 1)
    number = np.searchsorted(edges[1:-1], probs)
    return [
        CalibrationBin(
            low=float(edges[i]),
            high=float(edges[i + 1]),
            confidence=float(probs[number == i].mean()),
            accuracy=float(correct[number == i].mean()),
            rows=int((number == i).sum()),
        )
        for i in np.unique(number).tolist()
    ]


def expected_calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """In 0..1; NaN without predictions."""
    total = sum(each.rows for each in bins)
    return sum(each.gap * each.rows for each in bins) / total if total else float("nan")


def calibration_table(bins: Sequence[CalibrationBin]) -> list[list[Any]]:
    """One line per bin, and one of all, whose gap is the expected calibration error."""
    count = sum(each.rows for each in bins)
    means = [sum(each[i] * each.rows for each in bins) / count for i in (2, 3)]
    rows = [
        [f"{x.low:.1f} - {x.high:.1f}", *map(_rounded, (x.confidence, x.accuracy, x.gap)), x.rows]
        for x in bins
    ]
    total = ["all", *map(_rounded, (*means, expected_calibration_error(bins))), count]
    return [["probability", "mean", "accuracy", "gap", "rows"], *rows, total]


def _scores(count: MatchCounts) -> dict[str, float]:
    return {name: getattr(count, name) for name in _HEADS}


def _rounded(value: float) -> float:
    return round(value, 4)
