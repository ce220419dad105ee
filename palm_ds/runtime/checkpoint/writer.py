"""Writes this process's part of checkpoints, in the background if there is memory for a copy.

    start     copies the shards to host memory; a thread writes, syncs and hashes them
    written   whether this process's thread is done
    finish    waits for the threads of all processes, then publishes the checkpoint

Nothing is published before `finish`, so a run that is killed earlier leaves a .partial folder,
which is never loaded. A thread is enough, since writing, syncing and hashing release the
interpreter's lock. It makes no collective calls.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from palm_ds.common.messages import byte_size
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint.checkpoint import FileManifest, SaveRequest
from palm_ds.runtime.checkpoint.shard_files import ParamShard, write_shards
from palm_ds.runtime.device.memory import free_host_memory
from palm_ds.runtime.processes.launchers import host_name
from palm_ds.runtime.processes.process_group import ProcessGroup

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


log = logging.getLogger(__name__)
_MIN_FREE_SHARE = 0.5
"""The part of the free memory that copies leave to others."""
_NICENESS = 10
"""Of the threads: on a CPU, training comes first."""
_CANCEL_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that was published."""

    path: Path
    step: int
    write_seconds: float
    """Until this process had written its part; other processes may have taken longer."""


@dataclass
class _Write:
    """This process's part of a checkpoint that is being written."""

    request: SaveRequest
    rank: int
    files: FileManifest = field(default_factory=FileManifest)
    seconds: float = 0.0
    failure: BaseException | None = None
    """Other than what FileManifest records: a mistake in the program."""

    def run(self, shards: Iterable[ParamShard]) -> None:
        started = time.monotonic()
        folder, prefix = self.request.partial, f"process_{self.rank:05}"
        write_shards(shards, prefix, lambda name, make: self.files.write(folder / name, make))
        self.seconds = time.monotonic() - started


class CheckpointWriter:
    """Writes one checkpoint after the other. All processes make the same calls."""

    def __init__(self, group: ProcessGroup, device: torch.device):
        self._group = group
        self._copies = HostCopies(device)
        self._write: _Write | None = None
        self._thread: threading.Thread | None = None
        self._deletion: threading.Thread | None = None
        self._enough_memory: bool | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint was started and not finished."""
        return self._write is not None

    @property
    def written(self) -> bool:
        """Whether `finish` would not wait for this process."""
        return self.busy and not (self._thread and self._thread.is_alive())

    def start(
        self, request: SaveRequest, shards: Iterable[ParamShard], *, background: bool
    ) -> bool:
        """Write a checkpoint of the shards as they are now, with `background` in a thread. Returns
        whether it is being written in the background; if not, it is written. Raises SaveError."""
        if self.busy:
            raise RuntimeError("finish the last checkpoint first")
        self.wait_for_deletion()
        checkpoint.begin(request, self._group)
        self._write = write = _Write(_frozen(request), self._group.rank)
        if not background:
            write.run(shards)  # one by one, if they are in files
            return False
        mine = list(shards)
        background = self._fits(mine)
        if background:
            copies = self._copies.copy(mine)
            self._thread = _start(self._in_thread, write, copies)
        else:
            write.run(mine)
        return background

    def finish(self) -> SavedCheckpoint:
        """Publish the checkpoint that was started; waits until it is written. Raises SaveError if a
        process could not write it."""
        in_background, write = self._thread is not None, self._join()
        assert write is not None, "nothing was started"
        self._write = None
        if write.failure:
            raise write.failure
        path = checkpoint.publish(write.request, write.files, self._group)
        if self._group.rank == 0:
            self._deletion = _start(checkpoint.delete_set_aside, path.parent)
            if not in_background:
                self.wait_for_deletion()
        return SavedCheckpoint(path=path, step=write.request.step, write_seconds=write.seconds)

    def wait_for_deletion(self) -> None:
        """Wait until older checkpoints are deleted; `finish` begins that in the background."""
        if self._deletion:
            self._deletion.join()
            self._deletion = None

    def cancel(self) -> None:
        """Give up the checkpoint that is being written, without the other processes. After this,
        nothing is written any more (unless the disk hangs)."""
        if self._write:
            self._write.files.error = "cancelled"
            self._join(timeout=_CANCEL_SECONDS)
            self._write = None
        if self._deletion:
            self._deletion.join(_CANCEL_SECONDS)

    def _join(self, timeout: float | None = None) -> _Write | None:
        if self._thread:
            self._thread.join(timeout)
            self._thread = None
        return self._write

    def _in_thread(self, write: _Write, shards: Sequence[ParamShard]) -> None:
        try:
            self._copies.wait()
            write.run(shards)
        except BaseException as error:
            write.failure = error

    def _fits(self, shards: Sequence[ParamShard]) -> bool:
        """Whether all hosts have memory for the copies of their processes. Decided once, with a
        line if it is short."""
        if self._enough_memory is None:
            sizes = self._group.gather((host_name(), bytes_of(shards), free_host_memory()))
            problem = short_memory(sizes)
            if problem and self._group.rank == 0:
                log.warning("training waits while checkpoints are written: %s", problem)
            self._enough_memory = not problem
        return self._enough_memory


def _start(work: Callable[..., None], *arguments: object) -> threading.Thread:
    """A thread that leaves the CPU to training: Linux has a niceness for each thread."""

    def run() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        work(*arguments)

    thread = threading.Thread(target=run, daemon=True, name="checkpoint")
    thread.start()
    return thread


def short_memory(shares: Sequence[tuple[str, int, int]]) -> str:
    """Reason why some host has too little memory for copies of its processes' shards, or nothing.
    `found`: (host, bytes of the copy, bytes free) of each process."""
    for host in dict.fromkeys(host for host, _, _ in shares):
        needed = sum(size for name, size, _ in shares if name == host)
        free = min(free for name, _, free in shares if name == host)
        if needed > free * (1 - _MIN_FREE_SHARE):
            return (
                f"copies of them take {byte_size(needed)} on {host}, which has {byte_size(free)} "
                "of memory free"
            )
    return ""


def _frozen(request: SaveRequest) -> SaveRequest:
    """With the caller's values as they are now: training changes them until they are written."""
    state, engine = json.loads(json.dumps([dict(request.state), dict(request.engine)]))
    return replace(request, state=state, engine=engine)
