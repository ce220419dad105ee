"""Weights and moments by the parameter's name: what a checkpoint keeps of them.

    shard   a run of one parameter's values (flattened), with the optimizer's moments beside it
              (AdamW's: the running means of the gradient and of its square), and the running
              average of the weights where there is one; views, so that reading and writing are the
              same

ZeRO 1 and 2 cut the parameters of a group, laid end to end, into one range a process; ZeRO 3 cuts
each parameter; under ZeRO 0 everybody has all, and the writing is shared out. A frozen parameter
has weights only, and each process keeps a share of them in fp32; one that has not been updated yet
has no moments either. A shard says which
values of which parameter it holds, so a file of shards can be read by any number of processes
under any ZeRO stage, and by a model that has grown.

Files are safetensors; `KIND/START/NAME` is the key of a tensor. Nothing here is pickled.

`torch.distributed.checkpoint` and DeepSpeed's universal checkpoints were considered: neither loads
a table that has grown, and neither promises a bit-identical run under another ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.runtime.check_custom_optimizer import OptimizerStateSpec
from palm_ds.runtime.optimizer import ADAM, EMA

WEIGHT, AVERAGE = "weight", "average"
"""Kinds of values that are no moments."""
_FILE_BYTES = 1 << 30
"""A process writes files of about this size: it needs so much more memory while it saves."""
_MAPPED_BYTES = 64 << 20
"""A reader of a checkpoint has about so much of its files in memory."""


@dataclass(frozen=True)
class ParamShard:
    """Values [start, start + length) of a parameter, as they lie in this process's memory."""

    name: str
    start: int
    tensors: Mapping[str, torch.Tensor]  # by kind, (length,) fp32
    state: dict[str, Any] = field(compare=False)  # the optimizer's entry that the moments are in

    def __len__(self) -> int:
        return len(self.tensors[WEIGHT])


_Place: TypeAlias = tuple[int, torch.Tensor, slice]
"""First value of a parameter that is here, the tensor that the optimizer updates, where in it."""


@dataclass(frozen=True)
class FrozenShard:
    """A process's share of a frozen parameter: values [start, start + len(values)) in fp32, on the
    host. The model itself may hold rounded ones."""

    start: int
    values: torch.Tensor


def frozen_shards(model: nn.Module, rank: int, world: int) -> dict[str, FrozenShard]:
    """Of every parameter that needs no gradient, before anything rounds or cuts it."""
    shares = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            start, end = _share(parameter.numel(), rank, world)
            values = parameter.detach().view(-1)[start:end]
            shares[name] = FrozenShard(start, values.to("cpu", torch.float32, copy=True))
    return shares


