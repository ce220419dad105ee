"""The state of a running engine: weights and moments by name, counters; saved and restored,
and its weights whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from palm_ds.runtime.checkpoint import checkpoint, sharded_state
from palm_ds.runtime.checkpoint.checkpoint import Retention
from palm_ds.runtime.checkpoint.shard_files import (
    MEMORY,
    WEIGHT,
    ParamShard,
    ResizedTable,
    ShardReader,
)
from palm_ds.runtime.checkpoint.sharded_state import LocalShards
from palm_ds.runtime.checkpoint.writer import CheckpointWriter, SavedCheckpoint
from palm_ds.runtime.processes.processes import Processes
from palm_ds.runtime.zero.zero_step import read_counters, restore_counters


class StoredMemories(Protocol):
    """Memories that slots have of documents, as `palm_ds.model.inputs.memory.SlotMemories`."""

    def stored(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    def restore(self, stored: Mapping[str, torch.Tensor]) -> None: ...


@dataclass(kw_only=True)
class EngineState:
    """State of an engine in checkpoints. All processes make the same calls."""

    engine: Any
    """DeepSpeed's."""
    optimizer: torch.optim.Optimizer
    """The one that computes the update."""
    frozen: Mapping[str, sharded_state.FrozenShard]
    layout: checkpoint.Layout
    processes: Processes
    memories: StoredMemories
    """What this process's slots remember of documents."""
    averages: bool = False
    """Whether the optimizer keeps running averages of the weights."""
    swapped: bool = False
    """Whether the model holds them now."""
    invalid: tuple[int, ...] = ()
    """Steps of checkpoints that the next save deletes."""

    def __post_init__(self) -> None:
        self.writer = CheckpointWriter(self.processes, self.processes.device)
        sharded_state.set_layouts(self.local(), self.processes.device)

    def local(self) -> sharded_state.LocalShards:
        """This process's shards."""
        return sharded_state.LocalShards(
            parameters=dict(self.engine.module.named_parameters()),
            base=self.optimizer,
            zero=self.engine.optimizer if self.layout.stage else None,
            stage=self.layout.stage,
            rank=self.processes.rank,
            world=self.processes.world,
            frozen=self.frozen,
        )

    def start_save(
        self,
        folder: Path,
        state: Mapping[str, Any],
        *,
        step: int,
        keep: Retention,
        background: bool,
    ) -> bool:
        """Write the state of now, perhaps in the background; returns whether it is."""
        assert not self.swapped, "the model holds the averaged weights"
        local = self.local()
        background = background and not local.swapped  # copies would need the memory that it saves
        request = checkpoint.SaveRequest(
            folder=folder,
            step=step,
            layout=self.layout,
            parameters=local.update_counts(),
            engine=read_counters(self.engine, fp16=self._fp16),
            state=state,
            keep=keep,
            invalid=self.invalid,
        )
        shards = chain(local.shards_to_write(), self._memory_shards())
        return self.writer.start(request, shards, background=background)

    def _memory_shards(self) -> Iterator[ParamShard]:
        for name, values in self.memories.stored():
            yield ParamShard(name, 0, {MEMORY: values}, {})

    def finish_save(self) -> SavedCheckpoint:
        """Publish what was started."""
        saved = self.writer.finish()
        self.invalid = ()
        self.processes.saved(saved.step)
        return saved

    def load(
        self,
        folder: Path,
        *,
        warn: Callable[[str], None],
        at_most: int | None,
        valid: int | None = None,
    ) -> dict[str, Any] | None:
        """Continue from the newest good checkpoint of a folder, up to step `at_most`; its state."""
        assert not self.writer.busy, "a checkpoint is being written: finish_save comes first"
        self.writer.wait_for_deletion()
        newest = checkpoint.latest_good(
            folder, group=self.processes, warn=warn, at_most=at_most, valid=valid
        )
        if newest is None:
            return None
        self.restore(newest)
        return newest.state

    def restore(self, verified: checkpoint.VerifiedCheckpoint) -> None:
        """Continue from a checkpoint."""
        stored = ShardReader(verified.files)
        sharded_state.restore(self.local(), stored, verified.parameters)
        self.memories.restore(stored.memories())
        restore_counters(self.engine, verified.engine, fp16=self._fp16)
        self.invalid = verified.invalid
        self.processes.resumed(verified.step)

    def nonfinite_weights(self) -> list[str]:
        """The parameters with values that are not finite, in fp32. Collective."""
        mine = [
            shard.name
            for shard in self.local().shards()
            if not bool(torch.isfinite(shard.tensors[WEIGHT]).all())
        ]
        return sorted({name for names in self.processes.gather(mine) for name in names})

    def warm_start(
        self,
        verified: checkpoint.VerifiedCheckpoint,
        resized: Mapping[str, ResizedTable],
        fresh: Iterable[str],
    ) -> None:
        """Take the weights and moments of another run."""
        stored, counts = ShardReader(verified.files), verified.parameters
        sharded_state.restore(self.local(), stored, counts, resized=resized, fresh=fresh)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """A context in which the model holds the averaged weights, if there are any."""
        if not self.averages:
            yield
            return
        assert not self.swapped
        with self.local().ema_swapped():
            self.swapped = True
            try:
                yield
            finally:
                self.swapped = False

    def release(self) -> None:
        """Forget the engine; a checkpoint that is being written is given up."""
        self.writer.cancel()
        del self.engine, self.optimizer

    @property
    def _fp16(self) -> bool:
        return self.layout.precision == "fp16"


def full_state_dict(
    model: nn.Module, local: LocalShards, device: torch.device
) -> dict[str, torch.Tensor]:
    """On rank 0, every parameter and persistent buffer on the CPU; an empty dict elsewhere. All
    processes take part, one weight at a time, so `device` holds at most one extra."""
    out = {}
    for name, full in _parameters(local, device):
        if local.rank == 0:
            out[name] = full.detach().to("cpu", torch.float32, copy=True)
    if local.rank:
        return {}
    return {name: out[name] for name in local.parameters} | _buffers(model)


def _parameters(local: LocalShards, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param

    for name in local.frozen:
        yield name, local.full_frozen(name, device)
    if local.stage == 3:
        yield from local.full_partitioned(device)
        return
    for name, parameter in local.parameters.items():
        if name not in local.frozen:
            full = safe_get_full_fp32_param(parameter) if local.stage else parameter
            assert full is not None
            yield name, full


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the persistent buffers, on the CPU."""
    stored = model.state_dict().keys()
    return {n: b.detach().cpu().clone() for n, b in model.named_buffers() if n in stored}
