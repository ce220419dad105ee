"""The interface of tasks that predict something for the rows of a table.

    scores of examples ──decode──> pieces ──gather──> {item: prediction} ──metrics, tables──> report

A prediction is a mapping of plain values, as JSON.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example


class Predicts(ABC):
    """What a task predicts, and how good it is. A task that defines `decode` predicts."""

    name: str

    prediction_key: ClassVar[str] = ""
    """Main entry of a prediction (`label`, `value`, `text`), the content of a one-column file."""

    @property
    def predicts(self) -> Literal["", "scores", "texts"]:
        """`scores`: predictions are decoded from the head's scores. `texts`: they are generated
        (text_generation.py). Empty: it predicts nothing."""
        return "scores" if type(self).decode is not Predicts.decode else ""

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        """The prediction for one example, as JSON, from its head's scores (labels, any) float32."""
        raise UserError(f"tasks.{self.name}: this task has no predictions to decode")

    def gather(
        self, pieces: Mapping[int, Sequence[dict[str, Any]]], source: TableSource
    ) -> dict[int, dict[str, Any]]:
        """{item: prediction} from {item: decoded predictions of its examples, in order}."""
        return {item: dict(found[0]) for item, found in pieces.items()}

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """{metric: value} of predictions and the source's labels, main one first; may be empty."""
        return {}

    def tables(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, list[list[Any]]]:
        """{title: rows of cells, header first}: more for the report, such as a confusion matrix."""
        return {}
