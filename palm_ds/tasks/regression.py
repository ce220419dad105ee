"""A number for a text, or for a pair of texts: how alike, how good, how hard to read.

[CLS] text_a [SEP] (text_b [SEP]); squared error at [CLS]. ERNIE's run_classifier with
`is_regression`. What is learned is how many standard deviations a number is from the mean of the
training rows (without `scale`, the number itself): a run that begins at the mean does not spend its
first steps on getting there. `value`, the prediction, is in the units of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import FiniteFloat, NonNegativeFloat

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Rate
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.task import Task
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.outputs import ExportedHead, HeadOutputs
from palm_ds.model.heads.pooled import RegressionHead
from palm_ds.tasks.metrics.numbers import mse, pearson_and_spearman
from palm_ds.tasks.metrics.probabilities import rounded_number
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.image_text import WholeTextTask


@dataclass(frozen=True, kw_only=True)
class Regression(labels.NumberTask, WholeTextTask):
    """Predicts a number."""

    low: float | None = None
    """Minimum to which lower predictions are clipped. Default: none."""
    high: float | None = None
    """Maximum to which higher predictions are clipped. Default: none."""
    scale: bool = True
    """Learn standardized targets: minus their mean, divided by their standard deviation."""
    mean: FiniteFloat = 0.0
    """With `scale` and `deviation`: mean of the targets."""
    deviation: NonNegativeFloat = 0.0
    """With `scale`: standard deviation of the targets; 0: compute it and the mean from the training
    rows."""
    dropout: Rate = 0.1
    """Dropout on the input of the head during training."""

    about = "Gives a text (or a pair) a number."
    about_image = "Gives a text with its image a number."
    about_pair = "Gives two texts a number."
    rerank_priority = 1
    imports = "number"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range(self.low, self.high)

    def with_head_of(self, origin: Task) -> Regression:
        """With the scaling of the task that owns the shared head."""
        task = super().with_head_of(origin)
        assert isinstance(task, Regression) and isinstance(origin, Regression)
        return replace(task, scale=origin.scale, mean=origin.mean, deviation=origin.deviation)

    def resolved(self, source: TableSource) -> Regression:
        """With the mean and standard deviation of the training rows, if `scale` needs them."""
        task = super().resolved(source)
        if not self.scale or self.deviation:
            return task
        source.need(self.label_column, self.where)
        rows = replace(source, numbers=source.numbers[self.labeled(source)])
        if not len(rows):
            raise UserError(
                f"{self.where}: {source.name} has no number in column {self.label_column!r}; set "
                "`scale: false`"
            )
        known = labels.numbers(self, rows, strict=True)
        # 1 if all numbers are equal, whose deviation may be a rounding error
        deviation = float(known.std()) if np.ptp(known) else 1.0
        return replace(task, mean=float(known.mean()), deviation=deviation)

    def describe(self, source: TableSource) -> str:
        """Describe what is odd about the numbers; empty if nothing is."""
        if self.label_column not in source.columns:
            return ""
        known, notes = self.targets(source), []
        if len(known) > 1 and (known == known[0]).all():
            notes.append(f"all are {known[0]:g}; there is nothing to learn")
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if outside := int(((known < low) | (known > high)).sum()):
            notes.append(f"{outside:,} are outside low and high, where no prediction can be")
        return "\n".join(f"{self.name}: labels: {note}" for note in notes)

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        target = self._inside(self.targets(source)[[example.item]])
        self.label_text(example, np.nan_to_num(target))

    def head(self, backbone: Encoder) -> RegressionHead:
        return RegressionHead(
            self.text_width(backbone),
            images=self.images,
            means=self.averaged,
            dropout=self.dropout,
            init_range=backbone.config.init_range,
        )

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """Baseline that predicts the mean."""
        mean = np.nanmean(self._inside(self.targets(source)))
        return (targets - mean) ** 2, np.full(len(targets), np.nan)

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        value = float(scores[0, 0])
        value = value * self.deviation + self.mean if self._standardizes else value
        value = value if self.low is None else max(value, self.low)
        value = value if self.high is None else min(value, self.high)
        return {"value": rounded_number(value, self.deviation if self._standardizes else 0.0)}

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Scores over the rows with a number; empty if there are none."""
        both = self.pairs(predictions, source)
        if not len(both[0]):
            return {}
        return pearson_and_spearman(*both) | {"mse": mse(*both)}

    def head_outputs(self) -> HeadOutputs:
        outputs = HeadOutputs(problem_type="regression", averaged=self.averaged)
        if not self._standardizes:
            return outputs
        return replace(outputs, mean=self.mean, deviation=self.deviation)

    @classmethod
    def imported(cls, labels: Sequence[str]) -> dict[str, Any]:
        return {"scale": False}

    def hf_export(self) -> ExportedHead:
        return self.exported()

    def _inside(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers as training targets."""
        return (numbers - self.mean) / self.deviation if self._standardizes else numbers

    @property
    def _standardizes(self) -> bool:
        """Whether the head learns standardized numbers; their mean and deviation must be known."""
        return self.scale and self.deviation > 0
