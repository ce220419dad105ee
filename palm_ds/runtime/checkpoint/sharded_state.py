"""This process's shards of weights and optimizer state, addressed by parameter name and offset.

    shard   a run of values of one flattened parameter, with the optimizer's moments (AdamW's: the
            running means of the gradient and of its square) and, if there is one, the running
            average of the weights; all are views, so reading and writing work alike

ZeRO 1 and 2 concatenate the parameters of a group and cut them into one range per process; ZeRO 3
cuts each parameter; under ZeRO 0 every process has all parameters and the processes share the
writing. A frozen parameter has weights only, of which each process keeps a part in fp32. A
parameter that has not been updated yet has no moments. Shards that ZeRO 3 keeps in files
(swapped_state.py) are read one group at a time.

shard_files.py reads and writes them.

`torch.distributed.checkpoint` and DeepSpeed's universal checkpoints were considered: neither can
load a resized table, and neither guarantees a bit-identical run under another ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.runtime.checkpoint.shard_files import (
    AVERAGE,
    WEIGHT,
    ParamShard,
    ResizedTable,
    ShardReader,
)
from palm_ds.runtime.optimizer.state import (
    ADAM,
    FlatLayout,
    NeedsLayouts,
    OptimizerStateSpec,
    Param,
    Piece,
)
from palm_ds.runtime.optimizer.wrappers import EMA
from palm_ds.runtime.zero.swapped_state import forget_moments, in_memory, is_swapped


class _Place(NamedTuple):
    """Place of a parameter's values on this process."""

    start: int  # the first of the parameter's values here
    tensor: torch.Tensor  # the tensor that the optimizer updates
    inside: slice  # where in it

    def __len__(self) -> int:
        return self.inside.stop - self.inside.start


@dataclass(frozen=True)
class FrozenShard:
    """A process's part of a frozen parameter: the values [start, start + len(values)) in fp32 on
    the CPU. The model itself may hold rounded ones."""

    start: int
    values: torch.Tensor


def frozen_shards(model: nn.Module, rank: int, world: int) -> dict[str, FrozenShard]:
    """This process's part of every parameter that needs no gradient. Call it before anything rounds
    or partitions them."""
    shards = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            start, end = _partition_range(parameter.numel(), rank, world)
            values = parameter.detach().view(-1)[start:end]
            shards[name] = FrozenShard(start, values.to("cpu", torch.float32, copy=True))
    return shards


