"""Which class a text, or a pair of texts, belongs to.

[CLS] text_a [SEP] (text_b [SEP]); the label is at [CLS]. PaddlePALM's Classify head (and its Match
head learned pointwise), ERNIE's run_classifier. As PaddlePALM writes predictions: `label`, `logits`
and `probs`, here beside the label's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from palm_ds.backbone import Backbone
from palm_ds.errors import UserError
from palm_ds.example import Example
from palm_ds.heads import ClassHead
from palm_ds.metrics.classes import accuracy, f1, macro, matthews
from palm_ds.task import guess
from palm_ds.text_task import ClassesTask
from palm_ds.texts import TableSource


@dataclass(frozen=True, kw_only=True)
class Classification(ClassesTask):
    """One of several classes."""

    dropout: float = 0.1
    """Of what the head reads, while training."""
    smoothing: float = 0.0
    """Label smoothing: this share of a target is spread over all classes."""
    positive: str = ""
    """The class whose F1 is reported; by default, of two classes, the second."""

    def __post_init__(self) -> None:
        if self.positive and self.labels and self.positive not in self.labels:
            raise UserError(f"{self.where}.positive: {self.positive!r} is none of `labels`")
        if not 0 <= self.smoothing < 1:
            raise UserError(f"{self.where}.smoothing: {self.smoothing} is not from 0 to below 1")

    def check(self, source: TableSource, *, labelled: bool) -> None:
        self.columns_of(source)
        if labelled:
            self.targets(source)

    def targets(self, source: TableSource) -> np.ndarray:
        """(rows,) int64 classes; -1 where the table has no label."""
        return source.once(f"classes {self.name}", lambda: self._targets(source))

    def _targets(self, source: TableSource) -> np.ndarray:
        names = source.column(self.label_column) if self.label_column in source.columns else []
        classes = [
            -1 if name is None else self.number(name, source, item)
            for item, name in enumerate(names)
        ]
        return np.array(classes or [-1] * len(source), np.int64)

    def label(self, example: Example, source: Any, rng: np.random.Generator) -> None:
        target = self.targets(source)[example.item]
        example.labels[self.name] = np.zeros(1, np.int64), np.array([max(target, 0)])

    def head(self, backbone: Backbone) -> ClassHead:
        return ClassHead(
            backbone.width,
            len(self.labels),
            pooled=True,
            dropout=self.dropout,
            smoothing=self.smoothing,
        )

    def baseline(self, targets: np.ndarray, source: Any) -> tuple[np.ndarray, np.ndarray]:
        counts = np.bincount(self.targets(source), minlength=len(self.labels))
        return guess(targets, counts)

    def decode(self, scores: np.ndarray, example: Example, source: Any) -> dict[str, Any]:
        logits = scores[0].astype(np.float64)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        best = int(logits.argmax())
        return {
            "label": self.class_name(best),
            "logits": [round(float(x), 6) for x in logits],
            "probs": [round(float(x), 6) for x in shares],
        }

    def metrics(self, predictions: Mapping[int, dict[str, Any]], source: Any) -> dict[str, float]:
        targets = self.targets(source)[list(predictions)]
        found = np.array([self.labels.index(each["label"]) for each in predictions.values()])
        scores = {"accuracy": accuracy(found, targets)}
        if len(self.labels) == 2:
            positive = self.labels.index(self.positive) if self.positive else 1
            scores["f1"] = f1(found, targets, positive=positive)
        else:
            scores["macro_f1"] = macro(found, targets, range(len(self.labels))).f1
        return scores | {"matthews": matthews(found, targets)}
