"""The interface of tasks on the server: rows of bare texts, what orders texts, and the form of a
task on the server's page.

    form().fields ──what is typed──> {role: text} ──/predict──> prediction ──form().shows──> page
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from palm_ds.common.errors import UserError

SAMPLE = "The tower in Paris is 330 metres tall."
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


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a task is tried by hand."""

    about: str
    """What the task does, in a sentence."""
    fields: tuple[FormField, ...]
    shows: Literal["scores", "answer", "choices", "spans"] = "scores"
    """How its predictions are drawn: a number or classes (what has neither is shown as it is); an
    answer in the field `context`; the lines of the field `choices`; spans of the field `text`."""


class Serves:
    """What a server needs to know of a task."""

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

    def row_of(self, texts: str | Sequence[str]) -> dict[str, Any]:
        """The row of a bare text, or of several. Raises UserError for more than the task reads."""
        named = tuple(self.texts) or PAIR
        if isinstance(texts, str):
            return {named[0]: texts}
        if len(texts) > len(named):
            raise UserError(f"{len(texts)} texts; the task reads {' and '.join(named)}")
        return dict(zip(named, texts, strict=False))

    def relevance(self, prediction: Mapping[str, Any]) -> float:
        """How well the texts of a pair fit, of a task with a `rerank_priority`: by default the
        probability, of several the last, or the number of a prediction."""
        value = prediction.get("probs", prediction.get("value", 0.0))
        return float(value[-1] if isinstance(value, list) else value)

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
        "fields": [vars(each) for each in form.fields],
    }
