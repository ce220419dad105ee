"""Predicted tags and spans: reading from files, writing as CoNLL, total scores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.tasks.metrics.counts import MatchCounts


def stored_tags(stored: StoredPrediction) -> list[str]:
    """The tags of a prediction, given as a list or as a text separated by spaces."""
    tags = stored.value("tags")
    return tags.split() if isinstance(tags, str) else [str(tag) for tag in tags]


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
