"""Predictions of tagging tasks: scores, reading from files, writing to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.tasks.metrics.chunks import chunk_scores, convert
from palm_ds.tasks.metrics.classes import accuracy
from palm_ds.tasks.metrics.counts import MatchCounts
from palm_ds.tasks.shared import tag_schemes
from palm_ds.tasks.shared.tag_predictions import conll, stored_spans, stored_tags, total_scores
from palm_ds.tasks.shared.tagging_task import SPANS, TagsTask
from palm_ds.tasks.shared.text_task import MOST_SHOWN


@dataclass(frozen=True, kw_only=True)
class TagScoring(TagsTask):
    """A tagging task with predictions of `tags` and, for texts without tokens, `spans`."""

    prediction_key: ClassVar[str] = "tags"

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Scores over rows with labels: F1, precision and recall of chunks, and the tag accuracy;
        only the accuracy for tags that are not chunks. Spans are compared with those of the table;
        one that training had to leave out counts as not found."""
        known = self._known(predictions, source)
        if not known:
            return {}
        types = self._types(predictions, known, source)
        scores = {} if self.written == tag_schemes.NONE else total_scores(types)
        if all("tags" in predictions[item] for item in known):  # a file may contain only spans
            tags = [predictions[item]["tags"] for item in known]
            right = [self._as_written(tags) for tags in known.values()]
            scores["accuracy"] = accuracy(np.concatenate(tags), np.concatenate(right))
        return scores

    def tables(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, list[list[Any]]]:
        """Scores by type of chunk, the most frequent first."""
        types = self._types(predictions, self._known(predictions, source), source)
        often = sorted(types, key=lambda kind: (-types[kind].expected, kind))[:MOST_SHOWN]
        rows = [
            [kind, x.expected, *(round(y, 4) for y in (x.f1, x.precision, x.recall))]
            for kind in often
            for x in [types[kind]]
        ]
        return {"Types": [["type", "expected", "f1", "precision", "recall"], *rows]} if rows else {}

    def _known(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[int, list[str]]:
        """{item: tags in the scheme of the head}, for rows with only known tags."""
        known = {}
        for item in predictions if self.labelled_by(source) else ():
            with suppress(UserError):
                known[item] = self.known_tags(source, item)
        return known

    def _as_written(self, tags: list[str]) -> list[str]:
        return tags if self.written == tag_schemes.NONE else convert(tags, self.written)

    def _types(
        self,
        predictions: Mapping[int, dict[str, Any]],
        known: Mapping[int, list[str]],
        source: TableSource,
    ) -> dict[str, MatchCounts]:
        """Counts by type of chunk."""
        if self.written == tag_schemes.NONE or not known:
            return {}
        if self.labelled_by(source) == SPANS:
            given = source.column(SPANS)
            pairs = [(predictions[item]["spans"], given[item] or []) for item in known]
            return tag_schemes.span_counts(pairs)
        tags = [predictions[item]["tags"] for item in known]
        return chunk_scores(tags, [self._as_written(tags) for tags in known.values()]).types

    def score_rows(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> dict[str, float]:
        """The metrics and the F1 of each type."""
        if self.labelled_by(source) == SPANS:
            made = {
                item: {"spans": stored_spans(prediction)}
                for item, prediction in enumerate(predictions)
            }
        else:
            made = {
                item: {"tags": stored_tags(prediction)}
                for item, prediction in enumerate(predictions)
            }
        task = self.for_scoring(source, made)
        task.check_labels(source)
        known = task._known(made, source)
        for item, tags in known.items():
            count = len(made[item].get("tags", tags))
            if count != len(tags):
                place, where = predictions[item].place, source.where(item)
                raise UserError(f"{place}: {count} tags, but {where} has {len(tags)}")
        types = task._types(made, known, source)
        return task.metrics(made, source) | {
            f"f1 {kind}": value.f1 for kind, value in types.items()
        }

    def submission_value(self, prediction: Mapping[str, Any]) -> str:
        return " ".join(prediction.get("tags", ()))

    def prediction_files(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, Any]:
        return {"conll": "".join(conll(predictions, source))}
