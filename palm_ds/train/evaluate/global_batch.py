"""Held-out losses of heads whose loss is over whole steps.

They are computed over blocks of held-out examples in their order, so that they depend neither on
the processes nor on the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from palm_ds.data.stream.task_group_dataset import BuiltRow
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.step.grad_cache import WholeStepLoss

if TYPE_CHECKING:
    from palm_ds.runtime.processes.processes import Processes

BLOCK = 256
"""Examples of a block."""


class ExampleVectors(NamedTuple):
    """The vectors (n, hidden) and targets (n, ...) of one example."""

    task: str
    dataset: int
    number: int
    vectors: np.ndarray
    targets: np.ndarray


class LossTotals(NamedTuple):
    """Sums over all held-out examples that have a loss."""

    examples: int
    loss: float
    correct: float


def example_vectors(
    tasks: Sequence[str], built: Sequence[BuiltRow], batch: Batch, outputs: Mapping[str, Any]
) -> Iterator[ExampleVectors]:
    """Those of a batch, for tasks whose loss is over whole steps."""
    for task in tasks:
        if task not in batch.labels:
            continue
        vectors, used = outputs[task].scores.float().cpu().numpy(), 0
        targets = batch.labels[task][1].cpu().numpy()
        for ref, example in (each for row in built for each in row):
            if task in example.labels:
                own = slice(used, used + len(example.labels[task][0]))
                used = own.stop
                yield ExampleVectors(task, ref.dataset, ref.number, vectors[own], targets[own])


def whole_step_losses(
    losses: Mapping[str, WholeStepLoss], own: Sequence[ExampleVectors], processes: Processes
) -> dict[str, LossTotals]:
    """{task: sums} of the examples of all processes. Collective."""
    every = sorted(
        (each for part in processes.gather(own) for each in part), key=lambda each: each[:3]
    )
    found = {}
    for task, loss in losses.items():
        examples = [each for each in every if each.task == task]
        blocks = [examples[i : i + BLOCK] for i in range(0, len(examples), BLOCK)]
        totals = [_block(loss, block) for block in blocks]
        if totals:
            found[task] = LossTotals(*map(sum, zip(*totals, strict=True)))
    return found


def _block(loss: WholeStepLoss, examples: Sequence[ExampleVectors]) -> LossTotals:
    counts = torch.tensor([len(each.vectors) for each in examples])
    losses, correct = loss.step_losses(
        torch.from_numpy(np.concatenate([each.vectors for each in examples])),
        torch.from_numpy(np.concatenate([each.targets for each in examples])),
        torch.arange(len(examples)).repeat_interleave(counts),
    )
    return LossTotals(len(losses), float(losses.sum()), float(correct.sum()))
