"""The interface of predictions in files: what is written, and what is read back to be scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.predictions import Predicts
from palm_ds.data.tasks.stored_prediction import StoredPrediction


class PredictionFiles(Predicts):
    """How a task's predictions are written and read."""

    unwritten: ClassVar[Sequence[str]] = ()
    """Entries of a prediction that only `metrics` reads."""

    def submission_value(self, prediction: Mapping[str, Any]) -> str:
        """A prediction as the text of one cell: its `prediction_key`, or "" if it has none."""
        value = prediction.get(self.prediction_key, "")
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return " ".join(text.split())

    def prediction_files(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, Any]:
        """{suffix: content} of files to write next to the predictions: texts, or JSON."""
        return {}

    def score_rows(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> dict[str, float]:
        """`metrics` of predictions read from a file, one per row of `source`, which has no
        tokenizer. Raises UserError."""
        return self.metrics(dict(enumerate(map(self.read_prediction, predictions))), source)

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        """A stored prediction in the form `metrics` takes. Raises UserError."""
        if not self.prediction_key:
            return dict(stored.values)
        return {**stored.values, self.prediction_key: stored.value(self.prediction_key)}
