"""Unusual steps: idle heads, tasks that differ between processes, non-finite gradients."""

from __future__ import annotations

import os
from typing import Any

import torch

from palm_ds.data.tasks.example import collate
from palm_ds.engine import Engine
from palm_ds.model.heads.heads import HeadOutput
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from tests.distributed.tiny import LENGTH, LR, make_engine, row, share, train

ROWS, WORLD = 8, int(os.environ.get("WORLD_SIZE", 1))


class OnlyBusyHeads(Model):
    """Breaks the rule: heads without labels do not run."""

    def forward(self, batch: Batch) -> dict[str, HeadOutput]:
        flat = self.backbone(batch).flatten(0, 1)
        outputs = {}
        for task, name in self.head_of.items():
            outputs[task] = HeadOutput(torch.zeros(()), torch.zeros(()))
            if task in batch.labels:
                at, targets = batch.labels[task]
                head: Any = self.heads[name]
                rows = flat.index_select(0, at)
                rows = self.backbone.pooler(rows) if head.pooled else rows
                outputs[task] = head(rows, targets)
        return outputs


class Poisoned(Model):
    """A loss that is infinite on request."""

    poison = False

    def forward(self, batch: Batch) -> dict[str, HeadOutput]:
        outputs = super().forward(batch)
        if self.poison:
            words = outputs["words"]
            outputs["words"] = words._replace(loss_sum=words.loss_sum * float("inf"))
        return outputs


def one_task_each(step: int, rank: int, world: int) -> list[Batch]:
    """The first half of the rows has one task, the second half the other."""
    size = ROWS // world
    mine = range(rank * size, (rank + 1) * size)
    tasks = [("words",) if n < ROWS // 2 else ("order",) for n in mine]
    rows = [[(row(step, n, task), 0)] for n, task in zip(mine, tasks, strict=True)]
    return [collate(rows, length=LENGTH, pad=0)]


def same_task_by_turns(step: int, rank: int, world: int) -> list[Batch]:
    """All rows have one task in even steps and the other in odd ones."""
    size = ROWS // world
    task = ("words",) if step % 2 == 0 else ("order",)
    rows = [[(row(step, n, task), 0)] for n in range(rank * size, (rank + 1) * size)]
    return [collate(rows, length=LENGTH, pad=0)]


def weights_after(engine: Engine, data: Any) -> dict[str, list[float]] | None:
    for step in range(4):
        engine.step(data(step, engine.rank, engine.world), LR, step)
    state = engine.full_state_dict()
    return {k: v.flatten().tolist() for k, v in state.items() if k.startswith("heads.")}


def build(stage: int, kind: type[Model], precision: str = "fp32") -> Engine:
    return make_engine(stage, precision, ROWS // WORLD, kind=kind, rows=ROWS)


def poisoned(stage: int, precision: str) -> dict[str, Any]:
    """Train, poison a step on the last rank only, check the weights, continue training."""
    engine = build(stage, Poisoned, precision)
    model: Any = engine._engine.module
    batches = lambda step: share(step, engine.rank, engine.world, engine.micro_rows, ROWS)  # noqa: E731
    engine.step(batches(0), LR, 0)
    before, skipped = engine.full_state_dict(), engine.skipped_steps  # fp16 may skip at first
    model.poison = engine.rank == engine.world - 1
    engine.step(batches(1), LR, 1)
    model.poison = False
    skipped = engine.skipped_steps - skipped
    after = engine.full_state_dict()
    losses = train(engine, range(2, 5), ROWS)
    moved = engine.full_state_dict()
    return {
        "same": all(torch.equal(before[name], after[name]) for name in before),
        "moved": any(not torch.equal(after[name], moved[name]) for name in before),
        "skipped": skipped,
        "losses": losses,
        "norm": engine.grad_norm,
    }


def together() -> dict[str, Any]:
    """Of one process, which has all tasks of a step."""
    results: dict[str, Any] = {"each 0": weights_after(build(0, Model), one_task_each)}
    engine = build(2, Model)
    results["turns"] = weights_after(engine, same_task_by_turns)
    asked = engine.step(share(9, engine.rank, engine.world, engine.micro_rows, ROWS), LR, 9)
    return results | {"tokens": asked.tokens}


def steps(stages: list[int], poisoned_runs: list[str]) -> dict[str, Any]:
    """`poisoned_runs`: stage:precision, by stage."""
    results: dict[str, Any] = {"poisoned": {}}
    for stage in stages:
        results[f"each {stage}"] = weights_after(build(stage, Model), one_task_each)
        for run in poisoned_runs:
            if run.startswith(str(stage)):
                results["poisoned"][run] = poisoned(stage, run.split(":")[1])
    results["turns 3"] = weights_after(build(3, Model), same_task_by_turns)
    results["turns 3, only busy heads"] = weights_after(build(3, OnlyBusyHeads), same_task_by_turns)
    engine = build(3, Model)
    results["fresh"] = make_engine(3, rows=ROWS, micro=ROWS // engine.world).full_state_dict()
    results["fresh"] = {
        k: v.flatten().tolist() for k, v in results["fresh"].items() if "later" in k
    }
    empty = collate([[] for _ in range(ROWS // engine.world)], length=LENGTH, pad=0)
    results["empty"] = {
        task: output.loss_sum.item() for task, output in engine.evaluate(empty).items()
    }
    last = engine.rank == engine.world - 1
    asked = engine.step(
        share(9, engine.rank, engine.world, engine.micro_rows, ROWS), LR, 9, stop=last
    )
    results["stop"] = asked.stop
    results["tokens"] = asked.tokens
    results["names"] = sorted(engine.full_state_dict())
    results["keys"] = sorted(engine._engine.module.state_dict())
    return results
