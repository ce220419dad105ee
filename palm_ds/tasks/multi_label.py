"""Multi-label classification of a text or a pair of texts: none, one or several classes.

A label is a list (`["sport", "politics"]`) or a text with a separator (`sport,politics`). Each
class has its own sigmoid and is predicted if the probability reaches `threshold`. Predictions:
`labels`, the names of the predicted classes; `logits` and `probs` of all classes, in order.

A label may also say how much each class is worth, `{"two": 1, "three": 0.3}`, as in visual question
answering, where an answer is worth a third for each person who gave it, at most 1. The sigmoids
then learn these numbers, and a prediction also has the `best` class. With `images` the head may
have a hidden layer and add up the losses of the classes, as ERNIE-ViL's for such questions: 2,048
wide, followed by a dropout of 0.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from pydantic import NonNegativeInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import InnerShare, Rate
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.outputs import ExportedHead, HeadOutputs
from palm_ds.model.heads.pooled import MultiLabelHead
from palm_ds.tasks.metrics.class_report import ClassReport, calibration_bins, multilabel_report
from palm_ds.tasks.metrics.classes import exact_match, multilabel_macro, multilabel_micro
from palm_ds.tasks.metrics.numbers import cosine
from palm_ds.tasks.metrics.probabilities import rounded, sigmoid
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.image_text import WholeTextTask
from palm_ds.tasks.shared.label_notes import class_numbers
from palm_ds.tasks.shared.text_task import ClassesTask

_SEPARATORS = (",", ";", "|")
"""Usual separators of class names."""


@dataclass(frozen=True, kw_only=True)
class MultiLabel(WholeTextTask, ClassesTask):
    """Predicts any number of classes."""

    threshold: InnerShare = 0.5
    """Minimum probability at which a class is predicted. Of a task that shares a head, predictions
    and their metrics follow its own; `accuracy` beside the loss follows that of the head's task."""
    separator: str = ","
    """Separator between the classes in a text cell."""
    nothing: str = "none"
    """Cell value for a row without classes (in list cells: an empty list)."""
    dropout: Rate = 0.1
    """Dropout on the input of the head, or of its last layer, during training."""
    hidden_layer: NonNegativeInt = 0
    """With `images`: the width of a hidden layer of the head, with ReLU; 0: none."""
    reduction: Literal["mean", "sum"] = "mean"
    """Whether the loss of a text is the mean or the sum of the losses of the classes."""
    soft: bool = False
    """Labels are {class: worth, from 0 to 1}. Also if a training row has such a label."""

    prediction_key = "labels"
    about = "Puts a text (or a pair) into classes."
    about_image = "Puts a text with its image into classes."
    imports = "labels"
    head_settings = ("pooling", "hidden_layer", "reduction")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_layer and not self.images:
            raise UserError(
                f"{self.where}.hidden_layer: {self.hidden_layer}, but the head of texts alone is a "
                "linear map, as in transformers; leave it out, or set images: true"
            )
        if not self.separator:
            raise UserError(f"{self.where}.separator is empty; give the text between two classes")
        self.check_label_names()

    def resolved(self, source: TableSource) -> MultiLabel:
        task = super().resolved(source)
        return replace(task, soft=self.soft or self._are_soft(source))

    def _are_soft(self, source: TableSource) -> bool:
        given = source.column(self.label_column) if self.label_column in source.columns else []
        return any(isinstance(value, Mapping) for value in given)

    def row_labels(self, source: TableSource) -> Iterator[list[str]]:
        values = source.column(self.label_column)
        return (labels.split_names(value, self.separator, self.nothing) for value in values)

    def describe_labels(self, source: TableSource) -> str:
        return "" if self.soft else super().describe_labels(source)

    def describe(self, source: TableSource) -> str:
        others = [separator for separator in _SEPARATORS if separator not in self.separator]
        odd = sorted(x for x in self.names_in(source) if any(sep in x for sep in others))
        if not odd:
            return super().describe(source)
        note = f"{self.name}: labels: {odd[0]!r} is one class; is `separator` right?"
        return "\n".join(filter(None, [super().describe(source), note]))

    def check_labels(self, source: TableSource) -> None:
        labels.class_sets(self, source, self.separator, self.nothing, strict=True)

    def names_predicted(self, prediction: Mapping[str, Any]) -> set[str]:
        return {prediction["best"]} if self.soft else set(prediction["labels"])

    def prepared(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> tuple[Self, dict[int, dict[str, Any]]]:
        task = replace(self, soft=self.soft or self._are_soft(source))
        return super(MultiLabel, task).prepared(source, predictions)

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        if self.soft:
            own: dict[str, Any] = {"best": str(stored.value("best"))}
        else:
            names = stored.value("labels")
            own = {"labels": labels.split_names(names, self.separator, self.nothing)}
        probs = stored.values.get("probs") if self.labels else None  # else of an unknown order
        return own if probs is None else {**own, "probs": probs}

    def true_labels(self, source: TableSource) -> list[Any]:
        values = super().true_labels(source)
        cells = (labels.split_names(value, self.separator, self.nothing) for value in values)
        return [
            value if value is None or isinstance(value, Mapping) else cell
            for value, cell in zip(values, cells, strict=True)
        ]

    def targets(self, source: TableSource) -> np.ndarray:
        """(rows, classes) float32 from 0 to 1; NaN if the label is missing or unknown."""
        return source.cached(
            f"class sets {self.name}",
            lambda: labels.class_sets(self, source, self.separator, self.nothing),
        )

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        target = np.nan_to_num(self.targets(source)[example.item])
        self.label_text(example, target[None])

    def head(self, backbone: Encoder) -> MultiLabelHead:
        return MultiLabelHead(
            self.text_width(backbone),
            len(self.labels),
            images=self.images,
            means=self.averaged,
            hidden_layer=self.hidden_layer,
            summed=self.reduction == "sum",
            threshold=self.threshold,
            dropout=self.dropout,
            init_range=backbone.config.init_range,
        )

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """Class-frequency baseline, with add-one smoothing."""
        if not len(targets):
            return np.empty(0), np.empty(0)
        known = self.targets(source)
        known = known[~np.isnan(known[:, 0])]
        share = (known.sum(0) + 1) / (len(known) + 2)
        each = -(targets * np.log(share) + (1 - targets) * np.log(1 - share))
        loss = each.sum(-1) if self.reduction == "sum" else each.mean(-1)
        return loss, ((share >= self.threshold) == (targets > 0.5)).all(-1).astype(float)

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        probs = sigmoid(scores[0])
        return {
            "labels": [n for n, p in zip(self.labels, probs, strict=True) if p >= self.threshold],
            "logits": rounded(scores[0]),
            "probs": rounded(probs),
            **({"best": self.labels[int(probs.argmax())]} if self.soft else {}),
        }

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Scores over the rows with labels; empty if there are none. Soft labels: what the best
        class is worth, as VQA is scored, and the cosine of all probabilities."""
        if self.soft:
            return self._soft_metrics(predictions, self.targets(source)[list(predictions)])
        known, predicted, targets = self._compared(predictions, source)
        if not len(known):
            return {}
        micro, macro = multilabel_micro(predicted, targets), multilabel_macro(predicted, targets)
        scores = {
            "micro_f1": micro.f1,
            "macro_f1": macro.f1,
            "exact_match": exact_match(predicted, targets),
            "precision": micro.precision,
            "recall": micro.recall,
        }
        probs = labels.class_probs(predictions, len(self.labels))
        if probs is not None:
            scores["cosine"] = cosine(probs[known], targets)
        return scores

    def _soft_metrics(
        self, predictions: Mapping[int, dict[str, Any]], targets: np.ndarray
    ) -> dict[str, float]:
        number = class_numbers(self.labels)
        best = np.array([number.get(str(x.get("best")), -1) for x in predictions.values()], int)
        known = ~np.isnan(targets).any(1)
        if not known.any():
            return {}
        worth = np.where(best >= 0, targets[np.arange(len(best)), best], 0.0)
        scores = {"soft_accuracy": float(worth[known].mean())}
        probs = labels.class_probs(predictions, len(self.labels))
        return (
            scores if probs is None else scores | {"cosine": cosine(probs[known], targets[known])}
        )

    def report(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> ClassReport | None:
        """Scores by class, and the calibration of all probabilities of all classes; none of soft
        labels."""
        if self.soft:
            return None
        known, predicted, targets = self._compared(predictions, source)
        if not len(known):
            return None
        probs = labels.class_probs(predictions, len(self.labels))
        bins = [] if probs is None else calibration_bins(probs[known].ravel(), targets.ravel())
        return multilabel_report(predicted, targets, self.labels, bins)

    def _compared(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The numbers of the predictions of rows with labels (known,), and of these the predicted
        and the true classes, both (known, classes) of 0 and 1."""
        targets = self.targets(source)[list(predictions)]
        predicted = np.zeros(targets.shape, bool)
        number = class_numbers(self.labels)
        for row, prediction in enumerate(predictions.values()):
            predicted[row, [number[x] for x in prediction["labels"] if x in number]] = True
        known = np.flatnonzero(~np.isnan(targets).any(1))
        return known, predicted[known], targets[known]

    def submission_value(self, prediction: Mapping[str, Any]) -> str:
        """The labels as a cell of the input file; of soft ones the best class."""
        if self.soft:
            return str(prediction.get("best", ""))
        names = prediction.get("labels")
        return self.separator.join(names) or self.nothing if names is not None else ""

    def head_outputs(self) -> HeadOutputs:
        return HeadOutputs(
            labels=tuple(self.labels),
            problem_type="multi_label_classification",
            averaged=self.averaged,
        )

    @classmethod
    def imported(cls, labels: Sequence[str]) -> dict[str, Any]:
        return {"labels": list(labels)}

    def hf_export(self) -> ExportedHead:
        return self.exported()
