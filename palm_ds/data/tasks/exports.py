"""The interface of a task's head for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from palm_ds.model.heads.outputs import ExportedHead, HeadOutputs
from palm_ds.model.pooling import TextPooling

ImportedHead: TypeAlias = Literal["class", "labels", "number", "tokens", "choices", "answer"]
"""The heads of transformers that predict: one class or several labels of a text, its number, a
class of each token, one of several texts, an answer in a text."""


class Exports:
    """What a task's head means, and what is equivalent to it elsewhere."""

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

    def hf_export(self) -> ExportedHead | None:
        """The transformers head equivalent to this task's head; None means there is none."""
        return None

    def text_pooling(self) -> TextPooling | None:
        """How texts become the vectors that this task trains; None: it trains none."""
        return None
