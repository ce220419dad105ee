"""Reads and writes tensors by name in safetensors files and torch files, whole or sharded.

    open_tensors(folder)          ──> {name: TensorEntry}, values read one by one on demand
    write_safetensors(path, ...)  <── one group of tensors at a time, never the whole model

No pickled code runs (torch_files.py).
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

from palm_ds.common.config import unique_keys
from palm_ds.common.errors import UserError, first_line
from palm_ds.common.files import check_right_file
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import printable
from palm_ds.weights.formats.contents import TensorEntry, check_names
from palm_ds.weights.formats.torch_files import is_zipped, open_torch

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
"""About how much of a mapped file a reader keeps in memory."""
_LARGEST_INDEX = 1 << 24  # bytes of a JSON file; the largest genuine ones have a tenth


# ---- reading ----


def weight_files(folder: Path) -> tuple[str, ...]:
    """The existing files that hold or list a model's weights."""
    names = (SAFETENSORS, f"{SAFETENSORS}.index.json", BIN, f"{BIN}.index.json")
    return tuple(name for name in names if (folder / name).is_file())


def open_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a folder's model.safetensors or pytorch_model.bin."""
    files = weight_files(folder)
    if not files:
        raise UserError(f"{folder}: has neither {SAFETENSORS} nor {BIN}")
    name = files[0]
    read = open_safetensors if name.startswith(SAFETENSORS) else open_bin
    if not name.endswith(".index.json"):
        return read(folder / name)
    entries: dict[str, TensorEntry] = {}
    for shard, names in _shards(folder / name).items():
        part = read(folder / shard)
        if lost := sorted(names - part.keys()):
            raise UserError(f"{folder / shard}: has no {lost[0]}, which {name} lists")
        if twice := sorted(entries.keys() & part.keys()):
            raise UserError(f"{folder / shard}: {twice[0]} is duplicated in another shard")
        entries |= part
    return entries


def open_safetensors(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file."""
    check_right_file(path)
    _check_header(path)
    try:
        file = safe_open(path, "pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    except (OSError, SafetensorError, RuntimeError) as error:  # the last: too large to map
        raise UserError(f"{path}: cannot be read as safetensors: {_line(error)}") from None
    reader = _MappedFile(path, lambda: safe_open(path, "pt").get_tensor)
    return {
        name: TensorEntry(source_names=(name,), shape=shape, read=partial(reader.read, name))
        for name, shape in shapes.items()
    }


def _check_header(path: Path) -> None:
    """Raises UserError for duplicate names and names with control characters, which the library
    accepts. The library checks the rest of the header."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(_LARGEST_INDEX, path.stat().st_size):
                raise ValueError(f"a header of {size:,} bytes")
            header = json.loads(file.read(size), object_pairs_hook=partial(unique_keys, path))
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {_line(error)}") from None
    check_names(path, header if isinstance(header, dict) else ())


class _MappedFile:
    """Reads tensors of a mapped file for the entries that refer to it.

    The pages read count as this process's memory while the file is open, so it is reopened after
    every `_MAPPED_BYTES`."""

    def __init__(self, path: Path, open_: Callable[[], Callable[[str], torch.Tensor]]):
        """`open_()` opens the file and returns a function that reads a tensor by name."""
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


def open_bin(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file written by torch.save."""
    state = open_torch(path)
    check_names(path, state)
    if not is_zipped(path):  # in memory, whole
        return {name: in_memory_entry(name, tensor) for name, tensor in state.items()}
    reader = _MappedFile(path, lambda: open_torch(path).__getitem__)
    return {
        name: TensorEntry(
            source_names=(name,), shape=tuple(tensor.shape), read=partial(reader.read, name)
        )
        for name, tensor in state.items()
    }


def in_memory_entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    """An entry for a tensor that is already in memory."""
    return TensorEntry(source_names=(name,), shape=tuple(tensor.shape), read=tensor.detach)


def _shards(index: Path) -> dict[str, set[str]]:
    """{shard: the tensors in it}."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UserError(f"{index}: has no weight_map from tensors to files")
    shards: dict[str, set[str]] = {}
    for name, shard in listed.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise UserError(f"{index}: {name}: shard outside the folder: {shard!r}")
        shards.setdefault(shard, set()).add(name)
    check_names(index, [*listed, *shards])
    if lost := sorted(shard for shard in shards if not (index.parent / shard).is_file()):
        raise UserError(f"{index}: lists {lost[0]}, which is missing")
    return dict(sorted(shards.items()))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    check_right_file(path)
    try:
        if path.stat().st_size > _LARGEST_INDEX:
            raise ValueError(f"larger than {_LARGEST_INDEX} bytes")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=partial(unique_keys, path))
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys and values, got {type(content).__name__}")
    return content


def _line(error: BaseException) -> str:
    return printable(first_line(error))


# ---- writing ----


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Tensors that are computed together, such as query, key and value from one qkv matrix."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    """The shape of each."""
    make: Callable[[], Sequence[torch.Tensor]]
    source_names: tuple[str, ...] = ()
    transform: str = ""

    @property
    def num_values(self) -> int:
        """Number of values in all of them."""
        return len(self.names) * torch.Size(self.shape).numel()


def write_safetensors(
    folder: Path, groups: Sequence[TensorGroup], dtype: torch.dtype, most: int
) -> None:
    """Write model.safetensors, or shards of at most `most` bytes with an index.

    A larger tensor gets its own file. Raises UserError if a tensor has NaN or infinite values, or
    values that `dtype` cannot represent.
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
    numbers = sum(group.num_values for group in groups)
    about = {"total_parameters": numbers, "total_size": numbers * dtype.itemsize}
    index = {"metadata": about, "weight_map": dict(sorted(where.items()))}
    write_json(folder / f"{SAFETENSORS}.index.json", index)


def write_file(path: Path, groups: Sequence[TensorGroup], dtype: torch.dtype) -> None:
    """Write one safetensors file: the header's length, the header, the values."""
    header = json.dumps(_header(groups, dtype), separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for group in groups:
            tensors = group.make()
            for name, tensor in zip(group.names, tensors, strict=True):
                assert tuple(tensor.shape) == group.shape, name
                file.write(_bytes(_converted(name, tensor, dtype)))


def _header(groups: Sequence[TensorGroup], dtype: torch.dtype) -> Mapping[str, Any]:
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
    """The tensor in the file's dtype. Raises UserError for values that are not finite."""
    if tensor.dtype not in _CODES:
        raise UserError(f"{name}: is {tensor.dtype}; expected floating-point values")
    if not _finite(tensor):
        raise UserError(f"{name}: has values that are not finite (NaN or infinite)")
    result = tensor.to(dtype).contiguous()
    if dtype is torch.float16 and tensor.dtype is not dtype and not _finite(result):
        raise UserError(f"{name}: has values too large for float16; use bfloat16")
    return result


def _finite(tensor: torch.Tensor) -> bool:
    # A finite sum implies finite values, and is four times as fast as checking each.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _split(groups: Sequence[TensorGroup], most: int) -> Iterator[list[TensorGroup]]:
    shard: list[TensorGroup] = []
    size = 0
    for group in groups:
        if shard and size + group.num_values > most:
            yield shard
            shard, size = [], 0
        shard.append(group)
        size += group.num_values
    if shard:
        yield shard
