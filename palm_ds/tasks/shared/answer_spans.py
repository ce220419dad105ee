"""Answer spans: maps labeled answers to tokens of their contexts, and combines the best answers of
all windows of a context.

    {"text": "1066", "start": 58}  ──covering tokens──>  12, 13      ("in 1066": 1066 is two tokens)
    best spans of windows  ──distinct texts, best first──>  n_best, probabilities, no-answer odds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.tasks.shared.sliding_windows import different


@dataclass(frozen=True)
class Answers:
    """Labeled answers as tokens of their contexts, in the order of the rows."""

    starts: np.ndarray  # (rows + 1,) index of the first answer of each row
    tokens: np.ndarray  # (answers, 2) first and last token
    exact: np.ndarray  # (answers,) bool: the tokens cover exactly the answer
    lost: int
    """Number of answers that match no tokens."""

    def of(self, row: int) -> np.ndarray:
        """The tokens (answers, 2) of one row."""
        return self.tokens[self.starts[row] : self.starts[row + 1]]

    def within(self, row: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """(windows,) bool: whether the tokens [first, last) of a row contain an answer."""
        many = np.diff(self.starts)[row]
        window = np.repeat(np.arange(len(row)), many)
        number = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
        tokens = self.tokens[self.starts[row][window] + number]
        inside = (tokens[:, 0] >= first[window]) & (tokens[:, 1] < last[window])
        return np.bincount(window, inside, minlength=len(row)) > 0


def find_answers(source: TableSource, context: str, answers: str) -> Answers:
    """The answers of all rows, given the names of the two columns; empty if the table has no answer
    column. Raises UserError if an answer is not at its `start` in the context."""
    rows: list[int] = []
    tokens: list[tuple[int, int]] = []
    exact: list[bool] = []
    lost = 0
    encoded, texts = source.encoded(context), source.column(context)
    for item in range(len(source)) if answers in source.columns else ():
        spans = encoded.spans_of(item)
        for text, start in _places(source, item, texts[item], answers):
            first, last = covering(spans, start, start + len(text))
            if start < 0 or first > last:
                lost += 1
                continue
            rows.append(item)
            tokens.append((first, last))
            exact.append(texts[item][spans[first, 0] : spans[last, 1]].strip() == text.strip())
    return Answers(
        starts=np.searchsorted(np.array(rows, np.int64), np.arange(len(source) + 1)),
        tokens=np.array(tokens, np.int64).reshape(-1, 2),
        exact=np.array(exact, bool),
        lost=lost,
    )


def _places(source: TableSource, item: int, context: str, column: str) -> list[tuple[str, int]]:
    """(text, start) of the answers of a row; start -1: the answer is not in the context."""
    places = []
    for answer in source.column(column)[item] or ():
        try:
            text, start = str(answer["text"]), int(answer["start"])
        except (TypeError, KeyError, ValueError):
            raise UserError(
                f'{source.where(item)}: {column}: expected {{"text": ..., "start": ...}}, got '
                f"{answer!r}"
            ) from None
        if start >= 0 and context[start : start + len(text)] != text:
            raise UserError(
                f"{source.where(item)}: {column}: {text[:40]!r} is not in the context at "
                f"character {start}"
            )
        places.append((text, start))
    return places


def covering(spans: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """First and last of the tokens (tokens, 2) that overlap the characters [start, end); the first
    is greater than the last if there are none."""
    first = int(np.searchsorted(spans[:, 1], start, side="right"))
    last = int(np.searchsorted(spans[:, 0], end, side="left")) - 1
    return first, last


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """[start, end) without surrounding space, which some tokenizers include in a token."""
    inner = text[start:end]
    start = int(start) + len(inner) - len(inner.lstrip())
    return start, start + len(inner.strip())


class AnswerSpan(NamedTuple):
    """A predicted answer; an empty text means no answer."""

    text: str
    start: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        """The score that answers are ranked by."""
        return self.start_logit + self.end_logit


def join_windows(
    windows: Sequence[Mapping[str, Any]], context: str, *, n_best: int, null_threshold: float | None
) -> dict[str, Any]:
    """The answer to a question, combined from all windows of its context.

    windows: `null`, the start and end score of no answer, and `found`, the two scores and the
    context characters [start, end) of the best spans of the window.
    null_threshold: predict no answer if its score exceeds that of the best answer by more than
    this; None: always predict an answer. The score of no answer is the lowest over all windows, as
    in BERT's run_squad.py."""
    candidates = [entry for window in windows for entry in window["found"]]
    candidates.sort(key=lambda entry: (-entry[0] - entry[1], entry[2], entry[3]))
    texts = [context[int(start) : int(end)] for _, _, start, end in candidates]
    best = [
        AnswerSpan(texts[k], int(candidates[k][2]), *candidates[k][:2])
        for k in different(texts, n_best)
    ] or [AnswerSpan("", -1, 0.0, 0.0)]
    if null_threshold is None:
        return _prediction(best[0], best)
    nothing = AnswerSpan("", -1, *min((window["null"] for window in windows), key=sum))
    odds = nothing.score - best[0].score
    listed = [answer for answer in best if answer.text] + [nothing]
    listed.sort(key=lambda answer: -answer.score)
    chosen = nothing if odds > null_threshold else best[0]
    return _prediction(chosen, listed) | {"null_odds": round(odds, 6)}


def _prediction(chosen: AnswerSpan, listed: Sequence[AnswerSpan]) -> dict[str, Any]:
    return {
        "text": chosen.text,
        "start": chosen.start,
        "score": round(chosen.score, 6),
        "n_best": _with_probabilities(listed),
    }


def _with_probabilities(answers: Sequence[AnswerSpan]) -> list[dict[str, Any]]:
    """The answers as JSON, with probabilities from a softmax over their scores."""
    scores = np.array([answer.score for answer in answers])
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    return [
        {
            "text": answer.text,
            "start": answer.start,
            "probability": round(float(share), 6),
            "start_logit": round(answer.start_logit, 6),
            "end_logit": round(answer.end_logit, 6),
        }
        for answer, share in zip(answers, shares, strict=True)
    ]
