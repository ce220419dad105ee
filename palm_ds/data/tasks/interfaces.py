"""Interfaces of a task beyond training: predictions, their files, exports, serving.

    scores of examples ──decode──> pieces ──gather──> {item: prediction} ──metrics, tables──> report

A prediction is a mapping of plain values, as JSON.

On the server a task has rows of bare texts, and a form on the page:

    form().fields ──what is typed──> {role: text} ──/predict──> prediction ──form().shows──> page
"""

from __future__ import annotations

import inspect
import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.model.heads.outputs import ExportedHead, HeadOutputs
from palm_ds.model.pooling import TextPooling

CELL = "cell"


@dataclass(frozen=True, kw_only=True)
class StoredPrediction:
    """One prediction of a file."""

    place: str
    """The file and line, for messages."""
    key: object = None
    """Its row: a row number or an id; None: predictions are in the order of the rows."""
    values: Mapping[str, Any]
    """Values by name; the prediction of a file without names for its values is `cell`."""

    def value(self, *names: str) -> Any:
        """The first of the named values that exists, else the cell. Raises UserError."""
        for name in (*names, CELL):
            if name in self.values:
                return self.values[name]
        has = ", ".join(map(str, self.values))
        raise UserError(f"{self.place}: no {' or '.join(names)}; it has {has}")

    def number(self, name: str, value: Any) -> float:
        """A finite number. Raises UserError with `name`."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UserError(f"{self.place}: {name}: {value!r} is not a number")
        return number


class ScoreReport(Protocol):
    """More about predictions than `metrics`: scores by class, for example."""

    def record(self) -> dict[str, Any]:
        """As JSON: all of it."""
        ...

    def tables(self) -> dict[str, list[list[Any]]]:
        """{title: rows of cells, header first}, for readers."""
        ...


class Predicts(ABC):
    """Predictions of a task, and their scores. A task that defines `decode` predicts."""

    name: str

    prediction_key: ClassVar[str] = ""
    """Main entry of a prediction (`label`, `value`, `text`), the content of a one-column file."""

    @property
    def predicts(self) -> Literal["", "scores", "texts"]:
        """`scores`: predictions are decoded from the head's scores. `texts`: they are generated
        (text_generation.py). Empty: it predicts nothing."""
        return "scores" if type(self).decode is not Predicts.decode else ""

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        """The prediction for one example, as JSON, from its head's scores (labels, any) float32."""
        raise UserError(f"tasks.{self.name}: this task has no predictions to decode")

    def gather(
        self, pieces: Mapping[int, Sequence[dict[str, Any]]], source: TableSource
    ) -> dict[int, dict[str, Any]]:
        """{item: prediction} from {item: decoded predictions of its examples, in order}."""
        return {item: dict(found[0]) for item, found in pieces.items()}

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """{metric: value} of predictions and the source's labels, main one first; may be empty."""
        return {}

    def report(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> ScoreReport | None:
        """More about predictions of rows with labels; None if there is nothing to say."""
        return None

    def tables(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, list[list[Any]]]:
        """{title: rows of cells, header first}: more for the report, such as a confusion matrix."""
        report = self.report(predictions, source)
        return report.tables() if report else {}


class PredictionFiles(Predicts):
    """Files of a task's predictions, written and read."""

    eval_only: ClassVar[Sequence[str]] = ()
    """Entries of a prediction that only `metrics` reads."""

    def shown(self, prediction: Mapping[str, Any]) -> dict[str, Any]:
        """A prediction as users get it: without what only `metrics` reads."""
        return {key: value for key, value in prediction.items() if key not in self.eval_only}

    def submission_value(self, prediction: Mapping[str, Any]) -> str:
        """A prediction as the text of one cell: its `prediction_key`, or "" if it has none."""
        value = prediction.get(self.prediction_key, "")
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return " ".join(text.split())

    def prediction_files(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, Any]:
        """{suffix: content} of files to write next to the predictions: texts, or JSON."""
        return {}

    def prepared(
        self, source: TableSource, predictions: Sequence[StoredPrediction]
    ) -> tuple[Self, dict[int, dict[str, Any]]]:
        """The task, and what its `metrics` reads, from predictions of a file, one per row of
        `source`, which has no tokenizer. Raises UserError."""
        return self, dict(enumerate(map(self.read_prediction, predictions)))

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        """A stored prediction in the form `metrics` takes. Raises UserError."""
        if not self.prediction_key:
            return dict(stored.values)
        return {**stored.values, self.prediction_key: stored.value(self.prediction_key)}


ImportedHead: TypeAlias = Literal["class", "labels", "number", "tokens", "choices", "answer"]
"""The heads of transformers that predict: one class or several labels of a text, its number, a
class of each token, one of several texts, an answer in a text."""


class Exports:
    """The meaning of a task's head, and its equivalents elsewhere."""

    labels: ClassVar[Sequence[str]] = ()
    """Names of its classes, if they have any, in the order of the head's scores."""

    imports: ClassVar[ImportedHead | None] = None
    """The head of transformers whose scores it decodes, if any."""

    @classmethod
    def imported(cls, labels: Sequence[str]) -> dict[str, Any]:
        """The settings to predict with such a head of these labels."""
        return {}

    def head_outputs(self) -> HeadOutputs:
        """The meaning of its head's scores, stored with the weights."""
        return HeadOutputs(labels=tuple(self.labels))

    def with_head_like(self, stored: HeadOutputs) -> Self:
        """The task with a head that reads the same as a stored one: a teacher's may read something
        other than the student's."""
        return self

    def hf_export(self) -> ExportedHead | None:
        """The transformers head equivalent to this task's head; None means there is none."""
        return None

    def text_pooling(self) -> TextPooling | None:
        """The pooling of texts into vectors that this task trains; None: it trains none."""
        return None


SAMPLE = "The tower in Paris is 330 meters tall."
QUESTION = "How tall is the tower?"
PAIR = ("text_a", "text_b")


@dataclass(frozen=True, kw_only=True)
class FormField:
    """A text that the page asks for."""

    name: str
    """What is typed stays when another task is chosen whose field has the same name."""
    role: str
    """Its key in the row."""
    label: str
    lines: int = 4
    """The height of its box."""
    value: str = SAMPLE
    """What is in it at first."""
    short: bool = False
    """One line, which Enter sends."""
    optional: bool = False
    """If it is empty, the row does not have it."""
    listed: bool = False
    """Its lines are a list of texts."""
    parsed: bool = False
    """It is JSON: what is sent is the value."""


Shows: TypeAlias = Literal["scores", "answer", "choices", "spans", "text"]
"""How predictions are drawn: a number or classes (what has neither is shown as it is); an answer in
the field `context`; the lines of the field `choices`; spans of the field `text`; the text that is
written."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form for trying a task by hand."""

    about: str
    """What the task does, in a sentence."""
    fields: tuple[FormField, ...]
    shows: Shows = "scores"


class Serves:
    """The part of a task that a server uses."""

    texts: ClassVar[Sequence[str]] = ()
    """The columns of its texts, where its kind or the recipe names them."""
    about: ClassVar[str] = ""
    """What it does, for the page; by default the first sentence of the class's description."""
    about_pair: ClassVar[str] = "Compares two texts."
    """The same where it reads two texts."""
    pair_roles: ClassVar[Sequence[str]] = ()
    """The columns of the two texts that it always reads, unless the recipe names others."""
    rerank_priority: ClassVar[int] = 0
    """Whether its score orders texts by how well they fit another: 0: it does not; 1: where a
    request names the task; of those above, the highest answers requests that name none."""

    @property
    def source_roles(self) -> Sequence[str]:
        """The columns of its texts that a program may give as they are; empty: the usual ones."""
        return self.texts

    def row_of(self, texts: str | Sequence[str]) -> dict[str, Any]:
        """The row of a bare text, or of several. Raises UserError for more than the task reads."""
        named = tuple(self.source_roles) or PAIR
        if isinstance(texts, str):
            return {named[0]: texts}
        if len(texts) > len(named):
            raise UserError(f"{len(texts)} texts; the task reads {' and '.join(named)}")
        return dict(zip(named, texts, strict=False))

    def relevance(self, prediction: Mapping[str, Any]) -> float:
        """The degree to which the texts of a pair fit, of a task with a `rerank_priority`: by
        default the probability, of several the last, or the number of a prediction. A probability
        near 1 is 1 minus the others: it is rounded itself, and many texts may fit that well."""
        value = prediction.get("probs", prediction.get("value", 0.0))
        if not isinstance(value, list):
            return float(value)
        return value[-1] if value[-1] < 0.5 else round(1 - sum(value[:-1]), 15)

    def form(self) -> Form:
        """The form of the task on the page: two texts, or one and maybe another."""
        if roles := self.texts if len(self.texts) > 1 else self.pair_roles:
            return pair_form(self.about_pair, roles)
        (first,) = self.texts or PAIR[:1]
        second = FormField(
            name="b",
            role=PAIR[1],
            label="second text, for pairs",
            lines=2,
            value="",
            optional=True,
        )
        about = self.about or (inspect.getdoc(type(self)) or "").partition("\n\n")[0]
        return Form(about=about, fields=(text_field(first), second))


def text_field(role: str) -> FormField:
    """The field of a task's only text."""
    return FormField(name="text", role=role, label="text")


def pair_form(about: str, roles: Sequence[str]) -> Form:
    """The form of a task that reads two texts."""
    first, second, *_ = roles
    return Form(
        about=about,
        fields=(
            FormField(name="text", role=first, label="first text", lines=3, value=QUESTION),
            FormField(name="b", role=second, label="second text", lines=3),
        ),
    )


def as_json(form: Form) -> Mapping[str, Any]:
    """A form as the server sends it."""
    return {
        "about": form.about,
        "shows": form.shows,
        "fields": [vars(field_) for field_ in form.fields],
    }
