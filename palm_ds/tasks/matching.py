"""Matching of two texts (PaddlePALM's Match).

    pointwise   [CLS] text_a [SEP] text_b [SEP]               two classes: match or not
    pairwise    the same, and again with text_b_neg for       text_b should score above text_b_neg:
                text_b; both share encoder and head           max(0, margin - positive + negative)
                                                              of the sigmoids of the scores

The label of a pair is one of two names; the second (1 for 0 and 1) means a match. Pairwise training
has no labels: text_b is the better text. Predictions, as in PaddlePALM: `label`, `logits` and
`probs`; pairwise `probs` of text_b, and `probs_neg` if there is a text_b_neg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted
from palm_ds.common.settings import PositiveShare, Rate
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, build_input, join, layouts
from palm_ds.data.tasks.interfaces import PAIR, StoredPrediction
from palm_ds.data.tasks.masking import class_prior_baseline
from palm_ds.data.tasks.task import Task
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import ClassHead, Head
from palm_ds.model.heads.outputs import ExportedHead
from palm_ds.model.heads.pooled import PairHead
from palm_ds.tasks.metrics.class_report import ClassReport
from palm_ds.tasks.metrics.classes import accuracy, f1, matthews
from palm_ds.tasks.metrics.probabilities import rounded, rounded_number, sigmoid, softmax
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.text_task import PositiveClassTask, level, missing

_COLUMNS = ("text_a", "text_b", "text_b_neg")


@dataclass(frozen=True, kw_only=True)
class Matching(PositiveClassTask):
    """Predicts whether, or how well, two texts match."""

    strategy: Literal["pointwise", "pairwise"] = "pointwise"
    """pointwise: train on labeled pairs; pairwise: on a better (text_b) and a worse text
    (text_b_neg) for the same text_a."""
    margin: PositiveShare = 0.5
    """Pairwise: required difference between the probabilities of the better and the worse text."""
    dropout: Rate = 0.1
    """Dropout on the input of the head during training."""

    prediction_key = "label"
    pair_roles = PAIR
    rerank_priority = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        most = 3 if self.pairwise else 2
        if self.texts and not 2 <= len(self.texts) <= most:
            raise UserError(
                f"{self.where}.texts: {counted(len(self.texts), 'column')}; {self.strategy} "
                f"matching reads {', '.join(_COLUMNS[:most])}, or columns in their place"
            )
        if self.labels and self.pairwise:
            raise UserError(f"{self.where}.labels: pairwise matching has no labels; remove this")
        if self.scored_at and self.pairwise:
            raise UserError(f"{self.where}.{self.scored_at}: pairwise matching has no classes")
        if self.labels and len(set(self.labels)) != 2:
            known = ", ".join(self.labels[:8]) + (", ..." if len(self.labels) > 8 else "")
            raise UserError(
                f"{self.where}: labels {known}; matching has exactly two classes; for more use "
                "`kind: classification`"
            )

    @property
    def pairwise(self) -> bool:
        return self.strategy == "pairwise"

    def with_head_of(self, origin: Task) -> Matching:
        """With the labels of the task that owns the shared head; the strategy must be the same."""
        task = super().with_head_of(origin)
        assert isinstance(task, Matching) and isinstance(origin, Matching)
        if origin.strategy != self.strategy:
            raise UserError(
                f"{self.where}.share: {origin.name!r} matches {origin.strategy}, this task "
                f"{self.strategy}"
            )
        return task

    def resolved(self, source: TableSource) -> Matching:
        return self if self.pairwise else super().resolved(source)

    def check(self, source: TableSource, *, labeled: bool) -> None:
        columns = self.columns_of(source)
        if labeled and self.pairwise:
            worse = self.texts[2] if len(self.texts) > 2 else _COLUMNS[2]
            source.need(worse, self.where)
            missing(source.column(columns[2]), source, worse)
        elif labeled:
            self.check_labels(source)

    def label_roles(self) -> tuple[str, ...]:
        return () if self.pairwise else super().label_roles()

    def labeled(self, source: TableSource) -> np.ndarray:
        return np.ones(len(source), bool) if self.pairwise else super().labeled(source)

    def check_labels(self, source: TableSource) -> None:
        if not self.pairwise:
            labels.classes(self, source, strict=True)

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        """Two columns, or three if there is a worse text."""
        columns = tuple(self.texts) or _COLUMNS
        worse = self.pairwise and len(columns) > 2 and columns[2] in source.columns
        columns = columns[: 3 if worse else 2]
        for column in columns:
            source.need(column, self.where)
        return columns

    # -- pairwise inputs: two pairs that do not attend to each other --

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """Pairwise: `item`, and `tokens` (1 or 2 pairs, 2) of the texts of each pair. A pair
        is cut to half a row, so that its score does not depend on what shares the row."""
        if not self.pairwise:
            return super().layout(items, uniform, source, max_length)
        if 2 * self.max_length > max_length:
            raise UserError(
                f"{self.where}.max_length: two pairs of {self.max_length} tokens, but rows hold "
                f"{max_length}; raise `length` to {2 * self.max_length} or lower it"
            )
        item = items[:, 0]
        first, *others = (source.encoded(c).lengths[item] for c in self.columns_of(source))
        special = source.vocabulary.around(2)
        most = (self.max_length or max_length // 2) - special
        kept = [level(np.stack([first, other], 1), most) for other in others]
        total = np.sum([each.sum(1) + special for each in kept], 0)
        return layouts(total, item=item, tokens=np.stack(kept, 1))

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        if not self.pairwise:
            return super().example(layout, source, rng)
        item = int(layout["item"])
        first, *others = (source.encoded(column) for column in self.columns_of(source))
        pairs = [
            build_input(
                [first.read(item, 0, int(a)), other.read(item, 0, int(b))], source.vocabulary
            )
            for other, (a, b) in zip(others, layout["tokens"], strict=True)
        ]
        example = join(pairs)
        example.item = item
        return example

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        if not self.pairwise:
            target = self.targets(source)[example.item]
            example.labels[self.name] = np.zeros(1, np.int64), np.array([max(target, 0)])
            return
        if len(example.sub_lengths) != len(self.columns_of(source)) - 1:
            raise UserError(
                f"{self.where}: it builds its own pairs; name it first in the task group"
            )
        first = np.cumsum([0, *example.sub_lengths[:-1]])
        example.labels[self.name] = first, (first == 0).astype(np.int64)
        example.grouped_labels.add(self.name)

    # -- targets, head and predictions --

    def targets(self, source: TableSource) -> np.ndarray:
        """Pointwise: (rows,) int64, 1 for a match; -1 if the label is missing or unknown."""
        return source.cached(f"classes {self.name}", lambda: labels.classes(self, source))

    def head(self, backbone: Encoder) -> Head:
        if self.pairwise:
            return PairHead(
                backbone.hidden_size,
                margin=self.margin,
                dropout=self.dropout,
                init_range=backbone.config.init_range,
            )
        return ClassHead(
            backbone.hidden_size,
            2,
            pooled=True,
            dropout=self.dropout,
            init_range=backbone.config.init_range,
        )

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """Pointwise the class-prior baseline; pairwise the same score for all texts."""
        if self.pairwise:
            examples = np.ones(int(targets.sum()))
            return self.margin * examples, 0.5 * examples
        known = self.targets(source)
        return class_prior_baseline(targets, np.bincount(known[known >= 0], minlength=2))

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        if not self.pairwise:
            return {
                "label": self.class_name(int(scores[0].argmax())),
                "logits": rounded(scores[0]),
                "probs": rounded(softmax(scores[0])),
            }
        probs = sigmoid(scores[:, 0]).tolist()
        found = [rounded_number(x, min(x, 1 - x)) for x in probs]  # distinct also near 1
        return dict(zip(("probs", "probs_neg"), found, strict=False))

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Pointwise: scores over the rows with a label; pairwise: how often the better text
        wins."""
        if self.pairwise:
            pairs = [p for p in predictions.values() if "probs_neg" in p]
            correct = [p["probs"] > p["probs_neg"] for p in pairs]
            return {"accuracy": float(np.mean(correct))} if correct else {}
        both = labels.compared(self, predictions, self.targets(source))
        if not len(both[0]):
            return {}
        scores = {"accuracy": accuracy(*both), "f1": f1(*both)}
        scores |= labels.positive_scores(self, predictions, self.targets(source), 1)
        return scores | {"matthews": matthews(*both)}

    def report(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> ClassReport | None:
        if self.pairwise:
            return None
        return labels.report_of_classes(self, predictions, self.targets(source))

    def submission_value(self, prediction: Mapping[str, Any]) -> str:
        return str(prediction.get("probs" if self.pairwise else "label", ""))

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        if not self.pairwise:
            return super().read_prediction(stored)
        if "probs_neg" not in stored.values:
            return {}
        return {key: stored.number(key, stored.value(key)) for key in ("probs", "probs_neg")}

    def for_scoring(
        self, source: TableSource, predictions: Mapping[int, dict[str, Any]]
    ) -> Matching:
        return self if self.pairwise else super().for_scoring(source, predictions)

    def prepared(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> tuple[Self, dict[int, dict[str, Any]]]:
        if not self.pairwise:
            labels.check_overlap(self, source, predictions)
        return super().prepared(source, predictions)

    def hf_export(self) -> ExportedHead:
        return self.exported()
