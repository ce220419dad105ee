"""Scores on held-out documents: loss, perplexity and accuracy of every task, and what knowing
nothing would give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from palm_ds.data.blend_dataset import (
    Built,
    Feed,
    Row,
    build_examples,
    collate_built,
    held_out_rows,
)
from palm_ds.data.decode import Decoded, decoded, gathered
from palm_ds.data.task import Task
from palm_ds.train.report.metrics_file import set_title

if TYPE_CHECKING:
    from palm_ds.engine import Engine
    from palm_ds.model.batch import Batch


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Of one task, over `count` labels; the baseline is what the task's `baseline` says."""

    count: int
    loss: float
    accuracy: float
    baseline_loss: float
    baseline_accuracy: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the task scores its predictions by; the first is the one that counts."""
    tables: Mapping[str, list[list[Any]]] = field(default_factory=dict)
    """What the task shows of its predictions: {title: rows of cells, the first the heads}."""

    @property
    def value(self) -> float:
        """What counts: the first metric, else the accuracy."""
        return next(iter(self.metrics.values()), self.accuracy)

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
class HeldOutSet:
    """The held-out examples of every blend, packed once: the same rows at every evaluation."""

    feeds: Sequence[Feed]
    rows: Sequence[Row]
    length: int
    pad: int
    sets: Mapping[str, HeldOutSet] = field(default_factory=dict)
    """Further rows to evaluate on, by the name of their evaluation set."""

    def first_rows_of(self, task: str, rows: int) -> HeldOutSet:
        """The first `rows` rows that have a task, alone."""
        having = {n for n, feed in enumerate(self.feeds) if task in [t.name for t in feed.tasks]}
        return replace(self, rows=[row for row in self.rows if row[0][0] in having][:rows])

    def batches(self, rank: int, world: int, micro_rows: int) -> Iterator[tuple[Built, Batch]]:
        """This process's micro-batches, with the examples in them; all processes get the same
        number, the last ones may hold empty rows."""
        each = -(-len(self.rows) // (world * micro_rows))
        padded = [*self.rows, *([[]] * (each * world * micro_rows - len(self.rows)))]
        mine = padded[rank::world]
        for i in range(0, len(mine), micro_rows):
            built = build_examples(self.feeds, mine[i : i + micro_rows])
            yield built, collate_built(self.feeds, built, self.length, self.pad)


def held_out_set(feeds: Sequence[Feed], examples: int, length: int, pad: int) -> HeldOutSet:
    """The first `examples` held-out examples of every feed over a corpus, all of one over a
    table."""
    rows = []
    for number, feed in enumerate(feeds):
        most = len(feed.items) if feed.tasks[0].reads == "table" else examples
        rows += held_out_rows(feed, number, most)
    return HeldOutSet(feeds, rows, length, pad)


def evaluate(engine: Engine, data: HeldOutSet, tasks: Mapping[str, Task]) -> dict[str, TaskScore]:
    """Every task that has labels in the held-out rows. All processes call it and get the same."""
    sums: dict[str, torch.Tensor | float] = {}
    sources: list[Any] = [feed.source for feed in data.feeds]
    source_of = {task.name: feed.source for feed in data.feeds for task in feed.tasks}
    scored = [name for name in source_of if tasks[name].reads == "table"]
    pieces: list[Decoded] = []

    def add(task: str, name: str, value: torch.Tensor | float) -> None:
        sums[f"{name} {task}"] = sums.get(f"{name} {task}", 0.0) + value

    for built, batch in data.batches(engine.rank, engine.world, engine.micro_rows):
        outputs = engine.evaluate(batch, scored)
        scores = {name: x.scores for name, x in outputs.items() if x.scores is not None}
        pieces += decoded(built, scores, tasks, sources)
        for name, source in source_of.items():
            targets = batch.labels[name][1].numpy() if name in batch.labels else np.empty(0, int)
            base_loss, base_right = tasks[name].baseline(targets, cast(Any, source))
            add(name, "loss", outputs[name].loss_sum)
            add(name, "right", outputs[name].correct)
            add(name, "base loss", float(base_loss.sum()))
            add(name, "base right", float(base_right.sum()))
            add(name, "count", float(batch.count(name)))
    totals = engine.reduce(sums)
    everybody = [piece for mine in engine.processes.gather(pieces) for piece in mine]
    found = gathered(everybody, tasks, sources)
    return {
        name: TaskScore(
            count=int(count),
            loss=totals[f"loss {name}"] / count,
            accuracy=totals[f"right {name}"] / count,
            baseline_loss=totals[f"base loss {name}"] / count,
            baseline_accuracy=totals[f"base right {name}"] / count,
            **(_scored(tasks[name], *found[name], sources) if name in found else {}),
        )
        for name in source_of
        if (count := totals[f"count {name}"])
    }


def evaluate_sets(
    engine: Engine, data: HeldOutSet, tasks: Mapping[str, Task]
) -> dict[str, TaskScore]:
    """{"task (set)": score} on every further evaluation set. All processes call it."""
    return {
        set_title(task, name): score
        for name, rows in data.sets.items()
        for task, score in evaluate(engine, rows, tasks).items()
    }


def _scored(
    task: Task, feed: int, predictions: Mapping[int, dict[str, Any]], sources: list[Any]
) -> dict[str, Any]:
    """What the predictions of all processes are worth; the same on every process."""
    return {
        "metrics": task.metrics(predictions, sources[feed]),
        "tables": task.tables(predictions, sources[feed]),
    }
