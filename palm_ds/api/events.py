"""Events during training, for `trainer.train(event_handler)`.

    def handler(event):
        if isinstance(event, palm.event.EndIteration):
            print(event.pass_id, event.batch_id, event.cost)

A pass is an epoch; with several tasks, an epoch of the reference task. Handlers are called on every
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Metrics = Mapping[str, Mapping[str, float]]
"""{task: {metric: value}}."""


@dataclass(frozen=True, kw_only=True)
class BeginTraining:
    """Before the first step, of a resumed run too."""

    step: int


@dataclass(frozen=True, kw_only=True)
class BeginPass:
    """An epoch begins; epochs count from 0."""

    pass_id: int


@dataclass(frozen=True, kw_only=True)
class BeginIteration:
    """A step begins; `batch_id` counts over the whole training, from 0."""

    pass_id: int
    batch_id: int


@dataclass(frozen=True, kw_only=True)
class EndIteration:
    """A step is done."""

    pass_id: int
    batch_id: int
    cost: float
    """The training loss: the sum of the tasks' losses times their weights."""
    lr: float
    metrics: Metrics
    """Loss and accuracy of each task in the step."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores on the rows of `dev` after `step` steps."""

    step: int
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint of `step` steps was written."""

    step: int


@dataclass(frozen=True, kw_only=True)
class EndPass:
    """An epoch is complete."""

    pass_id: int
    metrics: Metrics = field(default_factory=dict)
    """Of the last evaluation."""


@dataclass(frozen=True, kw_only=True)
class EndTraining:
    """Training has finished or was interrupted."""

    step: int
    metrics: Metrics = field(default_factory=dict)
    """Of the last evaluation."""


Event: TypeAlias = (
    BeginTraining
    | BeginPass
    | BeginIteration
    | EndIteration
    | Evaluation
    | Saved
    | EndPass
    | EndTraining
)
EventHandler: TypeAlias = Callable[[Event], None]
