"""Shards in files: how a checkpoint stores weights, moments and running averages.

Files are safetensors; the key of a tensor is `KIND/START/NAME`, so a file tells which values of
which parameter it holds. Any number of processes can read it under any ZeRO stage, and so can a
model with resized tables. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from palm_ds.common.atomic import follow_umask
from palm_ds.common.errors import UserError

WEIGHT, AVERAGE = "weight", "average"
"""Kinds of values that are not moments."""
MEMORY = "memory"
"""The kind of what slots remember of documents, which is no parameter's."""
_FILE_BYTES = 1 << 30
"""A process writes files of about this size. Saving from a device, without a copy of all shards on
the host, needs this much extra memory."""
_MAPPED_BYTES = 64 << 20
"""A reader keeps about this much of a checkpoint's files in memory."""


@dataclass(frozen=True)
class ParamShard:
    """The values [start, start + length) of a flattened parameter in this process's memory."""

    name: str
    start: int
    tensors: Mapping[str, torch.Tensor]
    """{kind: (length,) fp32}, views of what the optimizer updates"""
    state: dict[str, Any] = field(compare=False)
    """The optimizer's entry that contains the moments."""

    def __len__(self) -> int:
        return len(self.tensors[WEIGHT])


def write_shards(
    shards: Iterable[ParamShard], prefix: str, write: Callable[[str, Callable[[Path], None]], None]
) -> None:
    """Writes shards to files of about 1 GB. Calls `write(name, make)` for each; `make(path)`
    creates the file."""
    batch: dict[str, torch.Tensor] = {}
    size = number = 0

    def flush() -> None:
        nonlocal size, number
        tensors = dict(batch)
        write(f"{prefix}_{number:03}.safetensors", partial(_save, tensors))
        batch.clear()
        size, number = 0, number + 1

    for shard in shards:
        for kind, tensor in shard.tensors.items():
            values = tensor.detach().to("cpu", torch.float32).contiguous()
            batch[f"{kind}/{shard.start}/{shard.name}"] = values
            size += values.numel() * 4
        if size >= _FILE_BYTES:
            flush()
    if batch:
        flush()


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    follow_umask(path)


class ShardReader:
    """Reads the shards in a checkpoint's files on demand, whatever layout wrote them.

    Pages of a memory-mapped file count as this process's memory while the file is open, so files
    are reopened after every `_MAPPED_BYTES`."""

    def __init__(self, files: Sequence[Path]):
        self._paths = tuple(files)
        self._open: dict[int, Any] = {}
        self._mapped = 0  # bytes read since files were last closed
        self._places: dict[str, list[tuple[int, int, int]]] = {}  # (first, end, file) by name
        self._kinds: dict[str, set[str]] = {}
        self._memories: dict[str, int] = {}  # file by name
        for number in range(len(self._paths)):
            file = self._file(number)
            for key in file.keys():  # noqa: SIM118 - not a dict
                kind, start, name = key.split("/", 2)
                if kind == MEMORY:
                    self._memories[name] = number
                    continue
                self._kinds.setdefault(name, set()).add(kind)
                if kind == WEIGHT:
                    size = file.get_slice(key).get_shape()[0]
                    place = (int(start), int(start) + size, number)
                    self._places.setdefault(name, []).append(place)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """The stored parameters, sorted."""
        return sorted(self._places)

    def moments(self, name: str) -> set[str]:
        """The stored moments of a parameter."""
        return self._kinds[name] - {WEIGHT, AVERAGE}

    @property
    def has_averages(self) -> bool:
        """Whether running averages of the weights are stored."""
        return any(AVERAGE in kinds for kinds in self._kinds.values())

    def memories(self) -> dict[str, torch.Tensor]:
        """{name: flat values} of what slots remembered of documents."""
        stored = self._memories.items()
        return {name: self._file(n).get_tensor(f"{MEMORY}/0/{name}") for name, n in stored}

    def size(self, name: str) -> int:
        """The number of values of a parameter."""
        return max(end for _, end, _ in self._places[name])

    def covers(self, name: str) -> bool:
        """Whether every value of a parameter is stored."""
        reached = 0
        for first, end, _ in sorted(self._places[name]):
            if first > reached:
                return False
            reached = max(reached, end)
        return True

    def read(self, name: str, kind: str, start: int, end: int) -> torch.Tensor:
        """The values [start, end) of a parameter, a moment or a running average, (end - start,)
        fp32. An average that was not stored equals the weights."""
        if kind == AVERAGE and kind not in self._kinds[name]:
            kind = WEIGHT
        out = torch.empty(end - start, dtype=torch.float32)
        filled = 0
        for first, last, number in self._places[name]:
            low, high = max(first, start), min(last, end)
            if low < high:
                part = self._file(number).get_slice(f"{kind}/{first}/{name}")
                out[low - start : high - start] = part[low - first : high - first]
                filled += high - low
                self._mapped += (high - low) * 4
        assert filled == end - start, f"{name}: {filled} of {end - start} values"
        return out

    def _file(self, number: int) -> Any:
        if self._mapped >= _MAPPED_BYTES:
            self._open.clear()
            self._mapped = 0
        if number not in self._open:
            try:
                self._open[number] = safe_open(str(self._paths[number]), framework="pt")
            except FileNotFoundError:  # a run that is still training deletes old checkpoints
                raise UserError(
                    f"{self._paths[number]}: was deleted while it was being read; use a newer one"
                ) from None
        return self._open[number]


@dataclass(frozen=True, kw_only=True)
class ResizedTable:
    """A table whose rows differ from the stored ones: row i is the stored row `rows[i]`, or, if
    that is -1, row i of `first` with new moments."""

    rows: tuple[int, ...]
    first: torch.Tensor

    def read(self, stored: ShardReader, name: str, kind: str, start: int, end: int) -> torch.Tensor:
        width = self.first.shape[1]
        first = self.first.float()
        table = first.clone() if kind in (WEIGHT, AVERAGE) else torch.zeros_like(first)
        for row, old in enumerate(self.rows):
            if old >= 0:
                table[row] = stored.read(name, kind, old * width, (old + 1) * width)
        return table.view(-1)[start:end]
