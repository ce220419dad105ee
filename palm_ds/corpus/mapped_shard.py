"""A shard in memory: its file mapped, and the places of its record batches.

    shard = MappedShard(file)
    shard.block(token)          # the record batch with this token of the shard, views of the file
    map_array(file)             # the array of an .npy file, mapped

A mapped file is not an open one, of which a process may have no more than 1,024.

Only the headers of the record batches are read to find their places (a few bytes are kept for
each). Of the batches themselves, the few used last are kept as Python objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

import numpy as np
import pyarrow as pa

from palm_ds.common.lru_cache import RecentlyUsed

_BLOCKS = 64  # decoded record batches kept per shard, some kilobytes each: views of the file


@dataclass(frozen=True)
class RecordBlock:
    """A record batch: its tokens end to end, and the names of its documents."""

    start: int  # offset of its first token in the shard
    columns: dict[str, np.ndarray]
    names: pa.Array

    def __len__(self) -> int:
        return len(self.columns["ids"])


class MappedShard:
    """The record batches of a shard, found by token."""

    def __init__(self, file: Path) -> None:
        self._data = _mapped(file)
        stream = pa.BufferReader(self._data)
        self._schema = pa.ipc.read_schema(stream)
        starts, places = [0], []
        while (size := self._tokens(stream, places)) is not None:
            starts.append(starts[-1] + size)
        self._starts = np.array(starts, np.int64)  # (batches + 1,) tokens
        self._places = np.array(places, np.int64)  # (batches,) bytes
        self._blocks: RecentlyUsed[int, RecordBlock] = RecentlyUsed(_BLOCKS)

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    def __len__(self) -> int:
        """The number of record batches."""
        return len(self._places)

    def block(self, token: int) -> RecordBlock:
        """The record batch with a token of the shard."""
        return self.numbered(int(np.searchsorted(self._starts, token, side="right")) - 1)

    def numbered(self, number: int) -> RecordBlock:
        """A record batch by its number."""
        return self._blocks.get(number, lambda: self._decode(number))

    def _tokens(self, stream: pa.BufferReader, places: list[int]) -> int | None:
        """The tokens of the next record batch, whose place is appended; None at the end."""
        place = stream.tell()
        try:
            message = pa.ipc.read_message(stream)
        except EOFError:
            return None
        places.append(place)
        return len(pa.ipc.read_record_batch(message, self._schema).column("ids").values)

    def _decode(self, number: int) -> RecordBlock:
        stream = pa.BufferReader(self._data.slice(int(self._places[number])))
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(stream), self._schema)
        columns = {
            name: _in_place(batch.column(name).flatten())
            for name in batch.schema.names
            if name != "id"
        }
        return RecordBlock(int(self._starts[number]), columns, batch.column("id"))


def map_array(file: Path) -> np.ndarray:
    """The array of an .npy file (`np.load` would keep the file open). Raises OSError or ValueError
    if it is none."""
    with file.open("rb") as handle:
        np.lib.format.read_magic(handle)
        try:
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(handle)
        except TokenError as error:
            raise ValueError(f"damaged header: {error}") from None
        start = handle.tell()
    data, order = _mapped(file), "F" if fortran else "C"
    try:
        return np.ndarray(shape, dtype, data, start, order=order)
    except TypeError:
        raise ValueError(f"ends after {len(data)} bytes") from None


def _mapped(file: Path) -> pa.Buffer:
    """The contents of a file, which stay mapped as long as something views them."""
    with pa.memory_map(str(file)) as source:
        return source.read_buffer()


def _in_place(numbers: pa.Array) -> np.ndarray:
    """The same memory as a numpy array (`to_numpy` would import pandas for it)."""
    values = np.frombuffer(numbers.buffers()[1], numbers.type.to_pandas_dtype())
    return values[numbers.offset : numbers.offset + len(numbers)]