def _partition_range(size: int, rank: int, world: int) -> tuple[int, int]:
    """A process's range as ZeRO 3 cuts a parameter: equal parts, the last ones shorter or empty."""
    part = -(-size // world)
    return min(rank * part, size), min((rank + 1) * part, size)


@dataclass(frozen=True, kw_only=True)
class LocalShards:
    """This rank's shards of parameters and optimizer state, addressed by name and offset. `zero` is
    DeepSpeed's ZeRO optimizer (None under ZeRO 0), `base` the one that computes the update."""

    parameters: Mapping[str, nn.Parameter]
    base: torch.optim.Optimizer
    zero: Any
    stage: int
    rank: int
    world: int
    frozen: Mapping[str, FrozenShard] = field(default_factory=dict)
    """This process's parts of the frozen parameters."""

    @property
    def state_spec(self) -> OptimizerStateSpec:
        """The optimizer's per-tensor state."""
        return getattr(self.base, "state_spec", ADAM)

    @property
    def swapped(self) -> bool:
        """Whether there are shards in files."""
        return any(is_swapped(self.zero, tensor) for tensor, _ in self._groups())

    def state_spec_of(self, name: str) -> OptimizerStateSpec:
        """The state of one parameter, which may be another."""
        specs: Mapping[str, OptimizerStateSpec] = getattr(self.base, "state_specs", {})
        return specs.get(name, self.state_spec)

    def shards(self, update_counts: Mapping[str, int] | None = None) -> Iterator[ParamShard]:
        """Every shard on this process; under ZeRO 0 that is every parameter. With `update_counts`,
        first creates the moments that each parameter has after that many updates (none after 0),
        for the caller to fill before it takes the next shard."""
        filled = update_counts is not None
        for name in self.frozen:
            if len(self.frozen[name].values):
                yield self._frozen_shard(name)
        for tensor, names in self._groups():
            copied = not filled and is_swapped(self.zero, tensor)
            with in_memory(self.zero, tensor, write=filled):
                for name in names:
                    if place := self._place_of(name):
                        if update_counts is not None:
                            self._init_state(name, place.tensor, update_counts.get(name, 0))
                        shard = self._shard(name, place)
                        yield _copy_of(shard) if copied else shard

    def update_counts(self) -> dict[str, int]:
        """{parameter of which this process has values: number of its updates}, which the bias
        correction of its moments needs."""
        counts = {name: 0 for name, part in self.frozen.items() if len(part.values)}
        for name in self.parameters:
            if name not in self.frozen and (place := self._place_of(name)):
                counts[name] = int(self._entry(place.tensor)["step"])
        return counts

    def _groups(self) -> Iterator[tuple[torch.Tensor | None, list[str]]]:
        """The tensors that ZeRO 3 updates one after another, each with the parameters in it;
        elsewhere all parameters in one group."""
        if self.stage < 3:
            yield None, [name for name in self.parameters if name not in self.frozen]
            return
        names = {parameter: name for name, parameter in self.parameters.items()}
        tensors, groups = self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups
        for tensor, group in zip(tensors, groups, strict=True):
            yield tensor, [names[parameter] for parameter in group]

    def _place_of(self, name: str) -> _Place | None:
        """Place of a parameter's values on this process; None if it has none."""
        by_stage = (self._whole, self._fragment, self._fragment, self._partition)
        return by_stage[self.stage](self.parameters[name]) or None

    def shards_to_write(self) -> Iterator[ParamShard]:
        """The shards that this process writes; together, the processes write each value once."""
        own = set(list(self.parameters)[self.rank :: self.world])
        for shard in self.shards():
            if self.stage or shard.name in self.frozen or shard.name in own:
                yield shard

    def _frozen_shard(self, name: str) -> ParamShard:
        part = self.frozen[name]
        return ParamShard(name, part.start, {WEIGHT: part.values}, {"step": 0})

    def _whole(self, parameter: nn.Parameter) -> _Place:
        return _Place(0, parameter, slice(0, parameter.numel()))

    def _fragment(self, parameter: Any) -> _Place | None:
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        flat = self.base.param_groups[mapping.param_group_index]["params"][0]
        address = mapping.hp_fragment_address
        inside = slice(address.start, address.start + address.numel)
        return _Place(mapping.lp_fragment_address.start, flat, inside)

    def _partition(self, parameter: Any) -> _Place:
        group, first, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
        flat = self.zero.fp32_partitioned_groups_flat[group]
        start = self.rank * size
        inside = slice(first, first + max(min(size, parameter.ds_numel - start), 0))
        return _Place(start, flat, inside)

    def _shard(self, name: str, place: _Place) -> ParamShard:
        key = place.tensor
        state = self._entry(key)
        tensors: dict[str, torch.Tensor] = {WEIGHT: key.data}
        tensors |= {k: state[k] for k in self.state_spec_of(name).moments if k in state}
        if isinstance(self.base, EMA) and self.base.ema:
            tensors[AVERAGE] = self.base.ema_of(key)
        views = {k: t.view(-1)[place.inside] for k, t in tensors.items()}
        return ParamShard(name, place.start, views, state)

    def _entry(self, key: torch.Tensor) -> dict[str, Any]:
        """The optimizer's state of a tensor."""
        return self.base.state.get(key) or {"step": 0}

    def _init_state(self, name: str, key: torch.Tensor, update_count: int) -> None:
        if not update_count:
            self.base.state.pop(key, None)
            forget_moments(self.zero, key)
        elif not self.base.state.get(key):
            defaults = self.base.defaults
            on_device = defaults.get("fused") or defaults.get("capturable")
            spec = self.state_spec_of(name)
            self.base.state[key] = spec.entry(key, key.device if on_device else "cpu")

    def layouts(self) -> dict[torch.Tensor, FlatLayout]:
        """Layouts of the parameters in ZeRO's flat tensors."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        tensors, groups, place_of = (
            (self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, self._partition)
            if self.stage == 3
            else (self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, self._fragment)
        )
        layouts = {}
        for tensor, group in zip(tensors, groups, strict=True):
            shapes = [p.ds_shape if self.stage == 3 else p.shape for p in group]
            params = tuple(Param(names[p], shape) for p, shape in zip(group, shapes, strict=True))
            places = [(number, place_of(p)) for number, p in enumerate(group)]
            pieces = [Piece(n, place.start, place.inside) for n, place in places if place]
            layouts[tensor] = FlatLayout(params=params, pieces=tuple(filter(len, pieces)))
        return layouts

    def update_model_weights(self) -> None:
        """Copy the fp32 weights to those the model computes with. All processes take part."""
        if self.stage in (1, 2):
            self.zero.update_lp_params()
        elif self.stage == 3:
            persistent = self.zero.persistent_parameters
            if persistent:
                persistent[0].partition(persistent)
            for group, tensor in enumerate(self.zero.fp32_partitioned_groups_flat):
                with in_memory(self.zero, tensor):
                    self.zero._reassign_or_swap_out_partitioned_parameters(group)
            self.zero.checkpoint_event_epilogue()  # gathers the persistent parameters

    @contextmanager
    def ema_swapped(self) -> Iterator[None]:
        """A context in which the weights are swapped with their running averages. Both return bit
        for bit. All processes take part."""
        self._swap_ema()
        try:
            yield
        finally:
            self._swap_ema()

    def _swap_ema(self) -> None:
        assert isinstance(self.base, EMA)
        for weight, average in self.base.averages.items():
            with in_memory(self.zero, weight, write=True):
                before = weight.detach().clone()
                weight.data.copy_(average)
                average.copy_(before)
        self.update_model_weights()

    def set_frozen(self, name: str, read: Callable[[int, int], torch.Tensor]) -> None:
        """Set a frozen parameter of the model to the values that `read(start, end)` returns."""
        parameter: Any = self.parameters[name]
        if self.stage < 3:
            parameter.data.copy_(read(0, parameter.numel()).view(parameter.shape))
            return
        assert parameter.ds_tensor.is_floating_point(), "quantized weights cannot be set"
        start, end = _partition_range(parameter.ds_numel, self.rank, self.world)
        parameter.ds_tensor.data.view(-1)[: end - start].copy_(read(start, end))

    def full_frozen(self, name: str, device: torch.device) -> torch.Tensor:
        """A whole frozen parameter in fp32, as before rounding. All processes take part."""
        return self._whole_of(name, self.frozen[name].values, device)

    def full_partitioned(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Under ZeRO 3, each parameter that is not frozen, whole and in fp32. All processes take
        part."""
        for tensor, names in self._groups():
            with in_memory(self.zero, tensor):
                for name in names:
                    place = self._partition(self.parameters[name])
                    values = place.tensor.detach()[place.inside]
                    yield name, self._whole_of(name, values, device)

    def _whole_of(self, name: str, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A parameter from the parts of all processes, cut as ZeRO 3 does."""
        parameter: Any = self.parameters[name]
        shape = parameter.ds_shape if self.stage == 3 else parameter.shape
        if self.world > 1:
            _, size = _partition_range(shape.numel(), 0, self.world)  # the first is the longest
            own = torch.zeros(size, device=device)
            own[: len(values)] = values
            parts = [torch.empty_like(own) for _ in range(self.world)]
            dist.all_gather(parts, own)
            values = torch.cat(parts)[: shape.numel()]
        return values.view(shape)


def _copy_of(shard: ParamShard) -> ParamShard:
    """A shard that stays what it is when its group returns to its files."""
    return replace(shard, tensors={kind: tensor.clone() for kind, tensor in shard.tensors.items()})


def set_layouts(local: LocalShards, device: torch.device) -> None:
    """Tell an optimizer that needs whole parameters where ZeRO put them. `device`: of the process
    group's tensors. All processes take part."""
    if not local.stage or not isinstance(local.base, NeedsLayouts):
        return

    def all_reduce(values: torch.Tensor) -> torch.Tensor:
        summed = values.to(device)  # the host has another one with offloaded optimizer state
        dist.all_reduce(summed)
        return summed.to(values.device)

    local.base.set_layouts(local.layouts(), all_reduce if local.world > 1 else None)


def restore(
    local: LocalShards,
    stored: ShardReader,
    update_counts: Mapping[str, int],
    *,
    resized: Mapping[str, ResizedTable] | None = None,
    fresh: Iterable[str] = (),
) -> None:
    """Load stored weights, moments and averages into this process's shards, except for `fresh`
    parameters, which stay as they are. All processes take part. Raises UserError if a parameter or
    one of its moments was not stored."""
    skipped = set(fresh)
    _check_stored(local, stored, update_counts, skipped)
    if resized and not local.state_spec.from_zero:
        raise UserError(
            f"extend: {', '.join(resized)} has other rows than before, and the optimizer's state "
            "for new rows does not start at 0; use adamw, or do not resize"
        )

    def read(name: str, kind: str, start: int, end: int) -> torch.Tensor:
        table = (resized or {}).get(name)
        place = (name, kind, start, end)
        return table.read(stored, *place) if table else stored.read(*place)

    counts = {name: n for name, n in update_counts.items() if name not in skipped}
    for shard in local.shards(counts):
        if shard.name not in skipped:
            for kind, tensor in shard.tensors.items():
                end = shard.start + len(shard)
                tensor.copy_(read(shard.name, kind, shard.start, end))
            _set_step(shard.state, update_counts[shard.name])
    for name in local.frozen:
        if name not in skipped:
            local.set_frozen(name, partial(read, name, WEIGHT))
    local.update_model_weights()


def _check_stored(
    local: LocalShards,
    stored: ShardReader,
    update_counts: Mapping[str, int],
    skipped: Collection[str],
) -> None:
    for name in local.parameters:
        if name in skipped:
            continue
        if name not in stored:
            raise UserError(f"the checkpoint has no parameter {name!r}")
        missing = local.state_spec_of(name).moments.keys() - stored.moments(name)
        if missing and update_counts[name] and name not in local.frozen:
            raise UserError(
                f"the checkpoint has no {min(missing)!r} of {name}: another optimizer trained it"
            )


def _set_step(state: dict[str, Any], step: int) -> None:
    if torch.is_tensor(state["step"]):
        state["step"].fill_(step)
    else:
        state["step"] = step
