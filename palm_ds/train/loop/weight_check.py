"""Tells good weights from ruined ones by texts that were learned from when the weights were good.

    check.good_step = ...     a step whose losses were normal, from time to time
    check.problem()           what shows that the weights of now are not good, or nothing

Weights are good if they are finite, and if the losses of the last good step, computed again without
dropout, are no spike (loss_spikes.py). A step's own losses do not tell: they are those of the
weights before it, and its data may be to blame for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palm_ds.engine import Engine
from palm_ds.model.inputs.batch import Batch
from palm_ds.train.loop.loss_spikes import SpikeDetector


@dataclass(frozen=True, kw_only=True)
class GoodStep:
    """A step with normal losses."""

    step: int
    """Counted from 0."""
    stage: int
    batches: Sequence[Batch]
    """This process's."""
    losses: Mapping[str, float]
    counts: Mapping[str, int]
    """What the losses are divided by."""


@dataclass
class WeightCheck:
    """Checks the weights of an engine. All processes make the same calls."""

    engine: Engine
    detector: SpikeDetector
    good_step: GoodStep | None = None

    def problem(self, *, over: bool = False) -> str:
        """Evidence that the weights are not good; empty if there is none. `over`: losses that are
        too high for an ongoing spike to be over are evidence too. Collective."""
        if names := self.engine.nonfinite_weights():
            more = f" (and {len(names) - 1} more)" if names[1:] else ""
            return f"{names[0]}{more} has values that are not finite"
        if self.good_step is None:
            return ""
        good, losses = self.good_step, self._losses_of(self.good_step)
        texts = f"for the texts of step {good.step + 1}"
        for task, loss in losses.items():
            if not math.isfinite(loss):
                return f"{texts} the loss of {task}, {good.losses[task]:.4g} before, is not finite"
        spike = self.detector.compare(good.step, good.stage, good.losses, losses, over=over)
        return f"{texts} {spike}" if spike else ""

    def _losses_of(self, good: GoodStep) -> dict[str, float]:
        """The losses of the texts of a step under the weights of now."""
        sums = self.engine.losses_again(good.batches, [*good.losses])
        totals = self.engine.reduce(sums) if sums else {}
        return {task: totals[task] / good.counts[task] for task in good.losses if task in totals}

    def state(self) -> str:
        """The state of weights without a problem, for a message."""
        if not self.detector.watches:
            return "The weights are finite; their losses were not watched (`loss_spike.zscore`)"
        if self.good_step is None:
            return "The weights are finite; there was no good step before to check them with"
        return "The weights are unaffected"
