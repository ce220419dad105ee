"""Which classes a text, or a pair of texts, belongs to: none, one, or several.

A label is a list (`["sport", "politics"]`) or a text with a separator (`sport,politics`). Every
class has a sigmoid of its own, and is predicted where that reaches `threshold`. Predictions:
`labels`, the names of those, and `logits` and `probs` of all, in the order of `labels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.example import Example
from palm_ds.data.stored_prediction import StoredPrediction
from palm_ds.data.table_source import TableSource
from palm_ds.model.encoder import Encoder
from palm_ds.model.heads import MultiLabelHead
from palm_ds.tasks.metrics.classes import exact_match, multilabel_macro, multilabel_micro
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.probabilities import rounded, sigmoid
from palm_ds.tasks.shared.text_task import ClassesTask
from palm_ds.weights.formats.huggingface.target import ExportedHead


@dataclass(frozen=True, kw_only=True)
class MultiLabel(ClassesTask):
    """Any number of several classes."""

    threshold: float = 0.5
    """A class is predicted from this probability on."""
    separator: str = ","
    """What stands between the classes of a cell that is a text."""
    nothing: str = "none"
    """What a cell says whose row has no class (where cells are lists: an empty one)."""
    dropout: float = 0.1
    """Of what the head reads, while training."""

    prediction_key: ClassVar[str] = "labels"

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise UserError(f"{self.where}.threshold: {self.threshold} is not between 0 and 1")
        if not self.separator:
            raise UserError(f"{self.where}.separator: empty; give what stands between two classes")
        if len(set(self.labels)) < len(self.labels):
            raise UserError(f"{self.where}.labels: a name stands there twice")

    def names_in(self, source: TableSource) -> set[str]:
        values = source.column(self.label_column)
        cells = (labels.split_names(value, self.separator, self.nothing) for value in values)
        return {name for names in cells for name in names}

    def check_labels(self, source: TableSource) -> None:
        labels.class_sets(self, source, self.separator, self.nothing, strict=True)

    def names_predicted(self, prediction: Mapping[str, Any]) -> set[str]:
        return set(prediction["labels"])

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        names = stored.value("labels")
        return {"labels": labels.split_names(names, self.separator, self.nothing)}

    def targets(self, source: TableSource) -> np.ndarray:
        """(rows, classes) float32 of 0 and 1; NaN where a row has no label."""
        return source.cached(
            f"class sets {self.name}",
            lambda: labels.class_sets(self, source, self.separator, self.nothing),
        )

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        target = np.nan_to_num(self.targets(source)[example.item])
        example.labels[self.name] = np.zeros(1, np.int64), target[None]

    def head(self, backbone: Encoder) -> MultiLabelHead:
        return MultiLabelHead(
            backbone.hidden_size, len(self.labels), threshold=self.threshold, dropout=self.dropout
        )

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """Knowing how often each class occurs, one added to each count."""
        if not len(targets):
            return np.empty(0), np.empty(0)
        known = self.targets(source)
        known = known[~np.isnan(known[:, 0])]
        share = (known.sum(0) + 1) / (len(known) + 2)
        loss = -np.log(np.where(targets > 0.5, share, 1 - share)).mean(-1)
        return loss, ((share >= self.threshold) == (targets > 0.5)).all(-1).astype(float)

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        probs = sigmoid(scores[0])
        return {
            "labels": [n for n, p in zip(self.labels, probs, strict=True) if p >= self.threshold],
            "logits": rounded(scores[0]),
            "probs": rounded(probs),
        }

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Over the rows that have labels; none, none."""
        targets = self.targets(source)[list(predictions)]
        found = np.array(
            [[name in each["labels"] for name in self.labels] for each in predictions.values()]
        ).reshape(targets.shape)
        known = ~np.isnan(targets).any(1)
        if not known.any():
            return {}
        found, targets = found[known], targets[known]
        micro, macro = multilabel_micro(found, targets), multilabel_macro(found, targets)
        return {
            "micro_f1": micro.f1,
            "macro_f1": macro.f1,
            "exact_match": exact_match(found, targets),
            "precision": micro.precision,
            "recall": micro.recall,
        }

    def submission_value(self, prediction: Mapping[str, Any]) -> str:
        """As cells of the file are written."""
        names = prediction.get("labels")
        return self.separator.join(names) or self.nothing if names is not None else ""

    def hf_export(self) -> ExportedHead:
        about = {"problem_type": "multi_label_classification"}
        return self.exported(labels=self.labels, config_entries=about)
