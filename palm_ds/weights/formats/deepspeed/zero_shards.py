"""DeepSpeed's own shards, any ZeRO stage, as fp32 tensors by name. DeepSpeed is not needed.

    TAG/mp_rank_00_model_states.pt                  the module in its own precision; stages 0 to 2
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3: shapes, partitions of frozen parameters
    TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's fp32 weights and moments

ZeRO 1 and 2 concatenate the parameters of a group and give each rank a range; ZeRO 3 partitions
every parameter over all ranks. Names and shapes are in the model file. Frozen parameters belong to
no group: their values are in the module itself (DeepSpeed's own script misses them at stage 1).

The files are pickles, read with torch's weights-only loader. DeepSpeed's classes in genuine files
are replaced by placeholders that do nothing; any other class is refused by name. Values are
memory-mapped and read on demand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from palm_ds.common.errors import UserError, named_line
from palm_ds.common.messages import printable
from palm_ds.weights.formats.contents import BUFFER, COPY, OPTIMIZER, TensorEntry
from palm_ds.weights.formats.tensor_files import in_memory_entry
from palm_ds.weights.formats.torch_files import check_plain, load_torch

LATEST = "latest"
_MAPPED_BYTES = 256 << 20
"""About how much of the shards a reader keeps in memory."""
GENUINE = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)
"""The classes in DeepSpeed's files, other than tensors and plain values."""
_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""Members of DeepSpeed's ZeroStageEnum. Python 3.11.0 to 3.11.3 pickle one as a call of getattr."""
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_FLAT, _SHARES = "single_partition_of_fp32_groups", "fp32_flat_groups"  # stages 1 and 2; stage 3
_DEEPSPEED_KEYS = set(
    """module buffer_names optimizer param_shapes frozen_param_shapes shared_params
    frozen_param_fragments lr_scheduler data_sampler random_ltd sparse_tensor_module_names
    skipped_steps global_steps global_samples dp_world_size mp_world_size num_experts
    checkpoint_parallel_dimensions ds_config ds_version universal_checkpoint_info
    """.split()  # noqa: SIM905  a wall of quotes reads worse
)


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The tensors of a folder of shards, under the module's names."""

    folder: Path
    stage: int
    entries: Mapping[str, TensorEntry]
    skipped: Mapping[str, str]
    notes: tuple[str, ...] = ()


def tag_folder(path: Path) -> Path | None:
    """The folder of shards: this one, or the one named in its `latest` file."""
    if _named(path, _MODEL):
        return path
    try:
        tag = (path / LATEST).read_bytes()[:200].decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    inside = tag and Path(tag).name == tag and tag not in (".", "..")
    return path / tag if inside and _named(path / tag, _MODEL) else None


def open_shards(folder: Path) -> Shards:
    """Open every parameter of a folder of shards. Raises UserError if a file is missing, damaged,
    or holds anything that genuine files do not.

    Pages read from mapped files count as this process's memory while the files are open, so they
    are reopened after every `_MAPPED_BYTES`."""
    places: _Places = {}
    shards = _opened(folder, places)
    reader = _Reader(shards, places)
    entries = {
        name: replace(entry, read=partial(reader.read, name))
        for name, entry in shards.entries.items()
    }
    return replace(shards, entries=entries)


class _Reader:
    """Reads tensors of mapped shards and releases the pages from time to time."""

    def __init__(self, shards: Shards, places: _Places):
        self.folder, self.places = shards.folder, places
        self._entries: Mapping[str, TensorEntry] = shards.entries
        # Bytes read since the shards were opened; a search for places has read all of them.
        self._mapped = _MAPPED_BYTES if places else 0

    def read(self, name: str) -> torch.Tensor:
        if self._mapped >= _MAPPED_BYTES:
            self._entries, self._mapped = _opened(self.folder, self.places).entries, 0
        if name not in self._entries:
            raise UserError(f"{self.folder}: {name} is gone: the shards changed after opening")
        values = self._entries[name].read()
        self._mapped += values.nbytes
        return values


def _opened(folder: Path, places: _Places) -> Shards:
    """Opens the files. `places` is where unnamed fp32 weights are; filled in if empty."""
    models, optims = _by_rank(folder, _MODEL), _by_rank(folder, _OPTIM)
    if not models:
        raise UserError(f"{folder}: its shards have been deleted")
    model = _load(models[0])
    try:
        if not optims:
            return _stage_0(folder, model, places)
        states = [_load(optims[rank])["optimizer_state_dict"] for rank in sorted(optims)]
        _check_world(folder, model, optims)
        if _SHARES in states[0]:
            _check_ranks(folder, models, len(states))
            others = [_load(models[rank]) for rank in range(1, len(models))]
            return _stage_3(folder, [model, *others], states)
        return _stages_1_and_2(folder, model, states)
    except (
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        ValueError,
        RuntimeError,
    ) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{folder}: does not have the layout of DeepSpeed's shards: {named_line(error)}"
        ) from None


# ---- the files ----


