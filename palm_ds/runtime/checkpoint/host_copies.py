"""Copies of shards in host memory, which are written while training changes the shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from palm_ds.runtime.checkpoint.shard_files import ParamShard

_CHUNK_VALUES = 64 << 20
"""256 MB in fp32. torch rounds page-locked memory up to powers of two: chunks filled almost to
this size waste little."""


class HostCopies:
    """Host memory of one process, reused from one copy to the next. For a GPU it is page-locked, so
    that copies are made in the GPU's order of work and the process does not wait for them."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._copied: torch.Event | None = None

    def copy(self, shards: Sequence[ParamShard]) -> list[ParamShard]:
        """The shards as they are now, in fp32 on the host. They hold their values once `wait` has
        returned, and until the next `copy`."""
        tensors = [tensor for shard in shards for tensor in shard.tensors.values()]
        sizes = [tensor.numel() for tensor in tensors]
        if sizes != [buffer.numel() for buffer in self._buffers]:
            self._buffers.clear()  # before there are new ones
            self._buffers = _allocate(sizes, pinned=self._device.type != "cpu")
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor.detach(), non_blocking=True)
        self._copied = _mark(self._device)
        buffers = iter(self._buffers)
        return [replace(s, tensors={kind: next(buffers) for kind in s.tensors}) for s in shards]

    def wait(self) -> None:
        """Wait until the last copies are complete; in any thread."""
        if self._copied is not None:
            self._copied.synchronize()


def bytes_of(shards: Iterable[ParamShard]) -> int:
    """The size of a copy of the shards."""
    return sum(4 * tensor.numel() for shard in shards for tensor in shard.tensors.values())


def _mark(device: torch.device) -> torch.Event | None:
    """An event after everything that a GPU has been asked to do so far."""
    if device.type == "cpu":
        return None
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def _allocate(sizes: Sequence[int], *, pinned: bool) -> list[torch.Tensor]:
    buffers: list[torch.Tensor] = []
    for group in _groups(sizes):
        chunk = torch.empty(sum(group), dtype=torch.float32, pin_memory=pinned)
        buffers += chunk.split(group)
    return buffers


def _groups(sizes: Iterable[int]) -> Iterator[list[int]]:
    """Sizes in order, in groups that fill a chunk; one that is larger than a chunk stays alone."""
    group: list[int] = []
    for size in sizes:
        if group and sum(group) + size > _CHUNK_VALUES:
            yield group
            group = []
        group.append(size)
    if group:
        yield group
