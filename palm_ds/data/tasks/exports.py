"""The interface of a task's head for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from palm_ds.model.heads.outputs import ExportedHead, HeadOutputs
from palm_ds.model.pooling import TextPooling


class Exports:
    """What a task's head means, and what is equivalent to it elsewhere."""

    labels: ClassVar[Sequence[str]] = ()
    """Names of its classes, if they have any, in the order of the head's scores."""

    def head_outputs(self) -> HeadOutputs:
        """The meaning of its head's scores, stored with the weights."""
        return HeadOutputs(labels=tuple(self.labels))

    def hf_export(self) -> ExportedHead | None:
        """The transformers head equivalent to this task's head; None means there is none."""
        return None

    def text_pooling(self) -> TextPooling | None:
        """How texts become the vectors that this task trains; None: it trains none."""
        return None
