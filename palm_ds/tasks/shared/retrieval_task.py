"""Base class of tasks that find texts by queries: their rows, their predictions and their metrics.

    {query, positive, negatives} ──> query | positive | negative ...   a text each
    {query: null, positive}      ──> a text to search in at evaluation

Which vectors texts have, and how they are compared, is for the task.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Share
from palm_ds.common.sparse_vectors import DenseOrSparse, part_of
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, text_numbers
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.model.heads.embedding import NEGATIVE, POSITIVE, QUERY, ROLE, TEACHER, TEXT
from palm_ds.tasks.metrics.probabilities import rounded
from palm_ds.tasks.metrics.retrieval import retrieval_metrics
from palm_ds.tasks.shared.embedding_task import EmbeddingTask, need_text


@dataclass(frozen=True, kw_only=True)
class RetrievalTask(EmbeddingTask):
    """A task whose vectors find texts by queries."""

    negatives: Literal["auto", "need", "ignore"] = "auto"
    """The column `negatives`, texts that do not answer the query. auto: use it if there is one;
    need: it must be there; ignore: do not use it."""
    margin: float = 0.0
    """Additive margin: by how much a positive should be more similar than a negative (Yang et al.
    2019)."""
    distillation: Literal["", "kl", "margin_mse"] = ""
    """Learn the column `teacher_scores`, a teacher's scores of the positive and of each negative.
    kl: their softmax (Kullback-Leibler divergence); margin_mse: their differences (Hofstätter et
    al. 2020). Empty: do not."""
    distillation_share: Share = 1.0
    """Share of the distillation in the loss; the rest is InfoNCE."""
    k: PositiveInt = 10
    """Cutoff of nDCG and recall: the number of top texts that count."""

    prediction_key = "score"
    about_pair = "Scores a text for a query."
    pair_roles = ("query", "positive")
    tuple_roles = ("query", "positive", "negatives")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distillation and self.negatives == "ignore":
            raise UserError(
                f"{self.where}.distillation: compares a positive with its negatives, but "
                "`negatives` is ignore"
            )

    # -- rows --

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        for column in ("positive", "query"):
            source.need(column, self.where)
        if self.negatives == "need" or self.distillation:
            source.need("negatives", self.where)
        if self.distillation:
            source.need("teacher_scores", self.where)
        return ("query", "positive")

    def group_of(self, source: TableSource) -> str:
        """The column whose rows are one query, all of whose positives it finds."""
        return self.columns_of(source)[0]

    def label_roles(self) -> tuple[str, ...]:
        return ()

    def check(self, source: TableSource, *, labeled: bool) -> None:
        self.columns_of(source)
        for item in range(len(source)):
            self.row_texts(source, item)
        if self.distillation and labeled:
            self._teacher(source)
        if labeled and len(source) and not self._asks(source).any():
            raise UserError(f"{self.where}: {source.name}: no row has a query")

    def check_step(self, source: TableSource, examples: int) -> None:
        if examples > 1 or self._has_negatives(source):
            return
        raise UserError(
            f"{self.where}: one row per step and no column `negatives`: a query has no text to "
            "tell its positive from; raise `batch`"
        )

    def _has_negatives(self, source: TableSource) -> bool:
        return self.negatives != "ignore" and "negatives" in source.columns

    def _negatives(self, source: TableSource, item: int) -> list[str]:
        if not self._has_negatives(source):
            return []
        negatives = source.column("negatives")[item] or []
        if self.negatives == "need" and not negatives and self._query(source, item) is not None:
            raise UserError(f"{source.where(item)}: negatives is empty; {self.where} needs some")
        return negatives

    def _query(self, source: TableSource, item: int) -> str | None:
        return source.column("query")[item]

    def _asks(self, source: TableSource) -> np.ndarray:
        """(rows,) bool: the row has a query. Raises UserError without the columns."""
        self.columns_of(source)
        return np.array([query is not None for query in source.column("query")])

    def row_texts(self, source: TableSource, item: int) -> list[str]:
        """The query, if there is one, the positive, and the negatives. Raises UserError."""
        query = self._query(source, item)
        first = [] if query is None else [need_text(query, source, item, "query")]
        positive = need_text(source.column("positive")[item], source, item, "positive")
        further = self._negatives(source, item)
        return [*first, positive, *(need_text(x, source, item, "negatives") for x in further)]

    def describe_labels(self, source: TableSource) -> str:
        texts = sum(len(self.row_texts(source, item)) for item in range(len(source)))
        queries = int(self._asks(source).sum())
        return f"{queries:,} queries, {texts - queries:,} texts to find"

    # -- examples --

    def training_items(self, source: TableSource, max_length: int) -> np.ndarray:
        return self.items(source, max_length)[self._asks(source)]

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        asks = self._query(source, example.item) is not None
        targets = np.zeros((len(example.sub_lengths), 3), np.int64)
        targets[:, ROLE], targets[:, TEXT] = NEGATIVE, text_numbers(example)
        if asks:
            targets[:2, ROLE] = QUERY, POSITIVE
        if self.distillation and asks and "teacher_scores" in source.columns:
            targets[1:, TEACHER] = self._teacher(source)[example.item].view(np.int32)
        self.add_labels(example, targets)

    def class_name(self, label: int) -> str:
        return ("query", "positive", "negative")[label]

    def _teacher(self, source: TableSource) -> list[np.ndarray]:
        """(candidates,) fp32 of each row."""
        return source.cached(f"teacher of {self.name}", lambda: self._read_teacher(source))

    def _read_teacher(self, source: TableSource) -> list[np.ndarray]:
        teacher_scores = []
        for item, scores in enumerate(source.column("teacher_scores")):
            asks = self._query(source, item) is not None
            candidates = 1 + len(self._negatives(source, item))
            scores = (scores or []) if asks else []
            if asks and len(scores) != candidates:
                raise UserError(
                    f"{source.where(item)}: {len(scores)} teacher_scores, for a positive and "
                    f"{candidates - 1} negatives"
                )
            teacher_scores.append(np.array(scores, np.float32))
        return teacher_scores

    # -- predictions --

    @abstractmethod
    def compare(self, vectors: np.ndarray) -> np.ndarray:
        """(n, size) vectors whose dot products are the similarity."""

    def kept(self, vectors: np.ndarray) -> Iterable[Any]:
        """The vectors (n, size) of a row's texts, as they wait for the metrics."""
        return vectors

    @abstractmethod
    def stacked(self, vectors: Sequence[Any]) -> DenseOrSparse:
        """Those of several texts as one."""

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        vectors = self.compare(scores)
        kept = {"vectors": self.kept(vectors)}
        if self._query(source, example.item) is None:
            return kept
        own = vectors[1:] @ vectors[0]
        return {"score": round(float(own[0]), 6), "scores": rounded(own), **kept}

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Search all texts of the rows, if their vectors are known; from a file of predictions, how
        often the positive is more similar than all negatives of its row."""
        if all("vectors" in prediction for prediction in predictions.values()):
            return self._search(predictions, source)
        scores = [
            prediction["scores"]
            for prediction in predictions.values()
            if len(prediction.get("scores", ())) > 1
        ]
        right = [own[0] > max(own[1:]) for own in scores]
        return {"accuracy": float(np.mean(right))} if right else {}

    def _search(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        texts: dict[str, Any] = {}
        queries: dict[str, Any] = {}
        relevant: dict[str, set[str]] = {}
        for item, prediction in predictions.items():
            own, vectors = self.row_texts(source, item), list(prediction["vectors"])
            query = self._query(source, item)
            if query is not None:
                queries[query] = vectors[0]
                relevant.setdefault(query, set()).add(own[1])
                own, vectors = own[1:], vectors[1:]
            texts |= dict(zip(own, vectors, strict=True))
        number = {text: i for i, text in enumerate(texts)}
        both = self.stacked([*queries.values(), *texts.values()])  # sparse ones get one size
        asked = len(queries)
        vectors = part_of(both, 0, asked), part_of(both, asked, len(both))
        found = retrieval_metrics(
            *vectors,
            [[number[text] for text in relevant[query]] for query in queries],
            k=self.k,
            left_out={
                q: number[query]
                for q, query in enumerate(queries)
                if query in number and query not in relevant[query]
            },
        )
        return found | self.facts(*vectors)

    def facts(self, queries: DenseOrSparse, texts: DenseOrSparse) -> dict[str, float]:
        """Further numbers about the vectors of all queries and texts."""
        return {}

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        scores = stored.values.get("scores")
        if not isinstance(scores, list):
            return {}
        return {"scores": [stored.number("scores", score) for score in scores]}
