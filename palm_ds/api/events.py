"""What a training tells while it goes on: `trainer.train(event_handler)`.

    def handler(event):
        if isinstance(event, palm.event.EndIteration):
            print(event.pass_id, event.batch_id, event.cost)

A pass is an epoch; of several tasks, one of the reference. Every process is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Metrics = Mapping[str, Mapping[str, float]]
"""{task: {metric: value}}."""


@dataclass(frozen=True, kw_only=True)
class BeginTraining:
    """Before the first step, or the first after going on."""

    step: int


@dataclass(frozen=True, kw_only=True)
class BeginPass:
    """An epoch begins; they count from 0."""

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
    """What was minimised: the tasks' losses, each times its weight."""
    lr: float
    metrics: Metrics
    """Loss and accuracy of each task in the step."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores on the rows of `dev` after so many steps."""

    step: int
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class EndPass:
    """An epoch is over."""

    pass_id: int
    metrics: Metrics = field(default_factory=dict)
    """Of the last evaluation."""


@dataclass(frozen=True, kw_only=True)
class EndTraining:
    """Nothing follows: the plan is done, or somebody stopped it."""

    step: int
    metrics: Metrics = field(default_factory=dict)
    """Of the last evaluation."""
