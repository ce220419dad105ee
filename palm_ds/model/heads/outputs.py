"""The meaning of a head's scores, for prediction, export and other programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import FiniteFloat

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings, one_of

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
"""transformers' `problem_type`, which selects the function that its pipelines apply to scores."""

Reading: TypeAlias = Literal["masked", "shifted", "causal"]
"""Where a masked-LM head predicts a token: at its own place; at the place before it; there too,
from the text before it alone."""


@dataclass(frozen=True, kw_only=True)
class HeadOutputs(Settings):
    """The meaning of a head's scores."""

    labels: tuple[str, ...] = ()
    """Class names, if known."""
    problem_type: Annotated[str, one_of(PROBLEM_TYPES, "")] = ""
    """One of PROBLEM_TYPES; empty: transformers infers it from the number of classes."""
    head_class: str = ""
    """The ending of the equivalent transformers class (`ForMultipleChoice`); empty: chosen by its
    shape."""
    mean: FiniteFloat = 0.0
    deviation: FiniteFloat = 1.0
    """A predicted number is `score * deviation + mean`."""
    relevance: bool = False
    """Whether only the second of two scores minus the first counts. Other programs get this one
    number; its sigmoid is the second class's probability."""
    reading: Reading = "masked"
    """Where a masked-LM head predicts a token."""
    images: bool = False
    """Whether it reads texts with images, which no head of another program does."""
    averaged: bool = False
    """Whether it reads the mean over a text's tokens, without the pooler: no class of transformers
    does, a CrossEncoder of sentence-transformers can."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.deviation:
            raise UserError("deviation: must not be 0")

    @property
    def scaled(self) -> bool:
        """Whether predictions differ from the scores."""
        return (self.mean, self.deviation) != (0.0, 1.0)

    def record(self) -> dict[str, Any]:
        """Plain values for JSON; defaults are left out."""
        plain = {**asdict(self), "labels": list(self.labels)}
        default = {**asdict(HeadOutputs()), "labels": []}
        return {key: value for key, value in plain.items() if value != default[key]}


@dataclass(frozen=True, kw_only=True)
class ExportedHead:
    """A task's head, as exported to a Hugging Face folder."""

    name: str
    """The head's name in the model."""
    task_id: int = 0
    """The row of the task embedding for its texts."""
    outputs: HeadOutputs = HeadOutputs()
