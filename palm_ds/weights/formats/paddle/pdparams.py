"""Reads the tensors of a .pdparams file of any era.

    {name: array}                            fluid.save, fluid.save_dygraph, paddle.save
    "StructuredToParameterName@@"            {structured name: parameter name}
    "UnpackBigParamInfor@@"                  {name: {OriginShape, slices}}: slices to be joined
    (name, array); eval("data", {"data": array})     tensors and LoD tensors in other objects

safe_unpickler.py interprets the pickle without executing it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.common.files import check_right_file
from palm_ds.weights.formats.paddle.safe_unpickler import (
    Array,
    RestrictedUnpickler,
    is_shape,
    kind_of,
)
from palm_ds.weights.formats.paddle.variable_files import StoredVariable
from palm_ds.weights.formats.torch_files import check_total

NAME_TABLE, BIG_TABLE = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
_DEEPEST = 16


@dataclass(frozen=True, kw_only=True)
class Pickled:
    """An opened .pdparams file. Names of tensors in nested dicts and lists are joined by dots."""

    tensors: dict[str, StoredVariable] = field(default_factory=dict)
    parameter_names: dict[str, str] = field(default_factory=dict)
    """{structured name: parameter name in Paddle}, if the file has the table."""
    others: dict[str, str] = field(default_factory=dict)
    """{name: type} of entries that are not tensors."""


def read_pickle(path: Path) -> Pickled:
    """Read a .pdparams file. Raises UserError if it is not one, or asks for anything that Paddle's
    files do not."""
    check_right_file(path)
    try:
        with path.open("rb") as file:
            if file.read(1) != b"\x80":
                raise UserError(
                    f"{path}: not a pickle of protocol 2 to 4, as .pdparams files are; the binary "
                    "files with this suffix that Paddle 1.6 wrote are not supported"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                unpickler = RestrictedUnpickler(data, path)
                made = unpickler.run()
                collected = _Collector(unpickler).collect(made)
                check_total(
                    path, sum(tensor.size for tensor in collected.tensors.values()), len(data)
                )
                return collected
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


class _Collector:
    """Collects the tensors in an unpickled value, which should be a tree but may be hostile."""

    def __init__(self, unpickler: RestrictedUnpickler):
        self.unpickler, self.left = unpickler, unpickler.executed
        self.found = Pickled()

    def collect(self, made: object) -> Pickled:
        """Collect the tensors in the unpickled value."""
        for name, value in self.walk(made, "", 0):
            if isinstance(value, StoredVariable):
                self.found.tensors[name] = value
            else:
                self.found.others[name] = kind_of(value)
        return self.found

    def walk(self, value: object, name: str, depth: int) -> Iterator[tuple[str, Any]]:
        self.spend(1, name)
        if depth > _DEEPEST:
            raise UserError(f"{self.unpickler.path}: {name[:80]}: nested too deeply; refused")
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Array):
            name, value = name or self.unpickler.text(value[0]), value[1]
        if isinstance(value, Array):
            if value.stored is None:
                raise UserError(f"{self.unpickler.path}: {name}: an array without values")
            yield name or "tensor", value.stored
            return
        if isinstance(value, dict):
            items = self.inside(value)
        elif isinstance(value, list | tuple) and any(isinstance(x, _LIKELY) for x in value):
            items = {str(i): item for i, item in enumerate(value)}
        else:
            yield name or "content", value
            return
        for key, item in items.items():
            yield from self.walk(item, f"{name}.{key}" if name else key, depth + 1)

    def spend(self, count: int, name: str) -> None:
        """Count the visited values: a dict that contains itself has no end."""
        self.left -= count
        if self.left < 0:
            raise UserError(f"{self.unpickler.path}: {name[:80]}: nested too deeply; refused")

    def inside(self, values: dict[str, Any]) -> dict[str, Any]:
        """The dict without Paddle's own tables, which are applied."""
        values = dict(values)
        table = values.pop(NAME_TABLE, {})
        if not isinstance(table, dict):
            raise UserError(f"{self.unpickler.path}: {NAME_TABLE} is not a table of names")
        self.spend(len(table), NAME_TABLE)
        names = {key: self.unpickler.text(name) for key, name in table.items()}
        self.found.parameter_names.update(names)
        big = values.pop(BIG_TABLE, {})
        for name, how in big.items() if isinstance(big, dict) else [(BIG_TABLE, big)]:
            values[name] = self.join(name, how, values)
        return values

    def join(self, name: str, how: object, values: dict[str, Any]) -> Array:
        """Join a tensor that was too large for its pickle protocol; its slices are removed from
        `values`."""
        where = f"{self.unpickler.path}: {BIG_TABLE}: {name}"
        how = how if isinstance(how, dict) else {}
        shape, slices = how.get("OriginShape", ()), how.get("slices")
        if not isinstance(slices, list) or not slices or not is_shape(shape):
            raise UserError(f"{where}: not as Paddle writes it")
        self.spend(len(slices), name)
        names = [self.unpickler.text(part) for part in slices]
        parts = [values.pop(part, None) for part in names]
        pieces = [part.stored for part in parts if isinstance(part, Array) and part.stored]
        usual = len({piece.dtype for piece in pieces}) == 1 and all(
            len(piece.shape) == 1 for piece in pieces
        )
        if len(pieces) != len(names) or not usual:
            raise UserError(f"{where}: some of its {len(names)} slices are missing")
        spans = tuple(span for piece in pieces for span in piece.spans)
        whole = StoredVariable(
            path=self.unpickler.path, dtype=pieces[0].dtype, shape=tuple(shape), spans=spans
        )
        if whole.size != sum(piece.size for piece in pieces):
            raise UserError(f"{where}: its slices do not add up to the shape {tuple(shape)}")
        return Array(whole)


_LIKELY = (Array, dict, list, tuple)
