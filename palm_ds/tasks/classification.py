"""Which class a text, or a pair of texts, belongs to.

[CLS] text_a [SEP] (text_b [SEP]); the label is at [CLS]. PaddlePALM's Classify head, ERNIE's
run_classifier. As PaddlePALM writes predictions: `label`, `logits` and `probs`, `label` being the
class's name and the others in the order of `labels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from palm_ds.common.errors import UserError, suggest
from palm_ds.data.example import Example
from palm_ds.data.stored_prediction import StoredPrediction
from palm_ds.data.table_source import TableSource
from palm_ds.data.task import guess
from palm_ds.model.encoder import Encoder
from palm_ds.model.heads import ClassHead
from palm_ds.tasks.metrics.classes import accuracy, f1, macro, matthews
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.probabilities import rounded, softmax
from palm_ds.tasks.shared.text_task import ClassesTask, confusion_table
from palm_ds.weights.formats.huggingface.target import ExportedHead


@dataclass(frozen=True, kw_only=True)
class Classification(ClassesTask):
    """One of several classes."""

    dropout: float = 0.1
    """Of what the head reads, while training."""
    smoothing: float = 0.0
    """Label smoothing: this share of a target is spread over all classes."""
    positive: str = ""
    """The class whose F1 is reported; by default, of two classes, the second."""
    class_weights: dict[str | int, float] | Literal["balanced"] = field(default_factory=dict)
    """{class: what its loss counts for while training}, 1 where it is not named; `balanced`: as
    much as makes all classes count the same over the training rows."""

    prediction_key: ClassVar[str] = "label"

    def __post_init__(self) -> None:
        if len(set(self.labels)) < len(self.labels):
            raise UserError(f"{self.where}.labels: a name stands there twice")
        if len(self.labels) == 1:
            raise UserError(
                f"{self.where}: {self.labels[0]!r} is the only label; there must be two or more"
            )
        named = [self.positive] if self.positive else []
        if isinstance(self.class_weights, dict):
            named += map(str, self.class_weights)
            if not all(0 <= weight < np.inf for weight in self.class_weights.values()):
                raise UserError(f"{self.where}.class_weights: a weight is negative or no number")
        for name in named if self.labels else []:
            if name not in self.labels:
                key = "positive" if name == self.positive else "class_weights"
                raise UserError(
                    f"{self.where}.{key}: {name!r} is no label{suggest(name, self.labels)}"
                )
        if not 0 <= self.smoothing < 1:
            raise UserError(f"{self.where}.smoothing: {self.smoothing} is not from 0 to below 1")

    def settled(self, source: TableSource) -> Classification:
        """With the labels, and the weights where they are to be balanced."""
        task = super().settled(source)
        if task.class_weights != "balanced":
            return task
        known = task.targets(source)[task.targets(source) >= 0]
        counts = np.maximum(np.bincount(known, minlength=len(task.labels)), 1)
        shares = len(known) / (len(task.labels) * counts)
        weights = dict(zip(task.labels, rounded(shares), strict=True))
        return replace(task, class_weights=weights)

    def check_labels(self, source: TableSource) -> None:
        labels.classes(self, source, strict=True)

    def targets(self, source: TableSource) -> np.ndarray:
        """(rows,) int64 classes; -1 where the table has no label that is one of them."""
        return source.cached(f"classes {self.name}", lambda: labels.classes(self, source))

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        target = self.targets(source)[example.item]
        example.labels[self.name] = np.zeros(1, np.int64), np.array([max(target, 0)])

    def head(self, backbone: Encoder) -> ClassHead:
        assert isinstance(self.class_weights, dict), "settled before there is a head"
        of = {str(name): weight for name, weight in self.class_weights.items()}
        return ClassHead(
            backbone.hidden_size,
            len(self.labels),
            pooled=True,
            dropout=self.dropout,
            smoothing=self.smoothing,
            weights=[of.get(name, 1.0) for name in self.labels] if of else (),
        )

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        known = self.targets(source)
        return guess(targets, np.bincount(known[known >= 0], minlength=len(self.labels)))

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        return {
            "label": self.class_name(int(scores[0].argmax())),
            "logits": rounded(scores[0]),
            "probs": rounded(softmax(scores[0])),
        }

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Over the rows that have a label; none, none."""
        found, targets = self._compared(predictions, source)
        if not len(found):
            return {}
        scores = {"accuracy": accuracy(found, targets)}
        if self.positive or len(self.labels) == 2:
            positive = self.labels.index(self.positive) if self.positive else 1
            scores["f1"] = f1(found, targets, positive=positive)
        if len(self.labels) > 2:
            scores["macro_f1"] = macro(found, targets, range(len(self.labels))).f1
        return scores | {"matthews": matthews(found, targets)}

    def score_rows(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> dict[str, float]:
        labels.check_overlap(self, source, predictions)
        return super().score_rows(source, predictions)

    def hf_export(self) -> ExportedHead:
        return self.exported(labels=self.labels)

    def tables(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, list[list[Any]]]:
        found, targets = self._compared(predictions, source)
        return confusion_table(found.tolist(), targets.tolist(), self.labels)

    def _compared(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> tuple[np.ndarray, np.ndarray]:
        """(n,) classes found and (n,) classes they should be, of the rows that have a label."""
        targets = self.targets(source)[list(predictions)]
        found = np.array([self.labels.index(each["label"]) for each in predictions.values()])
        return found[targets >= 0], targets[targets >= 0]
