"""Classification of a text or a pair of texts into one class.

[CLS] text_a [SEP] (text_b [SEP]); the label is at [CLS]. PaddlePALM's Classify head, ERNIE's
run_classifier. With `images` a text is read beside its image, as in visual entailment. Predictions,
as in PaddlePALM: `label` (the class name), `logits` and `probs` (both in the order of `labels`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
from pydantic import NonNegativeFloat

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.settings import Rate
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.data.tasks.masking import class_prior_baseline
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import ClassHead
from palm_ds.model.heads.outputs import ExportedHead, HeadOutputs
from palm_ds.tasks.metrics.class_report import ClassReport
from palm_ds.tasks.metrics.classes import accuracy, f1, macro, matthews
from palm_ds.tasks.metrics.probabilities import rounded, softmax
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.image_text import WholeTextTask
from palm_ds.tasks.shared.text_task import PositiveClassTask


@dataclass(frozen=True, kw_only=True)
class Classification(WholeTextTask, PositiveClassTask):
    """Predicts one of several classes."""

    dropout: Rate = 0.1
    """Dropout on the input of the head during training."""
    smoothing: Rate = 0.0
    """Label smoothing: share of the target probability spread over all classes."""
    positive: str = ""
    """Positive class, for which F1 and AUC are reported; by default the second of two classes."""
    class_weights: dict[str | int, NonNegativeFloat] | Literal["balanced"] = field(
        default_factory=dict
    )
    """{class: weight of its loss during training}, by default 1 each. balanced: inverse class
    frequencies, so that all classes have the same total weight in the training rows."""

    documents = "also"
    labels_windows = "every"
    prediction_key = "label"
    about = "Puts a text (or a pair) into classes."
    about_image = "Puts a text with its image into classes."
    imports = "class"
    prefers_means = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_label_names()
        if len(self.labels) == 1:
            raise UserError(
                f"{self.where}: {self.labels[0]!r} is the only label; there must be two or more"
            )
        if self.scored_at and len(self.labels) > 2 and not self.positive:
            raise UserError(f"{self.where}.{self.scored_at}: name the class of it in `positive`")
        positive = [self.positive] if self.positive != "" else []
        weighed = self.class_weights if isinstance(self.class_weights, dict) else {}
        for key, names in (("positive", positive), ("class_weights", [*weighed])):
            for name in map(str, names) if self.labels else ():
                if name not in self.labels:
                    raise UserError(
                        f"{self.where}.{key}: {name!r} is not a label{suggest(name, self.labels)}"
                    )

    def resolved(self, source: TableSource) -> Classification:
        """With the labels and, if `balanced`, the class weights of the training rows."""
        task = super().resolved(source)
        if task.class_weights != "balanced":
            return task
        known = task.targets(source)[task.targets(source) >= 0]
        counts = np.maximum(np.bincount(known, minlength=len(task.labels)), 1)
        shares = len(known) / (len(task.labels) * counts)
        weights = dict(zip(task.labels, (round(x, 6) for x in shares.tolist()), strict=True))
        return replace(task, class_weights=weights)

    def check_labels(self, source: TableSource) -> None:
        labels.classes(self, source, strict=True)

    def targets(self, source: TableSource) -> np.ndarray:
        """(rows,) int64 classes; -1 if the label is missing or unknown."""
        return source.cached(f"classes {self.name}", lambda: labels.classes(self, source))

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        target = self.targets(source)[example.item]
        self.label_text(example, np.array([max(target, 0)]))

    def head(self, backbone: Encoder) -> ClassHead:
        assert isinstance(self.class_weights, dict), "resolved before there is a head"
        of = {str(name): weight for name, weight in self.class_weights.items()}
        return ClassHead(
            self.text_width(backbone),
            len(self.labels),
            pooled=True,
            images=self.images,
            means=self.averaged,
            init_range=backbone.config.init_range,
            dropout=self.dropout,
            smoothing=self.smoothing,
            weights=[of.get(name, 1.0) for name in self.labels] if of else (),
        )

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        known = self.targets(source)
        return class_prior_baseline(
            targets, np.bincount(known[known >= 0], minlength=len(self.labels))
        )

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        return {
            "label": self.class_name(int(scores[0].argmax())),
            "logits": rounded(scores[0]),
            "probs": rounded(softmax(scores[0])),
        }

    def gather(
        self, pieces: Mapping[int, Sequence[dict[str, Any]]], source: TableSource
    ) -> dict[int, dict[str, Any]]:
        """Of a document that is read in windows: the class with the highest mean probability, as in
        ERNIE-Doc's code."""
        return {item: self._joined(found) for item, found in pieces.items()}

    def _joined(self, windows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if len(windows) == 1:
            return dict(windows[0])
        logits, probs = (
            np.mean([window[key] for window in windows], 0) for key in ("logits", "probs")
        )
        label = self.class_name(int(probs.argmax()))
        return {"label": label, "logits": rounded(logits), "probs": rounded(probs)}

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Scores over the rows with a label; empty if there are none."""
        predicted, targets = labels.compared(self, predictions, self.targets(source))
        if not len(predicted):
            return {}
        scores = {"accuracy": accuracy(predicted, targets)}
        if self.positive or len(self.labels) == 2:
            positive = self.labels.index(self.positive) if self.positive else 1
            scores["f1"] = f1(predicted, targets, positive=positive)
            scores |= labels.positive_scores(self, predictions, self.targets(source), positive)
        if len(self.labels) > 2:
            scores["macro_f1"] = macro(predicted, targets, range(len(self.labels))).f1
        return scores | {"matthews": matthews(predicted, targets)}

    def prepared(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> tuple[Self, dict[int, dict[str, Any]]]:
        labels.check_overlap(self, source, predictions)
        return super().prepared(source, predictions)

    @classmethod
    def imported(cls, labels: Sequence[str]) -> dict[str, Any]:
        return {"labels": list(labels)}

    def head_outputs(self) -> HeadOutputs:
        return replace(super().head_outputs(), averaged=self.averaged)

    def hf_export(self) -> ExportedHead:
        return self.exported()

    def report(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> ClassReport | None:
        return labels.report_of_classes(self, predictions, self.targets(source))
