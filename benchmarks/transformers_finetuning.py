"""Fine-tuning with transformers as its own examples do it (run_glue.py, run_ner.py, run_qa.py): the
other side of finetune_vs_transformers.py. A kind makes features of rows and a model, and scores the
dev rows by palm_ds's metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
)

from palm_ds.tasks.metrics.answers import cmrc, squad_v1
from palm_ds.tasks.metrics.chunks import chunk_scores
from palm_ds.tasks.metrics.classes import accuracy
from palm_ds.tasks.metrics.numbers import pearson

Row = dict[str, Any]
OVERLAP, N_BEST, LONGEST_ANSWER = 64, 20, 30
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Kind(ABC):
    """A task over rows, as transformers learns it."""

    rows: list[Row]
    dev_rows: list[Row]
    tokenizer: Any
    length: int

    @abstractmethod
    def features(self, rows: list[Row], *, labeled: bool) -> list[Row]:
        """What the model reads of rows; several of one row if it has windows."""

    @abstractmethod
    def model(self, encoder: str) -> Any: ...

    @abstractmethod
    def score(self, trainer: Trainer) -> float:
        """The metric over the dev rows."""

    def collator(self) -> Any:
        return DataCollatorWithPadding(self.tokenizer)

    def logits(self, trainer: Trainer, features: list[Row]) -> Any:
        return trainer.predict(features).predictions  # type: ignore[arg-type]


class Classification(Kind):
    """A class of a text or a pair."""

    @cached_property
    def labels(self) -> list[str]:
        return sorted({row["label"] for row in self.rows})

    def target(self, row: Row) -> Any:
        return self.labels.index(row["label"])

    def features(self, rows: list[Row], *, labeled: bool) -> list[Row]:
        texts = [row["text_a"] for row in rows]
        pairs = [row["text_b"] for row in rows] if "text_b" in rows[0] else None
        found = self.tokenizer(texts, pairs, truncation=True, max_length=self.length)
        made = [{key: found[key][i] for key in found} for i in range(len(rows))]
        if labeled:
            for each, row in zip(made, rows, strict=True):
                each["labels"] = self.target(row)
        return made

    def model(self, encoder: str) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            encoder, num_labels=len(self.labels)
        )

    def score(self, trainer: Trainer) -> float:
        logits = self.logits(trainer, self.features(self.dev_rows, labeled=False))
        return accuracy(logits.argmax(-1), [self.target(row) for row in self.dev_rows])


class Regression(Classification):
    """A number for a text or a pair."""

    def target(self, row: Row) -> float:
        return float(row["label"])

    def model(self, encoder: str) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            encoder, num_labels=1, problem_type="regression"
        )

    def score(self, trainer: Trainer) -> float:
        logits = self.logits(trainer, self.features(self.dev_rows, labeled=False))
        return pearson(logits[:, 0], [self.target(row) for row in self.dev_rows])


class Tagging(Kind):
    """A tag for each word, at its first token."""

    @cached_property
    def labels(self) -> list[str]:
        return sorted({tag for row in self.rows for tag in row["tags"]})

    def features(self, rows: list[Row], *, labeled: bool) -> list[Row]:
        texts = [row["tokens"] for row in rows]
        found = self.tokenizer(
            texts, is_split_into_words=True, truncation=True, max_length=self.length
        )
        made = []
        for number, row in enumerate(rows):
            each = {key: found[key][number] for key in found}
            if labeled:
                each["labels"] = [-100] * len(each["input_ids"])
                for word, place in first_tokens(found.word_ids(number)).items():
                    each["labels"][place] = self.labels.index(row["tags"][word])
            made.append(each)
        return made

    def collator(self) -> Any:
        return DataCollatorForTokenClassification(self.tokenizer)

    def model(self, encoder: str) -> Any:
        return AutoModelForTokenClassification.from_pretrained(encoder, num_labels=len(self.labels))

    def score(self, trainer: Trainer) -> float:
        texts = [row["tokens"] for row in self.dev_rows]
        found = self.tokenizer(
            texts, is_split_into_words=True, truncation=True, max_length=self.length
        )
        logits = self.logits(trainer, self.features(self.dev_rows, labeled=False))
        predicted = []
        for number, words in enumerate(texts):
            tags = ["O"] * len(words)
            for word, place in first_tokens(found.word_ids(number)).items():
                tags[word] = self.labels[int(logits[number, place].argmax())]
            predicted.append(tags)
        scores = chunk_scores(predicted, [row["tags"] for row in self.dev_rows])
        return scores.overall.f1


def first_tokens(word_ids: list[int | None]) -> dict[int, int]:
    """{word: its first token}."""
    return {word: at for at, word in reversed(list(enumerate(word_ids))) if word is not None}


class Reading(Kind):
    """The span of a context that answers a question; windows without the answer learn [CLS]."""

    def encoded(self, rows: list[Row]) -> Any:
        questions, contexts = ([row[key] for row in rows] for key in ("question", "context"))
        return self.tokenizer(
            questions,
            contexts,
            truncation="only_second",
            max_length=self.length,
            stride=OVERLAP,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )

    def features(self, rows: list[Row], *, labeled: bool) -> list[Row]:
        found = self.encoded(rows)
        made = []
        for window, number in enumerate(found["overflow_to_sample_mapping"]):
            each = {key: found[key][window] for key in INPUTS if key in found}
            if labeled:
                answer = rows[number]["answers"][0]
                last = answer["start"] + len(answer["text"]) - 1
                places = [found.char_to_token(window, c, 1) for c in (answer["start"], last)]
                inside = None not in places
                each["start_positions"], each["end_positions"] = places if inside else (0, 0)
            made.append(each)
        return made

    def model(self, encoder: str) -> Any:
        return AutoModelForQuestionAnswering.from_pretrained(encoder)

    def score(self, trainer: Trainer) -> float:
        found = self.encoded(self.dev_rows)
        starts, ends = self.logits(trainer, self.features(self.dev_rows, labeled=False))
        best = [(-np.inf, "")] * len(self.dev_rows)
        for window, number in enumerate(found["overflow_to_sample_mapping"]):
            context = self.dev_rows[number]["context"]
            places = [at for at, text in enumerate(found.sequence_ids(window)) if text == 1]
            score, first, last = best_span(starts[window], ends[window], places)
            if score > best[number][0]:
                offsets = found["offset_mapping"][window]
                best[number] = score, context[offsets[first][0] : offsets[last][1]]
        answers = {str(i): [a["text"] for a in r["answers"]] for i, r in enumerate(self.dev_rows)}
        texts = {str(number): text for number, (_, text) in enumerate(best)}
        chinese = any("一" <= sign <= "鿿" for sign in self.dev_rows[0]["context"])
        return (cmrc if chinese else squad_v1)(texts, answers)["f1"]


def best_span(start: np.ndarray, end: np.ndarray, places: list[int]) -> tuple[float, int, int]:
    """The best (score, first, last) token among the `places`, as in run_qa.py."""
    best_starts = [at for at in np.argsort(-start)[:N_BEST].tolist() if at in places]
    best_ends = [at for at in np.argsort(-end)[:N_BEST].tolist() if at in places]
    spans = [
        (float(start[first] + end[last]), first, last)
        for first in best_starts
        for last in best_ends
        if first <= last < first + LONGEST_ANSWER
    ]
    return max(spans, default=(-np.inf, 0, 0))


KINDS: dict[str, type[Kind]] = {
    "classification": Classification,
    "regression": Regression,
    "tagging": Tagging,
    "reading": Reading,
}
