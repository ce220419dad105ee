"""Answers as spans: those of the rows as tokens of their contexts, and the best that the windows of
a context give, put together.

    {"text": "1066", "start": 58}  ──covering tokens──>  12, 13      ("in 1066": 1066 is two tokens)
    windows' best spans  ──different texts, best first──>  n_best, probabilities, the odds of none
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.table_source import TableSource
from palm_ds.tasks.shared.sliding_windows import different


@dataclass(frozen=True)
class Answers:
    """Answers as tokens of their contexts, row by row."""

    starts: np.ndarray  # (rows + 1,) where each row's answers begin
    tokens: np.ndarray  # (answers, 2) first and last token
    exact: np.ndarray  # (answers,) bool: the tokens are the answer and nothing else
    lost: int
    """Answers that are no tokens."""

    def of(self, row: int) -> np.ndarray:
        """(answers, 2) of one row."""
        return self.tokens[self.starts[row] : self.starts[row + 1]]

    def within(self, row: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """(windows,) bool: whether an answer stands within the tokens [first, last) of its row."""
        many = np.diff(self.starts)[row]
        window = np.repeat(np.arange(len(row)), many)
        number = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
        tokens = self.tokens[self.starts[row][window] + number]
        held = (tokens[:, 0] >= first[window]) & (tokens[:, 1] < last[window])
        return np.bincount(window, held, minlength=len(row)) > 0


def find_answers(source: TableSource, context: str, answers: str) -> Answers:
    """Of every row, by the names of both columns; none where the table has no answers. Raises
    UserError at a row whose answer does not stand where it says."""
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
    """(text, start) of a row's answers; start -1: it is known to stand nowhere."""
    found = []
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
                f"{source.where(item)}: {column}: {text[:40]!r} does not stand at character {start}"
            )
        found.append((text, start))
    return found


def covering(spans: np.ndarray, start: int, end: int) -> tuple[int, int]:
    """The first and the last token (tokens, 2) that have a character of [start, end); the first is
    beyond the last where none has."""
    first = int(np.searchsorted(spans[:, 1], start, side="right"))
    last = int(np.searchsorted(spans[:, 0], end, side="left")) - 1
    return first, last


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """[start, end) without the space at its ends, which some tokenizers count to the word."""
    inner = text[start:end]
    start = int(start) + len(inner) - len(inner.lstrip())
    return start, start + len(inner.strip())


class Answer(NamedTuple):
    """One that is given; without text: there is none."""

    text: str
    start: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        """What answers are ordered by."""
        return self.start_logit + self.end_logit


def join_windows(
    windows: Sequence[Mapping[str, Any]], context: str, *, n_best: int, null_threshold: float | None
) -> dict[str, Any]:
    """The answer to a question: of each window `null`, the two scores of no answer, and `found`,
    the scores of its best spans and the characters [from, to) of the context they are.

    null_threshold: give no answer where that scores higher than the best by more; None: always
    give one. How surely there is none is said by the window that is least sure (as BERT has it)."""
    found = [entry for window in windows for entry in window["found"]]
    found.sort(key=lambda entry: (-entry[0] - entry[1], entry[2], entry[3]))
    texts = [context[int(start) : int(end)] for _, _, start, end in found]
    best = [
        Answer(texts[k], int(found[k][2]), *found[k][:2]) for k in different(texts, n_best)
    ] or [Answer("", -1, 0.0, 0.0)]
    if null_threshold is None:
        return _prediction(best[0], best)
    nothing = Answer("", -1, *min((window["null"] for window in windows), key=sum))
    odds = nothing.score - best[0].score
    listed = [answer for answer in best if answer.text] + [nothing]
    listed.sort(key=lambda answer: -answer.score)
    chosen = nothing if odds > null_threshold else best[0]
    return _prediction(chosen, listed) | {"null_odds": round(odds, 6)}


def _prediction(chosen: Answer, listed: Sequence[Answer]) -> dict[str, Any]:
    return {
        "text": chosen.text,
        "start": chosen.start,
        "score": round(chosen.score, 6),
        "n_best": _with_probabilities(listed),
    }


def _with_probabilities(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """As JSON, each with its share of the softmax over these."""
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
