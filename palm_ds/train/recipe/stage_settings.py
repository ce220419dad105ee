"""Settings that a stage has instead of the recipe's: phases, as in ModernBERT, Ettin and mmBERT.

    stages:
      - {knowledge_masking: 9000, rate: 0.3}
      - {knowledge_masking: 1000, rate: [0.3, 0.15], lr: 1.0e-4, schedule: {kind: cosine}}

Weights and moments continue from stage to stage. What a stage does not say is the recipe's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.data.stream.stages import StepInfo
from palm_ds.train.recipe.lr_schedule import LRSchedule


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What a stage has of its own."""

    lr: float | None = None
    """Instead of `optimizer.lr`; other rates that follow it (`head_lr`, `layer_decay`) keep their
    ratio to it."""
    schedule: LRSchedule | None = None
    """Of this stage alone, from its first to its last step."""
    weight_decay: float | None = None
    """Instead of `optimizer.weight_decay`."""
    rate: float | list[float] | None = None
    """Share of the tokens that masking tasks predict: a number, or [from, to] for a linear change
    over the stage."""
    freeze: tuple[str, ...] = ()
    """Parameters that this stage does not update, as patterns: [backbone.word.*]."""

    def __post_init__(self) -> None:
        if self.lr is not None and self.lr <= 0:
            raise UserError(f"lr: must be above 0, got {self.lr}")
        if self.weight_decay is not None and self.weight_decay < 0:
            raise UserError(f"weight_decay: must not be negative, got {self.weight_decay}")
        if self.schedule and self.schedule.restart == "stage":
            raise UserError("schedule.restart: a stage's own schedule always does; remove it")
        rates = self.rates or (0.5,)
        if len(rates) > 2 or not all(0 < rate < 1 for rate in rates):
            raise UserError(
                f"rate: expected a share between 0 and 1, or [from, to], got {self.rate}"
            )

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str, step_tokens: int) -> StageSettings:
        """From a recipe's `stages`, with amounts in steps; `where` is the key. Raises UserError."""
        try:
            own = parse(cls, values, "")
            return replace(own, schedule=own.schedule and own.schedule.in_steps(step_tokens))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates at the beginning and the end; empty if the stage has none."""
        if self.rate is None:
            return ()
        return tuple(self.rate) if isinstance(self.rate, list) else (self.rate,)

    def decay_scale(self, weight_decay: float) -> float:
        """The multiplier of the recipe's weight decay."""
        return 1.0 if self.weight_decay is None else self.weight_decay / weight_decay

    def scale(self, at: StepInfo, *, schedule: LRSchedule, lr: float, steps: int) -> float:
        """The multiplier of the recipe's `lr` at a step of a run of `steps`; `schedule`: the
        recipe's."""
        if self.schedule:
            factor = replace(self.schedule, restart="stage").scale(at, steps)
        else:
            factor = schedule.scale(at, steps)
        return factor if self.lr is None else factor * self.lr / lr
