"""Tensors by name in files of safetensors and of torch, whole or in shards.

    open_tensors(folder)          ──> {name: Entry}, values read one by one when asked for
    write_safetensors(path, ...)  <── one group of tensors at a time: a model is never there whole

No file is unpickled: `.bin` goes through torch's loader of tensors alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.weights.formats.contents import Entry

SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_CODES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
}
_MAPPED_BYTES = 64 << 20
"""A reader of safetensors has about so much of its file in memory."""
_LARGEST_INDEX = 1 << 26  # bytes of a JSON file; the largest genuine ones have a hundredth


# ---- reading ----


def weight_files(folder: Path) -> tuple[str, ...]:
    """Which of the files that hold a model's weights, or list them, are there."""
    names = (SAFETENSORS, f"{SAFETENSORS}.index.json", BIN, f"{BIN}.index.json")
    return tuple(name for name in names if (folder / name).is_file())


def open_tensors(folder: Path) -> dict[str, Entry]:
    """Every tensor of a folder's model.safetensors or pytorch_model.bin."""
    found = weight_files(folder)
    if not found:
        raise UserError(f"{folder}: neither {SAFETENSORS} nor {BIN}")
    name = found[0]
    read = open_safetensors if name.startswith(SAFETENSORS) else open_bin
    if not name.endswith(".index.json"):
        return read(folder / name)
    entries: dict[str, Entry] = {}
    for shard, names in _shards(folder / name).items():
        part = read(folder / shard)
        if lost := sorted(names - part.keys()):
            raise UserError(f"{folder / shard}: has no {lost[0]}, which {name} says is there")
        if twice := sorted(entries.keys() & part.keys()):
            raise UserError(f"{folder / shard}: {twice[0]} stands in another shard already")
        entries |= part
    return entries


