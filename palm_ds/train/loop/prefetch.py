"""Builds micro-batches ahead of their step, in worker processes, and pins them for GPUs.

A worker hands over the error for which it could not build some: torch would put its traceback into
the message.
"""

from __future__ import annotations

import atexit
import signal
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.engine import Engine
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.setup.build import AnyStream

_CONTEXT = "fork" if sys.platform == "linux" else None
"""How workers start. Python 3.14's own choice on Linux would give each a copy of the tables, by
pickle; forked, they share the memory of the training process."""
_Built: TypeAlias = list[Batch] | UserError | TemporaryError
"""What a worker makes of a step: micro-batches, or why there are none."""


def prefetched(
    stream: AnyStream, engine: Engine, steps: range, workers: int
) -> Iterator[list[Batch]]:
    """This process's micro-batches of each step, built ahead by `workers` processes."""
    dataset = _StepBatches(stream, engine.rank, engine.world, engine.ds_config)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        multiprocessing_context=_CONTEXT if workers else None,
        prefetch_factor=2 if workers else None,
        collate_fn=_identity,
        pin_memory=engine.device.type == "cuda",
        worker_init_fn=_ignore_signals,
    )
    built = iter(loader)
    atexit.register(_end_workers, weakref.ref(built))
    return map(_raised, built)


def _end_workers(iterator: weakref.ReferenceType[Any]) -> None:
    """Before Python does at exit: by SIGTERM, which they ignore, and then it waits for them without
    end."""
    getattr(iterator(), "_shutdown_workers", lambda: None)()


@dataclass
class _StepBatches(torch.utils.data.Dataset):
    stream: AnyStream
    rank: int
    world: int
    ds_config: DSConfig

    def __getitem__(self, step: int) -> _Built:
        try:
            return self._batches(step)
        except (UserError, TemporaryError) as error:
            return error

    def _batches(self, step: int) -> list[Batch]:
        stream = self.stream
        shorter = stream.longest // stream.length_at(step)
        rows = stream.rows_at(step)
        micro_rows, _ = self.ds_config.micro_batching(rows, self.world, shorter=shorter)
        return stream.batches(step, self.rank, self.world, micro_rows)


def _ignore_signals(_worker: int) -> None:
    """Launchers signal every process of a run, but the training process still needs its workers
    for the step after which it saves; it ends them itself."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _identity(built: _Built) -> _Built:
    return built


def _raised(built: _Built) -> list[Batch]:
    if isinstance(built, Exception):
        raise built
    return built
