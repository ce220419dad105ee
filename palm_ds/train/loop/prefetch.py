"""Builds micro-batches ahead of their step, in worker processes, and pins them for GPUs.

The tensors of a step's micro-batches travel in one: a thread of the training process receives them,
and would otherwise ask a worker for each of a dozen, while the step that is being launched waits
for the interpreter.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from palm_ds.engine import Engine
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.setup.build import AnyStream

_ALIGNED = 16  # bytes, which compiled kernels count on


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
        prefetch_factor=2 if workers else None,
        collate_fn=_OneTensor.of,
        pin_memory=engine.device.type == "cuda",
        worker_init_fn=_ignore_signals,
    )
    return (each.batches() for each in loader)


@dataclass
class _StepBatches(torch.utils.data.Dataset):
    stream: AnyStream
    rank: int
    world: int
    ds_config: DSConfig

    def __getitem__(self, step: int) -> list[Batch]:
        stream = self.stream
        shorter = stream.longest // stream.length_at(step)
        rows = stream.rows_at(step)
        micro_rows, _ = self.ds_config.micro_batching(rows, self.world, shorter=shorter)
        return stream.batches(step, self.rank, self.world, micro_rows)


def _ignore_signals(_worker: int) -> None:
    """Launchers signal every process of a run, but the training process still needs its workers
    for the step after which it saves; it ends them itself."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class _TensorPlace:
    """A tensor's place among the bytes of another."""

    inside: slice
    dtype: torch.dtype
    shape: torch.Size

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        return data[self.inside].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _OneTensor:
    """Micro-batches whose tensors lie in one."""

    data: torch.Tensor
    """(bytes,) uint8"""
    made: list[Batch]
    """With a `_TensorPlace` for each tensor."""

    @classmethod
    def of(cls, batches: list[Batch]) -> _OneTensor:
        parts: list[torch.Tensor] = []
        end = 0

        def place(tensor: torch.Tensor) -> Any:
            nonlocal end
            part = tensor.contiguous().view(-1).view(torch.uint8)
            inside = slice(end, end + len(part))
            end += -(-len(part) // _ALIGNED) * _ALIGNED
            parts.extend([part, part.new_empty(end - inside.stop)])
            return _TensorPlace(inside, tensor.dtype, tensor.shape)

        made = [batch.map(place) for batch in batches]
        return cls(torch.cat(parts), made)

    def pin_memory(self) -> _OneTensor:
        return replace(self, data=self.data.pin_memory())

    def batches(self) -> list[Batch]:
        place: Any = lambda each: each.tensor(self.data)  # noqa: E731
        return [batch.map(place) for batch in self.made]