def open_safetensors(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file."""
    try:
        file: Any = safe_open(path, "pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {_line(error)}") from None
    reader = _Mapped(path, lambda: safe_open(path, "pt").get_tensor)
    return {
        name: Entry(theirs=(name,), shape=shape, read=partial(reader.read, name))
        for name, shape in shapes.items()
    }


class _Mapped:
    """Tensors of a mapped file, for as long as there are entries that read from it.

    What was read of it counts as this process's memory while the file is open, so it is opened
    anew after every `_MAPPED_BYTES`."""

    def __init__(self, path: Path, open_: Callable[[], Callable[[str], torch.Tensor]]):
        """`open_()` opens the file and gives what reads a tensor of it by name."""
        self.path, self.open = path, open_
        self._get: Callable[[str], torch.Tensor] | None = None
        self._read = 0  # bytes, since the file was opened

    def read(self, name: str) -> torch.Tensor:
        try:
            if self._get is None or self._read >= _MAPPED_BYTES:
                self._get, self._read = None, 0
                self._get = self.open()
            tensor = self._get(name)
        except UserError:
            raise
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise UserError(f"{self.path}: {name} cannot be read: {_line(error)}") from None
        self._read += tensor.nbytes
        return tensor


def open_bin(path: Path) -> dict[str, Entry]:
    """The tensors of one file of torch.save."""
    state = _load_bin(path)
    if not _is_zipped(path):  # in memory, whole
        return {name: held(name, tensor) for name, tensor in state.items()}
    reader = _Mapped(path, lambda: _load_bin(path).__getitem__)
    return {
        name: Entry(theirs=(name,), shape=tuple(tensor.shape), read=partial(reader.read, name))
        for name, tensor in state.items()
    }


def held(name: str, tensor: torch.Tensor) -> Entry:
    """A tensor that is there already."""
    return Entry(theirs=(name,), shape=tuple(tensor.shape), read=tensor.detach)


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zipped(path))
    except Exception as error:  # pickle raises many kinds; all mean that the file is not weights
        raise UserError(f"{path}: cannot be read as tensors alone: {_line(error)}") from None
    if not isinstance(state, dict) or not all(isinstance(x, torch.Tensor) for x in state.values()):
        raise UserError(f"{path}: holds something else than tensors by name")
    return {str(name): tensor.detach() for name, tensor in state.items()}


def _is_zipped(path: Path) -> bool:
    """As since torch 1.6; only those can be mapped."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _shards(index: Path) -> dict[str, set[str]]:
    """{shard: the tensors in it}."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UserError(f"{index}: no weight_map, which says where each tensor is")
    shards: dict[str, set[str]] = {}
    for name, shard in listed.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise UserError(f"{index}: {name}: a shard lies outside the folder: {shard!r}")
        shards.setdefault(shard, set()).add(name)
    if lost := sorted(shard for shard in shards if not (index.parent / shard).is_file()):
        raise UserError(f"{index}: there is no {lost[0]}, which it lists")
    return dict(sorted(shards.items()))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        if path.stat().st_size > _LARGEST_INDEX:
            raise ValueError(f"larger than {_LARGEST_INDEX} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys and values, got {type(content).__name__}")
    return content


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# ---- writing ----


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors that are made together, such as the query, key and value of one of our matrices."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    """Of each of them."""
    make: Callable[[], Sequence[torch.Tensor]]
    ours: tuple[str, ...] = ()
    how: str = ""

    @property
    def numbers(self) -> int:
        """How many numbers they are."""
        return len(self.names) * torch.Size(self.shape).numel()


def write_safetensors(folder: Path, groups: Sequence[Group], dtype: torch.dtype, most: int) -> None:
    """model.safetensors, or several of at most `most` bytes and their index.

    A tensor of more bytes than that has a file of its own. Raises UserError where a tensor holds
    numbers that are none, or that `dtype` cannot hold.
    """
    shards = list(_split(groups, most // dtype.itemsize))
    if len(shards) == 1:
        write_file(folder / SAFETENSORS, shards[0], dtype)
        return
    where = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, shard, dtype)
        where |= {name: file for group in shard for name in group.names}
    numbers = sum(group.numbers for group in groups)
    about = {"total_parameters": numbers, "total_size": numbers * dtype.itemsize}
    index = {"metadata": about, "weight_map": dict(sorted(where.items()))}
    write_json(folder / f"{SAFETENSORS}.index.json", index)


def write_file(path: Path, groups: Sequence[Group], dtype: torch.dtype) -> None:
    """One file of safetensors: the header's length, the header, the numbers."""
    header = json.dumps(_header(groups, dtype), separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for group in groups:
            tensors = group.make()
            for name, tensor in zip(group.names, tensors, strict=True):
                assert tuple(tensor.shape) == group.shape, name
                file.write(_bytes(_converted(name, tensor, dtype)))


def _header(groups: Sequence[Group], dtype: torch.dtype) -> Mapping[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for group in groups:
        for name in group.names:
            start, end = end, end + torch.Size(group.shape).numel() * dtype.itemsize
            header[name] = {
                "dtype": _CODES[dtype],
                "shape": list(group.shape),
                "data_offsets": [start, end],
            }
    return header


def _converted(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the type of the file; a weight that is not a number is nobody's wish."""
    if tensor.dtype not in _CODES:
        raise UserError(f"{name}: is {tensor.dtype}; floating numbers are wanted")
    if not _finite(tensor):
        raise UserError(f"{name}: has numbers that are not finite (NaN or infinite)")
    result = tensor.to(dtype).contiguous()
    if dtype is torch.float16 and tensor.dtype is not dtype and not _finite(result):
        raise UserError(f"{name}: has numbers too large for float16; take bfloat16")
    return result


def _finite(tensor: torch.Tensor) -> bool:
    # A sum is finite only of finite numbers, and four times as fast as asking each.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _split(groups: Sequence[Group], most: int) -> Iterator[list[Group]]:
    shard: list[Group] = []
    size = 0
    for group in groups:
        if shard and size + group.numbers > most:
            yield shard
            shard, size = [], 0
        shard.append(group)
        size += group.numbers
    if shard:
        yield shard
