"""Which of a question's candidates answer it: pairs by group, best first.

[CLS] text_a [SEP] text_b [SEP], each pair learned by itself as relevant or not, as ERNIE learned
DBQA; scored by group. Rows with the same qid are a group or, where the table has none, those with
the same text_a. A label is a grade, 0 and up; from `relevant_from` on it is relevant. Predictions:
`label` (1: relevant), `logits`, `probs`, and `score`, by which a group's candidates are ordered.
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
from palm_ds.data.task import guess
from palm_ds.model.encoder import Encoder
from palm_ds.model.heads import ClassHead
from palm_ds.tasks.metrics.classes import f1
from palm_ds.tasks.metrics.ranking import average_precision, mrr, ndcg, rank
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.probabilities import rounded, softmax
from palm_ds.tasks.shared.text_task import TextTask, missing
from palm_ds.weights.formats.huggingface.target import ExportedHead


@dataclass(frozen=True, kw_only=True)
class Ranking(TextTask):
    """Candidates ranked by group."""

    relevant_from: float = 1.0
    """The least grade that is relevant."""
    group: str = ""
    """The column whose rows with the same value are a group; by default qid, else text_a."""
    k: int = 10
    """nDCG looks at so many candidates."""
    dropout: float = 0.1
    """Of what the head reads, while training."""

    prediction_key: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"{self.where}.k: {self.k}; nDCG looks at 1 candidate or more")
        if not self.relevant_from > 0:
            raise UserError(
                f"{self.where}.relevant_from: {self.relevant_from}; 0 is irrelevant, so it must be "
                "above 0"
            )
        if self.texts and len(self.texts) < 2:
            raise UserError(f"{self.where}.texts: name two columns, the question and the candidate")

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        for column in (columns := self.texts or ("text_a", "text_b")):
            source.need(column, self.where)
        return columns

    def group_of(self, source: TableSource) -> str:
        """The column that says which rows are a group."""
        question = (self.texts or ("text_a",))[0]
        column = self.group or ("qid" if "qid" in source.columns else question)
        source.need(column, self.where)
        return column

    def check(self, source: TableSource, *, labelled: bool) -> None:
        self.columns_of(source)
        self.group_of(source)
        if labelled:
            self.check_labels(source)

    def check_labels(self, source: TableSource) -> None:
        column = self.group_of(source)
        missing(source.column(column), source, column)
        grades = labels.numbers(self, source, strict=True)
        for item in np.flatnonzero(grades < 0).tolist():
            raise UserError(
                f"{source.where(item)}: {self.label_column}: {grades[item]:g} is below 0; grades "
                "are 0 and up"
            )

    def grades(self, source: TableSource) -> np.ndarray:
        """(rows,) float64; NaN where a row has none."""
        return source.cached(f"grades {self.name}", lambda: labels.numbers(self, source))

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        target = self.grades(source)[[example.item]] >= self.relevant_from
        example.labels[self.name] = np.zeros(1, np.int64), target.astype(np.int64)

    def head(self, backbone: Encoder) -> ClassHead:
        return ClassHead(backbone.hidden_size, 2, pooled=True, dropout=self.dropout)

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        relevant = self.grades(source) >= self.relevant_from
        return guess(targets, np.bincount(relevant, minlength=2))

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        logits = scores[0].astype(np.float64)
        return {
            "label": int(logits.argmax()),
            "logits": rounded(logits),
            "probs": rounded(softmax(logits)),
            "score": float(logits[1] - logits[0]),  # where probabilities are all 1, this is not
        }

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Of the rows that have a grade; none, none. Only grades from `relevant_from` on count for
        MRR, MAP and F1, all for nDCG."""
        grades = self.grades(source)
        items = [item for item in predictions if not np.isnan(grades[item])]
        if not items:
            return {}
        column = source.column(self.group_of(source))
        groups = [str(column[item]) for item in items]
        scores = [predictions[item]["score"] for item in items]
        relevant = grades[items] >= self.relevant_from
        ranking = rank(groups, scores, relevant)
        found = {
            "mrr": mrr(ranking),
            "map": average_precision(ranking),
            f"ndcg@{self.k}": ndcg(rank(groups, scores, grades[items]), self.k),
        }
        if all("label" in predictions[item] for item in items):  # a file may have scores alone
            labels = [predictions[item]["label"] for item in items]
            found["f1"] = f1(labels, relevant.astype(int))
        return found

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        """`score`, else the last of the probabilities."""
        value = stored.values.get("score")
        if value is None:
            value = stored.value("probs")
            value = value[-1] if isinstance(value, list) and value else value
        found: dict[str, Any] = {"score": stored.number("score", value)}
        if "label" in stored.values:
            found["label"] = int(stored.number("label", stored.values["label"]))
        return found

    def hf_export(self) -> ExportedHead:
        return self.exported()
