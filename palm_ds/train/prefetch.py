"""Micro-batches made ahead of the step that trains on them, by worker processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from palm_ds.engine import Engine
from palm_ds.model.batch import Batch
from palm_ds.train.build import AnyStream


def prefetched(
    stream: AnyStream, engine: Engine, steps: range, workers: int
) -> Iterator[list[Batch]]:
    """This process's micro-batches of each step; `workers` processes make them ahead."""
    dataset = _StepBatches(stream, engine.rank, engine.world, engine.micro_rows)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        collate_fn=_as_it_is,
        pin_memory=False,
        worker_init_fn=_leave_signals,
    )
    return iter(loader)


@dataclass
class _StepBatches(torch.utils.data.Dataset):
    stream: AnyStream
    rank: int
    world: int
    micro_rows: int

    def __getitem__(self, step: int) -> list[Batch]:
        return self.stream.batches(step, self.rank, self.world, self.micro_rows)


def _leave_signals(_worker: int) -> None:
    """Launchers signal every process of a run; the training process still needs this one for the
    step after which it saves, and ends it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _as_it_is(batches: list[Batch]) -> list[Batch]:
    return batches
