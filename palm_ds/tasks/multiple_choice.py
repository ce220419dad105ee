"""Multiple choice: selects the answer to a question, or the ending of a text.

[CLS] text_a [SEP] (text_b [SEP]) choice [SEP] for each choice; choices do not attend to each
other. With `images` each has the image of its row beside it, as in VCR. Each gets a score; a
softmax over the choices of the question gives the probabilities. The number of choices may vary.
Predictions: `label`, in the format of the file's labels, and `logits` and `probs`, one per choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Rate
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, build_input, join, layouts
from palm_ds.data.tasks.interfaces import (
    Form,
    FormField,
    StoredPrediction,
    text_field,
)
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.outputs import ExportedHead, HeadOutputs
from palm_ds.model.heads.pooled import ChoiceHead
from palm_ds.tasks.metrics.classes import accuracy
from palm_ds.tasks.metrics.probabilities import rounded, softmax
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.image_text import OptionalImages
from palm_ds.tasks.shared.text_task import RowTexts, level, missing, tokenize


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(OptionalImages):
    """Predicts one of the choices of a row."""

    choices: str = "choices"
    """Column of the choices."""
    answers: Literal["", "number", "letter", "text"] = ""
    """Format of labels: the number of a choice, its letter (A, B, ...), or its text; by default
    detected in the training rows."""
    count_from: int = -1
    """Number of the first choice; by default 0 or 1, as detected in the training rows."""
    dropout: Rate = 0.1
    """Dropout on the input of the head during training."""

    prediction_key = "label"
    imports = "choices"

    def resolved(self, source: TableSource) -> MultipleChoice:
        """With the label format of the training rows that have a label."""
        self.columns_of(source)
        source.need(self.label_column, self.where)
        rows = replace(source, numbers=source.numbers[self.labeled(source)])
        labels = [str(value) for value in rows.single_values(self.label_column)]
        answers = self.answers or _written(labels)
        first = self.count_from
        if first < 0:
            numbers = [int(label) if label.isdecimal() else -1 for label in labels]
            last = [
                number == len(c) for number, c in zip(numbers, self._choices(rows), strict=True)
            ]
            first = int(answers == "number" and 0 not in numbers and any(last))
        return replace(super().resolved(source), answers=answers, count_from=first)

    def check(self, source: TableSource, *, labeled: bool) -> None:
        super().check(source, labeled=False)
        for item, choices in enumerate(self._choices(source)):
            several = isinstance(choices, list) and len(choices) > 1
            if not several or not all(isinstance(choice, str) for choice in choices):
                raise UserError(
                    f"{source.where(item)}: {self.choices}: expected a list of two texts or more, "
                    f"got {choices!r}"
                )
        for item in range(len(source)) if labeled else ():
            self._right(source, item)

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        source.need(self.choices, self.where)
        return super().columns_of(source)

    def _choices(self, source: TableSource) -> list[list[str]]:
        return source.column(self.choices)

    # -- labels --

    def targets(self, source: TableSource) -> np.ndarray:
        """(rows,) int64: index of the correct choice; -1 if the label is missing or invalid."""
        return source.cached(f"choices of {self.name}", lambda: self._targets(source))

    def _targets(self, source: TableSource) -> np.ndarray:
        if self.label_column not in source.columns:
            return np.full(len(source), -1)
        pairs = zip(source.single_values(self.label_column), self._choices(source), strict=True)
        return np.array([self._number(label, choices) for label, choices in pairs], np.int64)

    def _number(self, label: object, choices: list[str]) -> int:
        """Index of the choice that a label names; -1 if none."""
        text = str(label).strip()
        if self.answers == "text":
            stripped = [choice.strip() for choice in choices]
            return stripped.index(text) if text in stripped else -1
        if self.answers == "letter":
            letter = len(text) == 1 and "A" <= text.upper() <= "Z"
            number = ord(text.upper()) - ord("A") if letter else -1
        else:
            number = int(text) - self.count_from if text.isdecimal() else -1
        return number if 0 <= number < len(choices) else -1

    def _right(self, source: TableSource, item: int) -> None:
        """Raises UserError if the label of a row is not one of its choices."""
        source.need(self.label_column, self.where)
        label, choices = source.single_values(self.label_column)[item], self._choices(source)[item]
        labels.one_value(label, self, source, item)
        if self._number(label, choices) < 0:
            known = [self._name(number, choices) for number in (0, len(choices) - 1)]
            between = " or " if len(choices) == 2 else " to "
            expected = "one of them" if self.answers == "text" else between.join(known)
            raise UserError(
                f"{source.where(item)}: {self.label_column}: {str(label)!r} is not one of the "
                f"{len(choices)} choices; {self.where} expects {expected}"
            )

    def _name(self, number: int, choices: list[str]) -> str:
        """A choice in the format of the labels."""
        if self.answers == "text":
            return choices[number]
        first = max(self.count_from, 0)
        return chr(ord("A") + number) if self.answers == "letter" else str(number + first)

    # -- examples --

    def _encoded(self, source: TableSource) -> RowTexts:
        """Choices of all rows."""
        rows = self._choices(source)
        return source.cached(f"encoded {self.choices}", lambda: tokenize(rows, source, "choices"))

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """`item`, `tokens` (most choices,) of each choice with its texts, and `tags`, those of the
        tags of the image, which stands beside each choice.

        The choices of a question share a row; where they are too long, the longest are cut."""
        item, columns = items[:, 0], self.columns_of(source)
        lengths = np.stack([source.encoded(column).lengths for column in columns])
        shared = lengths.sum(0) + source.vocabulary.around(len(columns) + 1)
        most, beside, tags = self.input_length(max_length), np.zeros_like(item), np.zeros_like(item)
        if self.images:
            regions, tags = self.image_lengths(item, source, most)
            beside = regions + tags
        choices = self._encoded(source)
        beside_all = choices.counts[item] * beside
        kept = choices.cut(item, shared[item], source, most - beside, max_length - beside_all)
        return layouts(kept.sum(1) + beside_all, item=item, tokens=kept, tags=tags)

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        item = int(layout["item"])
        choices, known = self._encoded(source), source.vocabulary
        texts = [source.encoded(column) for column in self.columns_of(source)]
        parts = []
        for choice, tokens in zip(choices.of(item), layout["tokens"], strict=False):
            lengths = [*(text.lengths[item] for text in texts), choices.tokens.lengths[choice]]
            room = tokens - known.around(len(lengths))
            *kept, last = level(np.array([lengths]), room)[0].tolist()
            pieces = [text.read(item, 0, many) for text, many in zip(texts, kept, strict=True)]
            pieces.append(choices.tokens.read(choice, 0, last))
            parts.append(build_input(pieces, known, [0, *[known.second_type] * len(texts)]))
        if self.images:
            tags = int(layout["tags"])
            parts = [self.beside_image(part, item, tags, source) for part in parts]
        example = join(parts)
        example.item = item
        return example

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        if len(example.sub_lengths) != len(self._choices(source)[example.item]):
            raise UserError(
                f"{self.where}: it builds its own choices; name it first in the task group"
            )
        right = max(self.targets(source)[example.item], 0)
        self.label_text(example, (np.arange(len(example.sub_lengths)) == right).astype(np.int64))
        example.grouped_labels.add(self.name)

    # -- head and predictions --

    def head(self, backbone: Encoder) -> ChoiceHead:
        return ChoiceHead(
            self.text_width(backbone),
            images=self.images,
            dropout=self.dropout,
            init_range=backbone.config.init_range,
        )

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """Random-choice baseline, averaged over the questions of the source."""
        number = self._encoded(source).counts
        questions = np.ones(int(targets.sum()))
        return np.log(number).mean() * questions, (1 / number).mean() * questions

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        logits = scores[:, 0]
        choices = self._choices(source)[example.item]
        return {
            "label": self._name(int(logits.argmax()), choices),
            "logits": rounded(logits),
            "probs": rounded(softmax(logits)),
        }

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Accuracy over the rows with a label; empty if there are none. If the rows to score have
        no choices, labels are compared as text."""
        labels = [str(prediction["label"]) for prediction in predictions.values()]
        if self.choices not in source.columns or not self.answers:
            column = source.single_values(self.label_column)
            return {"accuracy": accuracy(labels, [str(column[item]) for item in predictions])}
        choices = self._choices(source)
        pairs = zip(labels, predictions, strict=True)
        predicted = np.array([self._number(label, choices[item]) for label, item in pairs])
        targets = self.targets(source)[list(predictions)]
        known = targets >= 0
        return {"accuracy": accuracy(predicted[known], targets[known])} if known.any() else {}

    def check_labels(self, source: TableSource) -> None:
        source.need(self.label_column, self.where)
        missing(source.single_values(self.label_column), source, self.label_column)

    def prepared(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> tuple[Self, dict[int, dict[str, Any]]]:
        labels.check_overlap(self, source, predictions)
        return super().prepared(source, predictions)

    def head_outputs(self) -> HeadOutputs:
        return HeadOutputs(head_class="ForMultipleChoice")

    def form(self) -> Form:
        choices = FormField(
            name="choices",
            role="choices",
            label="choices, one on each line",
            value="yes\nno",
            listed=True,
        )
        text = replace(text_field("text_a"), lines=3)
        about = "Chooses one of several texts."
        return self.with_image(Form(about=about, fields=(text, choices), shows="choices"))

    @classmethod
    def imported(cls, labels: Sequence[str]) -> dict[str, Any]:
        return {"answers": "number", "count_from": 0}

    def hf_export(self) -> ExportedHead:
        return self.exported()


def _written(labels: list[str]) -> Literal["number", "letter", "text"]:
    """The format of the labels."""
    if all(label.isdecimal() for label in labels):
        return "number"
    return (
        "letter"
        if all(len(label) == 1 and "A" <= label.upper() <= "Z" for label in labels)
        else "text"
    )
