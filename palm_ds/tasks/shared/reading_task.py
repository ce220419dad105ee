"""Settings of reading comprehension, and what it detects in its rows: answers, script, scoring."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from palm_ds.common.config import Several
from palm_ds.common.errors import UserError
from palm_ds.common.settings import Rate
from palm_ds.data.sources.table import TableSource
from palm_ds.tasks.shared.answer_spans import Answers, find_answers
from palm_ds.tasks.shared.text_task import TextTask, missing
from palm_ds.text.tokenizer import CHINESE

LONGEST, LONGEST_CHINESE = 30, 100  # tokens of an answer
AnyReading = TypeVar("AnyReading", bound="ReadingTask")
_SAMPLE = 200  # contexts used to detect the script
_HAN, _WORD = re.compile(f"[{CHINESE}]"), re.compile("[A-Za-z]+")


@dataclass(frozen=True, kw_only=True)
class ReadingTask(TextTask):
    """Extracts answers from a context."""

    texts: Several[str] = ("question", "context")
    """Columns of the question and of the context."""
    label_column: str = "answers"
    """Column of the answers."""
    stride: PositiveInt = 128
    """Tokens between the starts of consecutive windows of a context."""
    max_query: PositiveInt = 64
    """Maximum tokens of a question; longer ones are truncated."""
    max_answer: NonNegativeInt = 0
    """Maximum tokens of a predicted answer; 0: 30, or 100 if the training contexts are mostly
    Chinese."""
    n_best: PositiveInt = 20
    """Number of distinct answers to list, with their probabilities relative to each other."""
    unanswerable: bool | None = None
    """Whether questions may have no answer. If true, windows without the answer are trained to
    predict none, and none is predicted if that scores better; if false, such windows are left out
    of training. Default: true if a training row is marked `impossible`."""
    null_threshold: float = 0.0
    """With `unanswerable`: predict no answer if it outscores the best answer by more than this."""
    dropout: Rate = 0.0
    """Dropout on the input of the head during training; 0.1 in ERNIE-Doc's code."""
    answer: Literal["first", "random"] = "first"
    """Training target if a window contains several answers: the first in the row, or a random one
    each time."""
    score: Literal["auto", "squad1", "squad2", "cmrc"] = "auto"
    """Scoring rules: SQuAD 1.1 or 2.0, or CMRC2018 (and DRCD). auto: squad2 if a training row is
    marked `impossible`, else cmrc if the contexts are mostly Chinese, else squad1."""

    prediction_key = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.texts) != 2:
            raise UserError(f"{self.where}.texts: expected two columns, question and context")

    def resolved(self: AnyReading, source: TableSource) -> AnyReading:
        self.columns_of(source)
        return replace(
            self,
            max_answer=self.longest(source),
            unanswerable=self.may_refuse(source),
            score=self.rules(source),
        )

    def longest(self, source: TableSource) -> int:
        return self.max_answer or (LONGEST_CHINESE if self._chinese(source) else LONGEST)

    def may_refuse(self, source: TableSource) -> bool:
        if self.unanswerable is not None:
            return self.unanswerable
        return bool(impossible_rows(source).any())

    def rules(self, source: TableSource) -> str:
        if self.score != "auto":
            return self.score
        if impossible_rows(source).any():
            return "squad2"
        return "cmrc" if self._chinese(source) else "squad1"

    def _chinese(self, source: TableSource) -> bool:
        """Whether there are more Chinese characters than Latin words."""
        column = self.texts[1]

        def count() -> bool:
            text = "".join(filter(None, source.column(column)[:_SAMPLE]))
            return len(_HAN.findall(text)) > len(_WORD.findall(text))

        return source.cached(f"chinese {column}", count)

    def check(self, source: TableSource, *, labeled: bool) -> None:
        self.columns_of(source)
        if not labeled:
            return
        source.need(self.label_column, self.where)
        rules, impossible = self.rules(source), impossible_rows(source)
        for item, answers in enumerate(source.column(self.label_column)):
            if answers is None or not (answers or impossible[item]):
                raise UserError(
                    f"{source.where(item)}: {self.label_column} is empty; mark a question without "
                    "an answer as `impossible`"
                )
            if not answers and rules != "squad2":
                raise UserError(
                    f"{source.where(item)}: a question without an answer, which "
                    f"{rules} does not allow; set {self.where}.score: squad2"
                )
        self.answers(source)

    def describe(self, source: TableSource) -> str:
        answers, longest = self.answers(source), self.longest(source)
        long = np.diff(answers.tokens, axis=1) >= longest
        facts = {
            "without an answer": impossible_rows(source).sum(),
            "answers": len(answers.tokens),
            "answers that start or end inside a token": (~answers.exact).sum(),
            f"answers of more than {longest} tokens (max_answer)": long.sum(),
            "answers not found in their context": answers.lost,
        }
        parts = [f"{int(count):,} {what}" for what, count in facts.items() if count]
        return "; ".join([f"{self.name}: {len(source):,} questions", *parts])

    def answers(self, source: TableSource) -> Answers:
        context, answers = self.texts[1], self.label_column
        return source.cached(
            f"{answers} in {context}", lambda: find_answers(source, context, answers)
        )

    def check_labels(self, source: TableSource) -> None:
        source.need(self.label_column, self.where)
        missing(source.column(self.label_column), source, self.label_column)


def impossible_rows(source: TableSource) -> np.ndarray:
    """(rows,) bool: whether a row is marked as having no answer."""

    def read() -> np.ndarray:
        known = source.column("impossible") if "impossible" in source.columns else [False]
        return np.broadcast_to(np.array(known, bool), len(source))

    return source.cached("impossible rows", read)
