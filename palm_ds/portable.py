"""Weights and moments by the parameter's name: what a checkpoint keeps of them.

    stretch   a run of one parameter's values (flattened), with the optimizer's running means of the
              gradient and of its square beside it; views, so that reading and writing are the same

ZeRO 1 and 2 cut the parameters of a group, laid end to end, into one range a process; ZeRO 3 cuts
each parameter; under ZeRO 0 everybody has all, and the writing is shared out. A stretch says which
values of which parameter it holds, so a file of stretches can be read by any number of processes
under any ZeRO stage, and by a model that has grown.

Files are safetensors; `KIND/START/NAME` is the key of a tensor. Nothing here is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from palm_ds.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weight", *MOMENTS)
_FILE_BYTES = 1 << 30
"""A process writes files of about this size: it needs so much more memory while it saves."""


@dataclass(frozen=True)
class Stretch:
    """Values [start, start + length) of a parameter, as they lie in this process's memory."""

    name: str
    start: int
    tensors: Mapping[str, torch.Tensor]  # of each of KINDS, (length,) fp32
    state: dict[str, Any] = field(compare=False)  # the optimizer's entry that the moments are in

    def __len__(self) -> int:
        return len(self.tensors["weight"])


@dataclass(frozen=True, kw_only=True)
class Held:
    """The optimizer states of this process, seen as stretches. `zero` is DeepSpeed's ZeRO
    optimizer (none under ZeRO 0), `base` the one that computes the update."""

    parameters: Mapping[str, nn.Parameter]
    base: torch.optim.Optimizer
    zero: Any
    stage: int
    rank: int
    world: int

    def stretches(self) -> Iterator[Stretch]:
        """Every stretch this process holds; under ZeRO 0 that is every parameter."""
        of = {0: self._whole, 1: self._fragment, 2: self._fragment, 3: self._partition}[self.stage]
        for name, parameter in self.parameters.items():
            stretch = of(name, parameter)
            if stretch is not None and len(stretch):
                yield stretch

    def written(self) -> Iterator[Stretch]:
        """Every stretch this process is to write: together the processes write each value once."""
        for number, stretch in enumerate(self.stretches()):
            if self.stage or number % self.world == self.rank:
                yield stretch

    def _whole(self, name: str, parameter: nn.Parameter) -> Stretch:
        return _stretch(name, 0, parameter.data.view(-1), self._state(parameter), slice(None))

    def _fragment(self, name: str, parameter: Any) -> Stretch | None:
        place = parameter._hp_mapping
        if place is None:
            return None
        flat = self.base.param_groups[place.param_group_index]["params"][0]
        here = place.hp_fragment_address
        inside = slice(here.start, here.start + here.numel)
        state = self._state(flat)
        return _stretch(name, place.lp_fragment_address.start, flat.data[inside], state, inside)

    def _partition(self, name: str, parameter: Any) -> Stretch:
        group, first, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
        flat = self.zero.fp32_partitioned_groups_flat[group]
        start = self.rank * size
        inside = slice(first, first + max(min(size, parameter.ds_numel - start), 0))
        return _stretch(name, start, flat.data[inside], self._state(flat), inside)

    def _state(self, key: torch.Tensor) -> dict[str, Any]:
        """The optimizer's entry of a tensor; as it begins where there is none yet."""
        state = self.base.state[key]
        if not state:
            on = key.device if self.base.defaults.get("fused") else "cpu"
            counts = isinstance(self.base, (torch.optim.AdamW, torch.optim.Adam))
            state["step"] = torch.zeros((), device=on) if counts else 0
            state.update({kind: torch.zeros_like(key, requires_grad=False) for kind in MOMENTS})
        return state

    def share(self) -> None:
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


def _stretch(
    name: str, start: int, weight: torch.Tensor, state: dict[str, Any], inside: slice
) -> Stretch:
    moments = {kind: state[kind].view(-1)[inside] for kind in MOMENTS}
    return Stretch(name, start, {"weight": weight, **moments}, state)


def steps_of(stretches: Iterable[Stretch]) -> dict[str, int]:
    """{parameter: how many updates it has had}, which corrects the moments for their start at 0."""
    return {stretch.name: int(stretch.state["step"]) for stretch in stretches}


# ---- files ----


def write_stretches(
    stretches: Iterable[Stretch], prefix: str, write: Callable[[str, Callable[[Path], None]], None]
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

    for stretch in stretches:
        for kind, tensor in stretch.tensors.items():
            copy = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
            batch[f"{kind}/{stretch.start}/{stretch.name}"] = copy
            size += copy.numel() * 4
        if size >= _FILE_BYTES:
            flush()
    if batch:
        flush()


class Stored:
    """The stretches in a checkpoint's files, whoever wrote them. Values are read when asked for."""

    def __init__(self, files: Sequence[Path]):
        self._files = [safe_open(str(path), framework="pt") for path in files]
        self._found: dict[str, list[tuple[int, int, int]]] = {}
        for number, file in enumerate(self._files):
            for key in file.keys():  # noqa: SIM118 - not a dict
                kind, start, name = key.split("/", 2)
                if kind == "weight":
                    size = file.get_slice(key).get_shape()[0]
                    place = (int(start), int(start) + size, number)
                    self._found.setdefault(name, []).append(place)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def names(self) -> list[str]:
        """The parameters that are there, sorted."""
        return sorted(self._found)

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
        """(end - start,) values [start, end) of a parameter, or of one of its moments."""
        out = torch.empty(end - start, dtype=torch.float32)
        filled = 0
        for first, last, number in self._found[name]:
            low, high = max(first, start), min(last, end)
            if low < high:
                part = self._files[number].get_slice(f"{kind}/{first}/{name}")
                out[low - start : high - start] = part[low - first : high - first]
                filled += high - low
        assert filled == end - start, f"{name}: {filled} of {end - start} values"
        return out


@dataclass(frozen=True, kw_only=True)
class Grown:
    """A table that has other rows than when it was stored: row i is the stored row `rows[i]`,
    or, where that is -1, the row of `first` with fresh moments."""

    rows: tuple[int, ...]
    first: torch.Tensor

    def read(self, stored: Stored, name: str, kind: str, start: int, end: int) -> torch.Tensor:
        width = self.first.shape[1]
        whole = self.first.float().clone() if kind == "weight" else torch.zeros_like(self.first)
        for row, old in enumerate(self.rows):
            if old >= 0:
                whole[row] = stored.read(name, kind, old * width, (old + 1) * width)
        return whole.view(-1)[start:end]


def restore(
    held: Held,
    stored: Stored,
    steps: Mapping[str, int],
    *,
    grown: Mapping[str, Grown] | None = None,
    fresh: Iterable[str] = (),
) -> None:
    """Put stored weights and moments into this process's stretches. `fresh` parameters are left as
    they are. All processes take part. Raises UserError where a parameter was not stored."""
    left = set(fresh)
    for stretch in held.stretches():
        if stretch.name in left:
            continue
        if stretch.name not in stored:
            raise UserError(f"the checkpoint has no parameter {stretch.name!r}")
        reader = (grown or {}).get(stretch.name)
        for kind, tensor in stretch.tensors.items():
            place = (stretch.name, kind, stretch.start, stretch.start + len(stretch))
            values = reader.read(stored, *place) if reader else stored.read(*place)
            tensor.copy_(values)
        _set_step(stretch.state, steps[stretch.name])
    held.share()


def _set_step(state: dict[str, Any], step: int) -> None:
    if torch.is_tensor(state["step"]):
        state["step"].fill_(step)
    else:
        state["step"] = step
