"""Copies a step's micro-batches to the device while it computes.

    host      copy 0 | copy 1, run 0        | copy 2, run 1        | run 2
    side      [copy 0] [copy 1]               [copy 2]
    compute            [------ run 0 ------]  [------ run 1 ------]  [-- run 2 --]

The copies have a CUDA stream of their own, so they do not queue behind what the device computes.
The host memory must be pinned, or the host waits for each. On a CPU a batch stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

B = TypeVar("B", bound="Copyable")


class Copyable(Protocol):
    """A batch of tensors."""

    def to(self: B, device: torch.device) -> B: ...

    def map(self: B, change: Callable[[torch.Tensor], torch.Tensor]) -> B: ...


@dataclass
class CopyAhead:
    """Copies batches to a device. `cuda` has the interface of torch.cuda."""

    device: torch.device
    cuda: Any = torch.cuda
    _side: torch.cuda.Stream | None = field(default=None, repr=False)

    def copied(self, batches: Iterable[B]) -> Iterator[B]:
        """The batches on the device. The copy of the next one starts before each is handed out."""
        if self.device.type != "cuda":
            yield from (batch.to(self.device) for batch in batches)
            return
        started = None
        for batch in batches:
            following = self._start(batch)
            if started:
                yield self._arrived(*started)
            started = following
        if started:
            yield self._arrived(*started)

    def _start(self, batch: B) -> tuple[B, torch.Event]:
        """The batch as it will be, and the event that says so."""
        side = self._side = self._side or self.cuda.Stream(self.device)
        with self.cuda.stream(side):
            batch = batch.to(self.device)
            return batch, side.record_event()

    def _arrived(self, batch: B, copied: torch.Event) -> B:
        """The batch for the current stream, which waits for it on the device. Its memory is the
        side stream's: it may be used again once the current stream has passed this place."""
        stream = self.cuda.current_stream(self.device)
        stream.wait_event(copied)

        def used(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        return batch.map(used)