def _share(size: int, rank: int, world: int) -> tuple[int, int]:
    """As ZeRO 3 cuts a parameter: equal parts, the last ones shorter or empty."""
    part = -(-size // world)
    return min(rank * part, size), min((rank + 1) * part, size)


@dataclass(frozen=True, kw_only=True)
class LocalShards:
    """What this process holds of the parameters, seen as shards. `zero` is DeepSpeed's ZeRO
    optimizer (none under ZeRO 0), `base` the one that computes the update."""

    parameters: Mapping[str, nn.Parameter]
    base: torch.optim.Optimizer
    zero: Any
    stage: int
    rank: int
    world: int
    frozen: Mapping[str, FrozenShard] = field(default_factory=dict)
    """This process's shares of the parameters that do not train."""

    @property
    def state_spec(self) -> OptimizerStateSpec:
        """What the optimizer keeps of each tensor."""
        return getattr(self.base, "state_spec", ADAM)

    def shards(self, update_counts: Mapping[str, int] | None = None) -> Iterator[ParamShard]:
        """Every shard this process holds; under ZeRO 0 that is every parameter. `update_counts`:
        first create the moments that each parameter has after that many updates (none after 0), for
        the caller to fill."""
        of = {0: self._whole, 1: self._fragment, 2: self._fragment, 3: self._partition}[self.stage]
        for name, parameter in self.parameters.items():
            if name in self.frozen:
                shard = self._frozen_shard(name)
            elif place := of(name, parameter):
                if update_counts is not None:
                    self._init_state(place[1], update_counts.get(name, 0))
                shard = self._shard(name, *place)
            else:
                continue
            if len(shard):
                yield shard

    def shards_to_write(self) -> Iterator[ParamShard]:
        """Every shard this process is to write: together the processes write each value once."""
        mine = set(list(self.parameters)[self.rank :: self.world])
        for shard in self.shards():
            if self.stage or shard.name in self.frozen or shard.name in mine:
                yield shard

    def _frozen_shard(self, name: str) -> ParamShard:
        share = self.frozen[name]
        return ParamShard(name, share.start, {WEIGHT: share.values}, {"step": 0})

    def _whole(self, name: str, parameter: nn.Parameter) -> _Place:
        return 0, parameter, slice(None)

    def _fragment(self, name: str, parameter: Any) -> _Place | None:
        place = parameter._hp_mapping
        if place is None:
            return None
        flat = self.base.param_groups[place.param_group_index]["params"][0]
        here = place.hp_fragment_address
        inside = slice(here.start, here.start + here.numel)
        return place.lp_fragment_address.start, flat, inside

    def _partition(self, name: str, parameter: Any) -> _Place:
        group, first, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
        flat = self.zero.fp32_partitioned_groups_flat[group]
        start = self.rank * size
        inside = slice(first, first + max(min(size, parameter.ds_numel - start), 0))
        return start, flat, inside

    def _shard(self, name: str, start: int, key: torch.Tensor, inside: slice) -> ParamShard:
        """The part `inside` of a tensor that the base optimizer updates."""
        state: dict[str, Any] = self.base.state.get(key) or {"step": 0}
        tensors: dict[str, torch.Tensor] = {WEIGHT: key.data}
        tensors |= {k: state[k] for k in self.state_spec.moments if k in state}
        if isinstance(self.base, EMA) and self.base.ema:
            tensors[AVERAGE] = self.base.ema_of(key)
        return ParamShard(name, start, {k: t.view(-1)[inside] for k, t in tensors.items()}, state)

    def _init_state(self, key: torch.Tensor, steps: int) -> None:
        if not steps:
            self.base.state.pop(key, None)
        elif not self.base.state.get(key):
            defaults = self.base.defaults
            there = defaults.get("fused") or defaults.get("capturable")
            self.base.state[key] = self.state_spec.entry(key, key.device if there else "cpu")

    def update_model_weights(self) -> None:
        """Copy the fp32 weights to those the model computes with. All processes take part."""
        if self.stage in (1, 2):
            self.zero.update_lp_params()
        elif self.stage == 3:
            kept = self.zero.persistent_parameters
            if kept:
                kept[0].partition(kept)
            for group in range(len(self.zero.fp32_partitioned_groups_flat)):
                self.zero._reassign_or_swap_out_partitioned_parameters(group)
            self.zero.checkpoint_event_epilogue()  # gathers what is kept whole everywhere

    def swap_ema(self) -> None:
        """Weights and their running averages change places; a second time, and each is back, bit
        for bit. All processes take part."""
        assert isinstance(self.base, EMA)
        for weight, average in self.base.averages.items():
            before = weight.detach().clone()
            weight.data.copy_(average)
            average.copy_(before)
        self.update_model_weights()

    def set_frozen(self, name: str, read: Callable[[int, int], torch.Tensor]) -> None:
        """Give the model the values of a frozen parameter; `read(start, end)` has them."""
        parameter: Any = self.parameters[name]
        if self.stage < 3:
            parameter.data.copy_(read(0, parameter.numel()).view(parameter.shape))
            return
        assert parameter.ds_tensor.is_floating_point(), "quantised weights cannot be given values"
        start, end = _share(parameter.ds_numel, self.rank, self.world)
        parameter.ds_tensor.data.view(-1)[: end - start].copy_(read(start, end))

    def full_frozen(self, name: str, device: torch.device) -> torch.Tensor:
        """A frozen parameter in fp32, as it was before rounding. All processes take part."""
        parameter: Any = self.parameters[name]
        shape = parameter.ds_shape if self.stage == 3 else parameter.shape
        values = self.frozen[name].values
        if self.world > 1:
            size = _share(shape.numel(), 0, self.world)[1]  # the first share is the longest
            mine = torch.zeros(size, device=device)
            mine[: len(values)] = values
            parts = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(parts, mine)
            values = torch.cat(parts)[: shape.numel()]
        return values.view(shape)


def update_counts(shards: Iterable[ParamShard]) -> dict[str, int]:
    """{parameter: how many updates it has had}, which corrects the moments for their start at 0."""
    return {shard.name: int(shard.state["step"]) for shard in shards}


# ---- files ----


def write_shards(
    shards: Iterable[ParamShard], prefix: str, write: Callable[[str, Callable[[Path], None]], None]
) -> None:
    """Hand every file to `write(name, make)`; `make(path)` makes it."""
    batch: dict[str, torch.Tensor] = {}
    size = number = 0

    def flush() -> None:
        nonlocal size, number
        tensors = dict(batch)
        write(f"{prefix}_{number:03}.safetensors", lambda path: save_file(tensors, path))
        batch.clear()
        size, number = 0, number + 1

    for shard in shards:
        for kind, tensor in shard.tensors.items():
            copy = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
            batch[f"{kind}/{shard.start}/{shard.name}"] = copy
            size += copy.numel() * 4
        if size >= _FILE_BYTES:
            flush()
    if batch:
        flush()


class ShardReader:
    """The shards in a checkpoint's files, whoever wrote them. Values are read when asked for.

    What was read of a mapped file counts as this process's memory while the file is open, so files
    are opened anew after every `_MAPPED_BYTES`."""

    def __init__(self, files: Sequence[Path]):
        self._paths = tuple(files)
        self._open: dict[int, Any] = {}
        self._mapped = 0  # bytes read since files were last closed
        self._found: dict[str, list[tuple[int, int, int]]] = {}
        self._kinds: dict[str, set[str]] = {}
        for number in range(len(self._paths)):
            file = self._file(number)
            for key in file.keys():  # noqa: SIM118 - not a dict
                kind, start, name = key.split("/", 2)
                self._kinds.setdefault(name, set()).add(kind)
                if kind == WEIGHT:
                    size = file.get_slice(key).get_shape()[0]
                    place = (int(start), int(start) + size, number)
                    self._found.setdefault(name, []).append(place)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def names(self) -> list[str]:
        """The parameters that are there, sorted."""
        return sorted(self._found)

    def moments(self, name: str) -> set[str]:
        """What is there of the optimizer's state of a parameter."""
        return self._kinds[name] - {WEIGHT, AVERAGE}

    def size(self, name: str) -> int:
        """How many values a parameter has."""
        return max(last for _, last, _ in self._found[name])

    def covers(self, name: str) -> bool:
        """Whether every value of a parameter is there."""
        reached = 0
        for first, last, _ in sorted(self._found[name]):
            if first > reached:
                return False
            reached = max(reached, last)
        return True

    def read(self, name: str, kind: str, start: int, end: int) -> torch.Tensor:
        """(end - start,) values [start, end) of a parameter, of one of its moments, or of its
        running average; of one that was not kept as it begins: the weights."""
        if kind == AVERAGE and kind not in self._kinds[name]:
            kind = WEIGHT
        out = torch.empty(end - start, dtype=torch.float32)
        filled = 0
        for first, last, number in self._found[name]:
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
            except FileNotFoundError:  # a run that goes on deletes its old checkpoints
                raise UserError(f"{self._paths[number]}: has been deleted meanwhile") from None
        return self._open[number]


@dataclass(frozen=True, kw_only=True)
class ResizedTable:
    """A table that has other rows than when it was stored: row i is the stored row `rows[i]`,
    or, where that is -1, the row of `first` with fresh moments."""

    rows: tuple[int, ...]
    first: torch.Tensor

    def read(self, stored: ShardReader, name: str, kind: str, start: int, end: int) -> torch.Tensor:
        width = self.first.shape[1]
        first = self.first.float()
        whole = first.clone() if kind in (WEIGHT, AVERAGE) else torch.zeros_like(first)
        for row, old in enumerate(self.rows):
            if old >= 0:
                whole[row] = stored.read(name, kind, old * width, (old + 1) * width)
        return whole.view(-1)[start:end]


def restore(
    local: LocalShards,
    stored: ShardReader,
    update_counts: Mapping[str, int],
    *,
    resized: Mapping[str, ResizedTable] | None = None,
    fresh: Iterable[str] = (),
) -> None:
    """Put stored weights, moments and averages into this process's shards. `fresh` parameters
    are left as they are. All processes take part. Raises UserError where a parameter, or a moment
    of it, was not stored."""
    left = set(fresh)
    _check_stored(local, stored, update_counts, left)
    if resized and not local.state_spec.from_zero:
        raise UserError(
            f"extend: {', '.join(resized)} has other rows than before, and the optimizer's state "
            "for new rows does not start at 0"
        )

    def read(name: str, kind: str, start: int, end: int) -> torch.Tensor:
        reader = (resized or {}).get(name)
        place = (name, kind, start, end)
        return reader.read(stored, *place) if reader else stored.read(*place)

    for shard in local.shards({name: n for name, n in update_counts.items() if name not in left}):
        if shard.name not in left:
            for kind, tensor in shard.tensors.items():
                end = shard.start + len(shard)
                tensor.copy_(read(shard.name, kind, shard.start, end))
            _set_step(shard.state, update_counts[shard.name])
    for name in local.frozen:
        if name not in left:
            local.set_frozen(name, partial(read, name, "weight"))
    local.update_model_weights()


def _check_stored(
    local: LocalShards, stored: ShardReader, update_counts: Mapping[str, int], left: Collection[str]
) -> None:
    for name in local.parameters:
        if name in left:
            continue
        if name not in stored:
            raise UserError(f"the checkpoint has no parameter {name!r}")
        lacking = local.state_spec.moments.keys() - stored.moments(name)
        if lacking and update_counts[name] and name not in local.frozen:
            raise UserError(
                f"the checkpoint has no {min(lacking)!r} of {name}: another optimizer trained it"
            )


def _set_step(state: dict[str, Any], step: int) -> None:
    if torch.is_tensor(state["step"]):
        state["step"].fill_(step)
    else:
        state["step"] = step
