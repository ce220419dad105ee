"""Ranking of the candidates for a question; candidates are scored as pairs within groups.

[CLS] text_a [SEP] text_b [SEP], trained on each pair as relevant or not, like ERNIE on DBQA, and
scored by group. Rows with the same qid (without that column, the same text_a) form a group. A label
is a grade of 0 or more; grades from `relevant_from` are relevant. Predictions: `label` (1:
relevant), `logits`, `probs`, and `score`, which orders the candidates of a group.

With `images` a row is an image and a text, as in retrieval from Flickr30k: the texts of an image
are its candidates, or the images of a text, and the scores are recalls in both directions, too.
With `loss: circle` it trains as ERNIE-ViL does: each matching pair is compared with mismatched ones
that are drawn from the other rows. Rows whose image and text do not match are only scored;
predictions have no `logits`, and `score` is that of the pair.

An encoder with memories reads a long candidate in windows, each with the question behind it: [CLS]
window of the candidate [SEP] question [SEP]. All windows have the grade of their candidate, whose
score is the log odds of their mean probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Rate
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.interfaces import PAIR, StoredPrediction
from palm_ds.data.tasks.masking import class_prior_baseline
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import ClassHead, Head
from palm_ds.model.heads.outputs import ExportedHead, HeadOutputs
from palm_ds.model.heads.regions import CircleHead
from palm_ds.tasks.metrics.classes import auc, f1
from palm_ds.tasks.metrics.probabilities import rounded, sigmoid, softmax
from palm_ds.tasks.metrics.ranking import average_precision, mrr, ndcg, pn_ratio, rank, recalls_of
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.circle_loss import CircleLoss
from palm_ds.tasks.shared.image_text import IMAGE, image_numbers
from palm_ds.tasks.shared.text_task import missing


@dataclass(frozen=True, kw_only=True)
class Ranking(CircleLoss):
    """Ranks candidates within groups."""

    relevant_from: PositiveFloat = 1.0
    """Minimum grade of a relevant candidate."""
    group: str = ""
    """Column that identifies the group of a row. Default: qid, else text_a; with `images` the
    image, which ranks texts for each image (text_a ranks images for each text)."""
    k: PositiveInt = 10
    """Cutoff of nDCG: the number of top candidates that count."""
    dropout: Rate = 0.1
    """Dropout on the input of the head during training."""

    documents = "also"
    labels_windows = "every"
    prediction_key = "score"
    pair_roles = PAIR
    about_image = "Tells how well a text and an image belong together."
    rerank_priority = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.texts) == 1 and not self.images:
            raise UserError(f"{self.where}.texts: name two columns, the question and the candidate")

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        if self.images:
            return super().columns_of(source)
        for column in (columns := tuple(self.texts) or ("text_a", "text_b")):
            source.need(column, self.where)
        return columns

    def group_of(self, source: TableSource) -> str:
        """The column that identifies the group of a row."""
        question = IMAGE if self.images else (tuple(self.texts) or ("text_a",))[0]
        column = self.group or ("qid" if "qid" in source.columns else question)
        source.need(column, self.where)
        return column

    def check(self, source: TableSource, *, labeled: bool) -> None:
        self.group_of(source)
        super().check(source, labeled=labeled)

    def check_labels(self, source: TableSource) -> None:
        super().check_labels(source)
        column = self.group_of(source)
        missing(source.column(column), source, column)
        grades = labels.numbers(self, source, strict=True)
        for item in np.flatnonzero(grades < 0).tolist():
            raise UserError(
                f"{source.where(item)}: {self.label_column}: {grades[item]:g} is negative; a grade "
                "must be 0 or more"
            )

    def grades(self, source: TableSource) -> np.ndarray:
        """(rows,) float64; NaN if a row has no grade."""
        return source.cached(f"grades {self.name}", lambda: labels.numbers(self, source))

    def true_labels(self, source: TableSource) -> list[float | None]:
        return labels.known_numbers(self.grades(source))

    def describe_labels(self, source: TableSource) -> str:
        if self.label_column not in source.columns:
            return ""
        relevant = int(self.belongs(source).sum())
        return f"{relevant:,} relevant (grade {self.relevant_from:g} or more)"

    def describe(self, source: TableSource) -> str:
        """A note if every candidate is relevant, or none is, perhaps in some groups; may be
        empty."""
        if self.label_column not in source.columns or not len(source):
            return ""
        relevant = self.belongs(source)
        if relevant.any() and (self.circle or not relevant.all()):
            return "" if self.circle else self._describe_groups(source)
        which = "every candidate" if relevant.all() else "no candidate"
        grades = np.nanmin(self.grades(source)), np.nanmax(self.grades(source))
        return (
            f"{self.name}: labels: {which} is relevant, so there is no order to learn or to score: "
            f"grades are from {grades[0]:g} to {grades[1]:g}, `relevant_from` is "
            f"{self.relevant_from:g}"
        )

    def _describe_groups(self, source: TableSource) -> str:
        """A note on the groups that rankings are not scored on; empty if there are none."""
        groups = self._groups(self.group_of(source), source)
        count = len(np.unique(groups))
        left_out = count - len(np.unique(groups[self.belongs(source)]))
        if not left_out:
            return ""
        return (
            f"{self.name}: {left_out:,} of {count:,} groups have no relevant candidate; MRR and "
            "MAP leave them out"
        )

    def belongs(self, source: TableSource) -> np.ndarray:
        """(rows,) bool; False without a grade."""
        return self.grades(source) >= self.relevant_from

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        if self.circle:
            self.label_pairs(example)
        else:
            target = self.belongs(source)[[example.item]]
            self.label_text(example, target.astype(np.int64))

    def repeated(self, layouts: np.ndarray) -> np.ndarray | None:
        return layouts["tokens"][:, 0]

    def head(self, backbone: Encoder) -> Head:
        width = self.text_width(backbone)
        if self.circle:
            return CircleHead(width, margin=self.margin, scale=self.scale, dropout=self.dropout)
        return ClassHead(
            width,
            2,
            pooled=True,
            images=self.images,
            dropout=self.dropout,
            init_range=backbone.config.init_range,
        )

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        if self.circle:
            return self.alike(targets)
        return class_prior_baseline(targets, np.bincount(self.belongs(source), minlength=2))

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        logits = scores[0].astype(np.float64)
        if self.circle:
            probs = sigmoid(np.array([-logits[0], logits[0]]))
            label, score = int(logits[0] > 0), float(logits[0])
            return {"label": label, "probs": rounded(probs), "score": score}
        return {
            "label": int(logits.argmax()),
            "logits": rounded(logits),
            "probs": rounded(softmax(logits)),
            "score": float(logits[1] - logits[0]),  # still distinct when probabilities round to 1
        }

    def gather(
        self, pieces: Mapping[int, Sequence[dict[str, Any]]], source: TableSource
    ) -> dict[int, dict[str, Any]]:
        """Of a candidate that is read in windows: their mean probabilities, and as `score` the
        logarithm of the odds of these."""
        return {item: self._joined(found) for item, found in pieces.items()}

    def _joined(self, windows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if len(windows) == 1:
            return dict(windows[0])
        scores = np.array([window["score"] for window in windows])
        # Logarithms of sigmoids, since small odds round to 0 as probabilities.
        odds = np.logaddexp.reduce(-np.logaddexp(0, -scores)) - np.logaddexp.reduce(
            -np.logaddexp(0, scores)
        )
        mean = {
            key: rounded(np.mean([window[key] for window in windows], 0))
            for key in ("logits", "probs")
        }
        return {"label": int(odds > 0), **mean, "score": float(odds)}

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Scores over the rows with a grade; empty if there are none. MRR, MAP and F1 treat grades
        from `relevant_from` as relevant, as does the AUC, which is over all groups together; nDCG
        and the PN ratio use the grades."""
        grades = self.grades(source)
        items = [item for item in predictions if not np.isnan(grades[item])]
        if not items:
            return {}
        groups = self._groups(self.group_of(source), source)[items]
        scores = [predictions[item]["score"] for item in items]
        relevant = grades[items] >= self.relevant_from
        ranking = rank(groups, scores, relevant)
        metrics = {
            "mrr": mrr(ranking),
            "map": average_precision(ranking),
            f"ndcg@{self.k}": ndcg(rank(groups, scores, grades[items]), self.k),
            "pn_ratio": pn_ratio(groups, scores, grades[items]),
            "auc": auc(scores, relevant, True),
        }
        if all("label" in predictions[item] for item in items):  # a file may contain only scores
            labels = [predictions[item]["label"] for item in items]
            metrics["f1"] = f1(labels, relevant.astype(int))
        return metrics | self._recalls(items, np.array(scores), relevant, source)

    def _groups(self, column: str, source: TableSource) -> np.ndarray:
        """(rows,) equal for rows of one group."""
        if column == IMAGE:
            return image_numbers(source)
        return np.array([str(value) for value in source.column(column)])

    def _recalls(
        self, items: list[int], scores: np.ndarray, relevant: np.ndarray, source: TableSource
    ) -> dict[str, float]:
        """The recall of texts for images, and of images for texts, of the pairs that there are."""
        if not self.images:
            return {}
        found = {}
        for wanted, column in (("text", IMAGE), ("image", self.columns_of(source)[0])):
            ranking = rank(self._groups(column, source)[items], scores, relevant)
            found |= recalls_of(wanted, ranking)
        return found

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        """The `score`, or else the last of `probs`, and the `label` if given."""
        value = stored.values.get("score")
        if value is None:
            value = stored.value("probs")
            value = value[-1] if isinstance(value, list) and value else value
        prediction: dict[str, Any] = {"score": stored.number("score", value)}
        if "label" in stored.values:
            prediction["label"] = int(stored.number("label", stored.values["label"]))
        return prediction

    def head_outputs(self) -> HeadOutputs:
        return HeadOutputs(relevance=not self.circle)

    def hf_export(self) -> ExportedHead:
        return self.exported()
