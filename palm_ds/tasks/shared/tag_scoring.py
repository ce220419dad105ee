"""Predictions of tagging tasks: scores, reading from files, writing to files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import eq
from typing import Any, Self

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.reader.cell_values import json_list
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.tasks.metrics.chunks import chunk_scores
from palm_ds.tasks.metrics.class_report import (
    CalibrationBin,
    ClassReport,
    calibration_bins,
    class_report,
)
from palm_ds.tasks.metrics.classes import accuracy
from palm_ds.tasks.metrics.counts import MatchCounts
from palm_ds.tasks.shared import tag_schemes
from palm_ds.tasks.shared.tagging_task import SPANS, TagsTask


@dataclass(frozen=True, kw_only=True)
class TagScoring(TagsTask):
    """A tagging task with predictions of `tags` and, for texts without tokens, `spans`."""

    prediction_key = "tags"

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
            scores["accuracy"] = accuracy(np.concatenate(tags), np.concatenate([*known.values()]))
        return scores

    def report(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> ClassReport | None:
        """Scores by type of chunk, or by tag if they are no chunks; and the calibration of the
        probabilities of the tags."""
        known = self._known(predictions, source)
        if not known:
            return None
        bins = self._calibration(predictions, known)
        if self.written != tag_schemes.NONE:
            return ClassReport(classes=self._types(predictions, known, source), bins=bins)
        predicted = [tag for item in known for tag in predictions[item]["tags"]]
        right = [tag for tags in known.values() for tag in tags]
        names = sorted({*predicted, *right})
        number = {name: i for i, name in enumerate(names)}
        ours, theirs = ([number[tag] for tag in tags] for tags in (predicted, right))
        return class_report(ours, theirs, names, bins)

    def _calibration(
        self, predictions: Mapping[int, dict[str, Any]], known: Mapping[int, list[str]]
    ) -> list[CalibrationBin]:
        """Of all tags; empty if some have no probability."""
        probs, right = [], []
        for item, tags in known.items():
            found = predictions[item].get("tags", ())
            own = predictions[item].get("probs", ())
            if len(own) != len(tags) or len(found) != len(tags):
                return []
            probs += own
            right += map(eq, found, tags)
        return calibration_bins(probs, right)

    def _known(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[int, list[str]]:
        """{item: tags in the scheme of predictions}, for rows with only known tags. These are the
        table's, not the head's: IO as `trained_scheme` merges chunks."""
        known, scheme = {}, self.trained if self.written == tag_schemes.NONE else self.written
        for item in predictions if self.labeled_by(source) else ():
            with suppress(UserError):
                self.known_tags(source, item)
                known[item] = self.expected(source, item, scheme)
        return known

    def _types(
        self,
        predictions: Mapping[int, dict[str, Any]],
        known: Mapping[int, list[str]],
        source: TableSource,
    ) -> dict[str, MatchCounts]:
        """Counts by type of chunk."""
        if self.written == tag_schemes.NONE or not known:
            return {}
        if self.labeled_by(source) == SPANS:
            given = source.column(SPANS)
            pairs = [(predictions[item]["spans"], given[item] or []) for item in known]
            return tag_schemes.span_counts(pairs)
        tags = [predictions[item]["tags"] for item in known]
        return chunk_scores(tags, [*known.values()]).types

    def prepared(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> tuple[Self, dict[int, dict[str, Any]]]:
        made: dict[int, dict[str, Any]]
        if self.labeled_by(source) == SPANS:
            made = {
                item: {"spans": stored_spans(prediction)}
                for item, prediction in enumerate(predictions)
            }
        else:
            made = {
                item: {"tags": stored_tags(prediction), "probs": stored_probs(prediction)}
                for item, prediction in enumerate(predictions)
            }
        task = self.for_scoring(source, made)
        task.check_labels(source)
        for item, found in made.items():
            _check_stored(found.get("tags", ()), task.written, predictions[item].place)
        known = task._known(made, source)
        for item, tags in known.items():
            count = len(made[item].get("tags", tags))
            if count != len(tags):
                place, where = predictions[item].place, source.where(item)
                raise UserError(f"{place}: {count} tags, but {where} has {len(tags)}")
        return task, made

    def submission_value(self, prediction: Mapping[str, Any]) -> str:
        return " ".join(prediction.get("tags", ()))

    def prediction_files(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, Any]:
        return {"conll": "".join(conll(predictions, source))}


def stored_tags(stored: StoredPrediction) -> list[str]:
    """The tags of a prediction: a list, also as JSON in a text, or a text separated by spaces."""
    tags = stored.value("tags")
    if isinstance(tags, str):
        tags = tags.split() if (listed := json_list(tags)) is None else listed
    if not isinstance(tags, list):
        raise UserError(f"{stored.place}: tags: expected a list of tags, got {json.dumps(tags)}")
    return [str(tag) for tag in tags]


def _check_stored(tags: Sequence[str], scheme: str, place: str) -> None:
    """Raises UserError with the place if one of the tags is none, unless tags are not chunks."""
    try:
        tag_schemes.check_tags(tags if scheme != tag_schemes.NONE else (), "")
    except UserError as error:
        raise UserError(f"{place}: tags: {error}") from None


def stored_probs(stored: StoredPrediction) -> list[float]:
    """The probabilities of the tags of a prediction; empty if it has none."""
    probs = stored.values.get("probs")
    numbers = isinstance(probs, list) and all(isinstance(x, int | float) for x in probs)
    return [float(x) for x in probs] if probs and numbers else []


def stored_spans(stored: StoredPrediction) -> list[Mapping[str, Any]]:
    """The character spans of a prediction. Raises UserError if one is malformed."""
    spans = stored.value("spans")
    for span in spans if isinstance(spans, list) else [spans]:
        if not _is_span(span):
            raise UserError(
                f'{stored.place}: spans: expected [{{"type": "x", "start": 0, "end": 3}}, ...], '
                f"got {json.dumps(span, ensure_ascii=False)}"
            )
    return spans


def _is_span(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    return all(type(value.get(key)) is int for key in ("start", "end"))


def conll(predictions: Mapping[int, Mapping[str, Any]], source: TableSource) -> Iterator[str]:
    """CoNLL lines: one token per line, tab-separated columns, an empty line after each row. The
    tags of the row, if any, precede the predicted ones."""
    for item in range(len(source)):
        prediction, row = predictions.get(item, {}), source.row(item)
        tokens = prediction.get("tokens", row.get("tokens")) or []
        columns = [
            tokens,
            *([row["tags"]] if _fits(row.get("tags"), tokens) else []),
            prediction.get("tags", []),
        ]
        for cells in zip(*columns, strict=True):
            yield "\t".join(" ".join(str(cell).split()) or "_" for cell in cells) + "\n"
        yield "\n"


def _fits(tags: object, tokens: Sequence[str]) -> bool:
    return isinstance(tags, list) and len(tags) == len(tokens)


def total_scores(types: Mapping[str, MatchCounts]) -> dict[str, float]:
    """F1, precision and recall of the summed counts of all types."""
    total = sum(types.values(), MatchCounts())
    return {"f1": total.f1, "precision": total.precision, "recall": total.recall}
