"""Scores on held-out documents: loss, perplexity and accuracy of every task, and what knowing
nothing would give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from palm_ds.feed import Feed, Row, build_rows, held_out_rows
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
        """How far the accuracy is above the baseline's, in standard errors (the baseline's where
        all or nothing was right)."""
        chance = self.baseline_accuracy
        error = self.standard_error or math.sqrt(max(chance * (1 - chance), 0.0) / self.count)
        return (self.accuracy - chance) / error if error else 0.0

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
    rows = [
        row for number, feed in enumerate(feeds) for row in held_out_rows(feed, number, examples)
    ]
    return HeldOut(feeds, rows, length, pad)


def evaluate(engine: Engine, data: HeldOut, tasks: Mapping[str, Task]) -> dict[str, Score]:
    """Every task that has labels in the held-out rows. All processes call it and get the same."""
    sums: dict[str, torch.Tensor | float] = {}
    source_of = {task.name: feed.source for feed in data.feeds for task in feed.tasks}

    def add(task: str, name: str, value: torch.Tensor | float) -> None:
        sums[f"{name} {task}"] = sums.get(f"{name} {task}", 0.0) + value

    for batch in data.batches(engine.rank, engine.world, engine.micro_rows):
        outputs = engine.evaluate(batch)
        for name in source_of:
            targets = batch.labels[name][1].numpy() if name in batch.labels else np.empty(0, int)
            base_loss, base_right = tasks[name].baseline(targets, source_of[name])
            add(name, "loss", outputs[name].loss_sum)
            add(name, "right", outputs[name].correct)
            add(name, "base loss", float(base_loss.sum()))
            add(name, "base right", float(base_right.sum()))
            add(name, "count", float(len(targets)))
    totals = engine.reduce(sums)
    return {
        name: Score(
            count=int(count),
            loss=totals[f"loss {name}"] / count,
            accuracy=totals[f"right {name}"] / count,
            baseline_loss=totals[f"base loss {name}"] / count,
            baseline_accuracy=totals[f"base right {name}"] / count,
        )
        for name in source_of
        if (count := totals[f"count {name}"])
    }