def _named(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir() if pattern.fullmatch(p.name))
    except OSError:
        return []


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    files: dict[int, Path] = {}
    for name in _named(folder, pattern):
        match = pattern.fullmatch(name)
        assert match is not None
        if int(match[2]):
            raise UserError(f"{folder / name}: tensor-parallel shards are not supported")
        files[int(match[1] or 0)] = folder / name
    if files:
        _check_ranks(folder, files, len(files))
    return files


def _check_ranks(folder: Path, files: Mapping[int, Path], world: int) -> None:
    missing = [rank for rank in range(max(world, max(files) + 1)) if rank not in files]
    if missing:
        kind = files[min(files)].name.rsplit("_", 2)[-2]
        raise UserError(f"{folder}: the {kind}_states file of rank {missing[0]} is missing")


def _check_world(folder: Path, model: Mapping[str, Any], optims: Mapping[int, Path]) -> None:
    world = model.get("dp_world_size", len(optims))
    if world != len(optims):
        raise UserError(f"{folder}: saved by {world} ranks, but there are files of {len(optims)}")


class _StandIn:
    """Replaces a DeepSpeed class: accepts any arguments and does nothing."""

    def __init__(self, *_arguments: object, **_named: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _load(path: Path) -> dict[str, Any]:
    # One class each: torch's loader identifies them by the class itself, not by the requested name.
    classes = {name: type("StandIn", (_StandIn,), {}) for name in GENUINE}

    def member(owner: object, name: object) -> _StandIn:
        """Replaces getattr, for the stages of ZeRO only."""
        if owner is not classes["deepspeed.runtime.zero.config.ZeroStageEnum"]:
            raise UserError(f"{path}: asks for an attribute of something not an enum; refused")
        if name not in _STAGES:
            raise UserError(f"{path}: {printable(str(name))[:80]} is not a ZeRO stage; refused")
        return _StandIn()

    # the file says __builtin__, as pickles of protocol 2 do; torch looks it up as builtins
    replaced = {**classes, "__builtin__.getattr": member, "builtins.getattr": member}
    state = load_torch(path, [(stand_in, name) for name, stand_in in replaced.items()])
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds {type(state).__name__}, not DeepSpeed's keys and values")
    return state


# ---- the stages ----


def _stage_0(folder: Path, model: Mapping[str, Any], places: _Places) -> Shards:
    """Everything is in one file; in a half-precision run its fp32 weights have no names."""
    model = {**model, "shared_params": model.get("shared_params") or _aliases(model["module"])}
    parameters = _parameters(model)
    lines = _masters(model.get("optimizer"))
    if not places:
        places.update(_matched(lines, parameters))
    tensors = {name: lines[line][start:end] for name, (line, start, end) in places.items()}
    entries = {
        name: _entry(name, [tensors.get(name, tensor)], tensor.shape)
        for name, tensor in parameters.items()
    }
    half = [
        n
        for n, parameter in parameters.items()
        if parameter.dtype != torch.float32 and n not in tensors
    ]
    notes = [f"{len(half)} parameters in half precision: the shards have no fp32 weights for them"]
    return _shards(folder, 0, entries, model, notes if half else [])


def _stages_1_and_2(folder: Path, model: Mapping[str, Any], states: Sequence[Any]) -> Shards:
    entries: dict[str, TensorEntry] = {}
    for number, shapes in enumerate(model["param_shapes"]):
        line = [_tensor(state[_FLAT][number]).view(-1) for state in states]
        offset = 0
        for name, shape in shapes.items():
            entries[name] = _entry(name, _range(line, offset, prod(shape)), shape)
            offset += prod(shape)
        _check_size(folder, sum(map(len, line)), offset, len(states))
    entries |= {  # frozen ones
        name: in_memory_entry(name, tensor)
        for name, tensor in _parameters(model).items()
        if name not in entries
    }
    stage = (model.get("ds_config") or {}).get("zero_optimization", {}).get("stage", 1)
    return _shards(folder, stage, entries, model)


def _stage_3(folder: Path, models: Sequence[Any], states: Sequence[Any]) -> Shards:
    # Each rank's groups, concatenated: one line of its partitions of all parameters.
    lines = [[_tensor(x).view(-1) for x in state[_SHARES]] for state in states]
    entries: dict[str, TensorEntry] = {}
    offset, world = 0, len(states)
    for shapes in models[0]["param_shapes"]:
        for name, shape in shapes.items():
            share = -(-prod(shape) // world)
            pieces = [piece for line in lines for piece in _range(line, offset, share)]
            entries[name] = _entry(name, pieces, shape)
            offset += share
    for line in lines:
        _check_size(folder, sum(map(len, line)), offset, world)
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        pieces = [_tensor(each["frozen_param_fragments"][name]).view(-1) for each in models]
        entries[name] = _entry(name, pieces, shape)
    return _shards(folder, 3, entries, models[0])


def _shards(
    folder: Path,
    stage: int,
    entries: dict[str, TensorEntry],
    model: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Shards:
    """The entries in the module's order, and the names that are skipped."""
    shared = model.get("shared_params") or {}
    skipped = {name: COPY + source for name, source in shared.items()}
    skipped |= dict.fromkeys(model.get("buffer_names") or (), BUFFER)
    own = [key for key in model if key not in _DEEPSPEED_KEYS and not key.startswith("rng")]
    skipped |= {key: _client(model[key]) for key in own}
    skipped["optimizer_state_dict"] = OPTIMIZER
    if model.get("lr_scheduler"):
        skipped["lr_scheduler"] = OPTIMIZER
    if strange := [name for name in (*entries, *skipped) if not isinstance(name, str)]:
        raise TypeError(f"a parameter with the name {type(strange[0]).__name__}")
    order = [name for name in model["module"] if name in entries and name not in skipped]
    order += [name for name in entries if name not in order and name not in skipped]
    kept = {name: entries[name] for name in order}
    return Shards(folder=folder, stage=stage, entries=kept, skipped=skipped, notes=tuple(notes))


def _client(value: object) -> str:
    """Reason why a value saved by the training script is skipped; one with tensors counts as
    lost."""
    what = "saved by the training script"
    return f"{what}, contains tensors" if _has_tensor(value) else f"{OPTIMIZER}: {what}"


def _has_tensor(value: object) -> bool:
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            return True
        if isinstance(each, Mapping | list | tuple) and id(each) not in seen:
            seen.add(id(each))  # a small file may hold the same list any number of times
            waiting += each.values() if isinstance(each, Mapping) else each
    return False


def _parameters(model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The module's tensors, without its buffers and the second names of shared ones."""
    without = {*(model.get("buffer_names") or ()), *(model.get("shared_params") or {})}
    return {
        name: _tensor(tensor)
        for name, tensor in model["module"].items()
        if name not in without and tensor is not None
    }


def _aliases(module: Mapping[str, Any]) -> dict[str, str]:
    """{second name of a tensor: its first}: at stage 0, DeepSpeed does not list tied parameters."""
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in module.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if first.setdefault(place, name) != name:
                aliases[name] = first[place]
    return aliases


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"expected a tensor, got {type(value).__name__}")
    check_plain(value, "a tensor")
    return value.detach()


def _range(line: Sequence[torch.Tensor], start: int, size: int) -> list[torch.Tensor]:
    """Views of the values [start, start + size) of concatenated tensors."""
    pieces, offset = [], 0
    for tensor in line:
        low, high = max(start - offset, 0), min(start + size - offset, len(tensor))
        if low < high:
            pieces.append(tensor[low:high])
        offset += len(tensor)
    return pieces


def _check_size(folder: Path, there: int, wanted: int, world: int) -> None:
    """Ranges are padded to a multiple of twice the world size, or not at all."""
    if not wanted <= there <= wanted + 2 * world:
        raise UserError(f"{folder}: has {there:,} fp32 weights, but its shapes need {wanted:,}")


def _entry(name: str, pieces: Sequence[torch.Tensor], shape: Iterable[int]) -> TensorEntry:
    shape = tuple(int(n) for n in shape)
    if sum(piece.numel() for piece in pieces) < prod(shape):
        raise ValueError(f"{name}: fewer values than its shape {shape}")
    how = f"joined from {len(pieces)} ranks" if len(pieces) > 1 else ""
    read = partial(_join, pieces, shape)
    return TensorEntry(source_names=(name,), shape=shape, read=read, transform=how)


def _join(pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.cat([x.reshape(-1) for x in pieces]) if len(pieces) > 1 else pieces[0].reshape(-1)
    return flat[: prod(shape)].view(shape)


# ---- fp32 weights without names ----


_Places = dict[str, tuple[int, int, int]]
"""{name: (the line that has its fp32 weights, where they start in it, where they end)}"""


def _masters(optimizer: object) -> list[torch.Tensor]:
    """Flat fp32 weights, in the order of the optimizer's parameters."""
    if not isinstance(optimizer, Mapping):
        return []
    groups = optimizer.get("fp32_groups") or [optimizer.get("fp32_groups_flat") or ()]
    return [_tensor(x).view(-1) for group in groups for x in group]


def _matched(lines: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> _Places:
    """Finds each parameter's fp32 weights: rounded, they equal the values in the module."""
    waiting, matched = dict(parameters), {}
    for number, line in enumerate(lines):
        offset = 0
        while offset < len(line):
            name = next(
                (n for n, value in waiting.items() if _is_rounded(value, line[offset:])), None
            )
            if name is None:
                break
            size = waiting.pop(name).numel()
            matched[name] = (number, offset, offset + size)
            offset += size
    return matched


def _is_rounded(half: torch.Tensor, line: torch.Tensor) -> bool:
    size = half.numel()
    if size > len(line):
        return False
    flat = half.reshape(-1)
    head = min(size, 8)  # cheap test before comparing all
    return torch.equal(line[:head].to(half.dtype), flat[:head]) and torch.equal(
        line[:size].to(half.dtype), flat
    )
