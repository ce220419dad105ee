"""Scores on held-out documents: loss, perplexity and accuracy of every task, and what knowing
nothing would give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from palm_ds.stream import Feed, Row, build_rows, held_out_rows
from palm_ds.task import Task

if TYPE_CHECKING:
    from palm_ds.engine import Engine
    from palm_ds.example import Batch


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of one task, over `count` labels; the baseline is what the task's `baseline` says."""

    count: int
    loss: float
    accuracy: float
    baseline_loss: float
    baseline_accuracy: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def standard_error(self) -> float:
        """Of the accuracy, the labels taken as independent."""
        return math.sqrt(max(self.accuracy * (1 - self.accuracy), 0.0) / max(self.count, 1))

    @property
    def standard_errors_above(self) -> float:
        """How far the accuracy is above the baseline's, in standard errors."""
        return (self.accuracy - self.baseline_accuracy) / max(self.standard_error, 1e-9)

    def record(self) -> dict[str, Any]:
        """All of it as plain numbers."""
        return asdict(self) | {
            "perplexity": self.perplexity,
            "standard_error": self.standard_error,
            "standard_errors_above": self.standard_errors_above,
        }


@dataclass(frozen=True)
class HeldOut:
    """The held-out examples of every blend, packed once: the same rows at every evaluation."""

    feeds: Sequence[Feed]
    rows: Sequence[Row]
    length: int
    pad: int

    def batches(self, rank: int, world: int, micro_rows: int) -> list[Batch]:
        """This process's micro-batches; all processes get the same number, the last ones may hold
        empty rows."""
        each = -(-len(self.rows) // (world * micro_rows))
        padded = [*self.rows, *([[]] * (each * world * micro_rows - len(self.rows)))]
        mine = padded[rank::world]
        return [
            build_rows(self.feeds, mine[i : i + micro_rows], self.length, self.pad)
            for i in range(0, len(mine), micro_rows)
        ]


def held_out(feeds: Sequence[Feed], examples: int, length: int, pad: int) -> HeldOut:
    """The first `examples` held-out examples of every feed."""
    rows = [row for number, feed in enumerate(feeds) for row in held_out_rows(feed, number, examples)]
    return HeldOut(feeds, rows, length, pad)


def evaluate(
    engine: Engine, data: HeldOut, tasks: Mapping[str, Task]
) -> dict[str, Score]:
    """Every task that has labels in the held-out rows. All processes call it and get the same."""
    names = list(tasks)
    sums = torch.zeros(len(names), 5, dtype=torch.float64, device=engine.device)
    source_of = {task.name: feed.source for feed in data.feeds for task in feed.tasks}
    for batch in data.batches(engine.rank, engine.world, engine.micro_rows):
        outputs = engine.evaluate(batch)
        for i, name in enumerate(names):
            if name not in batch.labels:
                continue
            targets = batch.labels[name][1].cpu().numpy()
            known = [float(np.sum(x)) for x in tasks[name].baseline(targets, source_of[name])]
            sums[i, 0] += outputs[name].loss_sum
            sums[i, 1] += outputs[name].correct
            sums[i, 2:] += torch.tensor([*known, len(targets)], device=sums.device)
    totals = engine.reduce(sums).tolist()
    return {
        name: Score(
            count=int(count),
            loss=loss / count,
            accuracy=right / count,
            baseline_loss=base_loss / count,
            baseline_accuracy=base_right / count,
        )
        for name, (loss, right, base_loss, base_right, count) in zip(names, totals, strict=True)
        if count
    }
