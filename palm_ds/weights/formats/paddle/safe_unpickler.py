"""Reads Paddle's pickles to file offsets: `pickle.Unpickler` would load every array into memory.

This interpreter knows the instructions and the few names in Paddle's files of every era (protocols
2 to 4, Python 2 and 3) and refuses any other by name. It never imports or calls what a file names:
an array becomes a `StoredVariable`, a place in the file whose shape and type were checked.
"""

from __future__ import annotations

import math
import mmap
import pickletools
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from palm_ds.common.errors import UserError
from palm_ds.weights.formats.paddle.variable_files import MOST_DIMENSIONS, ByteRange, StoredVariable


class Name(NamedTuple):
    """A known name: what it stands for, and in full."""

    kind: str
    full: str


@dataclass(frozen=True)
class Chars:
    """A string in the file, not read yet. `form`: bytes, utf-8 (text), or encoded (bytes stored as
    text)."""

    start: int
    length: int
    form: str


@dataclass
class DType:
    """A type of numbers, by numpy's name."""

    name: str


@dataclass
class Array:
    """An array that BUILD fills in."""

    stored: StoredVariable | None = None


def kind_of(value: object) -> str:
    return value.full if isinstance(value, Name) else type(value).__name__.strip("_").lower()


def is_shape(value: object) -> bool:
    if not isinstance(value, tuple | list) or len(value) > MOST_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def shown_shape(shape: object) -> str:
    """A bad shape in a message, shortened."""
    if not isinstance(shape, tuple):
        return kind_of(shape)
    return f"({', '.join(str(x)[:20] if type(x) is int else kind_of(x) for x in shape[:9])})"


_ALLOWED_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): "array",
    ("numpy._core.multiarray", "_reconstruct"): "array",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
    ("__builtin__", "bytes"): "bytes",  # of an empty array, at protocol 2
    ("builtins", "tuple"): "tuple",
    ("__builtin__", "tuple"): "tuple",
    ("collections", "OrderedDict"): "dict",
    ("builtins", "eval"): "eval",
}
_TYPES = {
    "b1": torch.bool,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.bfloat16,  # Paddle keeps the bits of bfloat16 in numpy's uint16
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "c8": torch.complex64,
    "c16": torch.complex128,
}
_MAX_INSTRUCTIONS = 500_000  # thirty to forty a tensor are usual
_MAX_NAME_LENGTH = 1000


_PUSH = {
    b"}": dict,
    b"]": list,
    b")": tuple,
    b"N": lambda: None,
    b"\x88": lambda: True,
    b"\x89": lambda: False,
}
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_STRINGS = {
    b"X": ("<I", "utf-8"),
    b"\x8c": ("<B", "utf-8"),
    b"\x8d": ("<Q", "utf-8"),
    b"U": ("<B", "bytes"),
    b"T": ("<i", "bytes"),
    b"C": ("<B", "bytes"),
    b"B": ("<I", "bytes"),
    b"\x8e": ("<Q", "bytes"),
}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_PUT, _GET = {b"q": "<B", b"r": "<I"}, {b"h": "<B", b"j": "<I"}


class RestrictedUnpickler:
    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at = data, path, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.decoded = 0  # bytes of text that are values
        self.executed = 0
        """Instructions executed so far; a genuine file has no more values than these."""

    def run(self) -> Any:
        """Interpret the pickle and return its value."""
        while self.executed < _MAX_INSTRUCTIONS:
            self.executed += 1
            code = self.take(1)
            if code == b".":
                return self.pop()
            self.step(code)
        raise self.error(f"more than {_MAX_INSTRUCTIONS:,} instructions; refused")

    def step(self, code: bytes) -> None:
        if code in _PUSH:
            self.stack.append(_PUSH[code]())
        elif code in _NUMBERS:
            self.stack.append(self.number(_NUMBERS[code]))
        elif code in _STRINGS:
            form, kind = _STRINGS[code]
            self.stack.append(self.chars(self.number(form), kind))
        elif code in _TUPLES:
            self.stack.append(tuple(reversed([self.pop() for _ in range(_TUPLES[code])])))
        elif code in _PUT:
            self.memo[int(self.number(_PUT[code]))] = self.top()
        elif code in _GET:
            self.stack.append(self.remembered(int(self.number(_GET[code]))))
        elif code in _HANDLERS:
            _HANDLERS[code](self)
        else:
            names = {one.code: one.name for one in pickletools.opcodes}
            name = names.get(code.decode("latin1"), repr(code))
            raise self.error(f"the instruction {name} is not used in Paddle's files; refused")

    def error(self, what: str) -> UserError:
        return UserError(f"{self.path}: byte {self.at}: {what}")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.error(f"the file ends here, expected {size} more bytes")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def chars(self, length: int, form: str) -> Chars:
        if not 0 <= length <= len(self.data) - self.at:
            raise self.error(f"the file ends inside a string of {length} bytes")
        self.at += length
        return Chars(self.at - length, length, form)

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def top(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise self.error("garbled: the stack is empty")
        return self.stack[-1]

    def remembered(self, place: int) -> Any:
        if place not in self.memo:
            raise self.error(f"garbled: memo {place} is empty")
        return self.memo[place]

    def to_mark(self) -> list[Any]:
        if not self.marks:
            raise self.error("garbled: no mark")
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def text(self, value: object) -> str:
        """The string as a name."""
        if not isinstance(value, Chars):
            raise self.error(f"expected a name, got {kind_of(value)}")
        if value.length > _MAX_NAME_LENGTH:
            raise self.error(f"a name of {value.length} bytes; refused")
        raw = self.data[value.start : value.start + value.length]
        try:
            text_value = raw.decode("utf-8" if value.form == "utf-8" else "latin1")
        except UnicodeDecodeError:
            raise self.error("garbled: a name that is not UTF-8") from None
        if not text_value.isprintable():  # messages will contain it
            raise self.error(f"a name that is not printable, {text_value[:40]!r}; refused")
        return text_value

    def name(self, module: str, name: str) -> None:
        kind = _ALLOWED_GLOBALS.get((module, name))
        if kind is None:
            shown = f"{module}.{name}".encode("unicode_escape").decode()
            raise self.error(f"asks for {shown}, which Paddle's files do not; refused")
        self.stack.append(Name(kind, f"{module}.{name}"))

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + _MAX_NAME_LENGTH)
        if end < 0:
            raise self.error("garbled: a global's name has no end")
        return self.take(end + 1 - self.at)[:-1].decode("latin1")

    # ---- instructions ----

    def protocol(self) -> None:
        if (version := self.take(1)[0]) not in (2, 3, 4):
            raise self.error(f"pickle protocol {version}; Paddle uses 2 to 4")

    def skip_frame(self) -> None:
        self.take(8)  # a hint for buffering: how much follows

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.top()

    def tuple_to_mark(self) -> None:
        self.stack.append(tuple(self.to_mark()))

    def long(self, form: str) -> None:
        if (size := self.number(form)) not in range(256):
            raise self.error(f"an integer of {size} bytes; refused")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def append(self) -> None:
        item = self.pop()
        self.extend([item])

    def extend(self, items: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise self.error(f"garbled: {kind_of(target)} is not a list")
        target += items

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def set_items(self, items: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, dict) or len(items) % 2:
            raise self.error(f"garbled: keys and values for {kind_of(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self.text(key)] = value

    def global_by_line(self) -> None:
        self.name(self.line(), self.line())

    def global_by_stack(self) -> None:
        name, module = self.pop(), self.pop()
        self.name(self.text(module), self.text(name))

    def reduce(self) -> None:
        arguments, thing = self.pop(), self.pop()
        if not isinstance(thing, Name) or not isinstance(arguments, tuple):
            raise self.error(f"garbled: calls {kind_of(thing)}")
        made = _CALLS[thing.kind](self, arguments) if thing.kind in _CALLS else None
        if made is None:
            raise self.error(f"calls {thing.full} in a way that Paddle's files do not; refused")
        self.stack.append(made)

    def build(self) -> None:
        state, thing = self.pop(), self.top()
        if isinstance(thing, Array) and thing.stored is None and isinstance(state, tuple):
            thing.stored = self.array(state)
        elif not (isinstance(thing, DType) and isinstance(state, tuple) and _plain(self, state)):
            raise self.error(
                f"fills in {kind_of(thing)} in a way that Paddle's files do not; refused"
            )

    # ---- calls: None if the arguments are not those in genuine files ----

    def call_array(self, arguments: tuple) -> Array | None:
        thing, shape, _ = arguments if len(arguments) == 3 else (None, None, None)
        genuine = isinstance(thing, Name) and thing.kind == "ndarray" and shape == (0,)
        return Array() if genuine else None

    def call_dtype(self, arguments: tuple) -> DType | None:
        if len(arguments) != 3 or not isinstance(arguments[0], Chars):
            return None
        name = self.text(arguments[0])
        if name not in _TYPES:
            raise self.error(f"an array of type {name!r}, which is not numeric; refused")
        return DType(name)

    def call_encode(self, arguments: tuple) -> Chars | None:
        text, coding = arguments if len(arguments) == 2 else (None, None)
        if not isinstance(text, Chars) or text.form != "utf-8" or self.text(coding) != "latin1":
            return None
        return Chars(text.start, text.length, "encoded")

    def call_bytes(self, arguments: tuple) -> Chars | None:
        return None if arguments else Chars(self.at, 0, "bytes")

    def call_dict(self, arguments: tuple) -> dict | None:
        if len(arguments) > 1 or (arguments and not isinstance(arguments[0], list)):
            return None
        pairs = arguments[0] if arguments else []  # Python 2 gives them so
        if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
            return None
        return {self.text(key): value for key, value in pairs}

    def call_eval(self, arguments: tuple) -> Array | None:
        """A LoD tensor is stored as eval("data", {"data": array}), which just means the array."""
        code, values = arguments if len(arguments) == 2 else (None, None)
        if not isinstance(code, Chars) or self.text(code) != "data":
            return None
        if not isinstance(values, dict) or list(values) != ["data"]:
            return None
        return values["data"] if isinstance(values["data"], Array) else None

    def array(self, state: tuple) -> StoredVariable:
        """numpy's (1, shape, dtype, by column, values), checked."""
        version, shape, kind, by_column, values = state if len(state) == 5 else (0, (), 0, 0, 0)
        if version != 1 or not isinstance(kind, DType) or not isinstance(values, Chars):
            raise self.error("garbled: an array that numpy would not have written")
        if not is_shape(shape):
            raise self.error(f"an array with shape {shown_shape(shape)}; refused")
        dtype = _TYPES[kind.name]
        there, due = self.length(values), math.prod(shape) * dtype.itemsize
        if there != due:
            raise self.error(
                f"an array of {shown_shape(shape)} {kind.name} in {there} bytes, not {due}"
            )
        span = ByteRange(start=values.start, length=values.length, text=values.form == "encoded")
        columns = bool(by_column) and len(shape) > 1
        return StoredVariable(
            path=self.path, dtype=dtype, shape=shape, spans=(span,), by_column=columns
        )

    def length(self, values: Chars) -> int:
        """Bytes of an array's values."""
        if values.form == "bytes":
            return values.length
        self.decoded += values.length
        if self.decoded > len(self.data):
            raise self.error("the same values are used again and again; refused")
        raw = self.data[values.start : values.start + values.length]
        try:
            return len(raw.decode("utf-8", "surrogatepass").encode("latin1"))
        except UnicodeError:
            raise self.error("garbled: the values of an array are not bytes") from None


_HANDLERS = {
    b"\x80": RestrictedUnpickler.protocol,
    b"\x95": RestrictedUnpickler.skip_frame,
    b"(": RestrictedUnpickler.mark,
    b"\x94": RestrictedUnpickler.memoize,
    b"t": RestrictedUnpickler.tuple_to_mark,
    b"\x8a": lambda machine: machine.long("<B"),
    b"\x8b": lambda machine: machine.long("<i"),
    b"a": RestrictedUnpickler.append,
    b"e": lambda machine: machine.extend(machine.to_mark()),
    b"s": RestrictedUnpickler.set_item,
    b"u": lambda machine: machine.set_items(machine.to_mark()),
    b"c": RestrictedUnpickler.global_by_line,
    b"\x93": RestrictedUnpickler.global_by_stack,
    b"R": RestrictedUnpickler.reduce,
    b"b": RestrictedUnpickler.build,
}
_CALLS = {
    "array": RestrictedUnpickler.call_array,
    "dtype": RestrictedUnpickler.call_dtype,
    "encode": RestrictedUnpickler.call_encode,
    "bytes": RestrictedUnpickler.call_bytes,
    "tuple": lambda _, arguments: _call_tuple(arguments),
    "dict": RestrictedUnpickler.call_dict,
    "eval": RestrictedUnpickler.call_eval,
}


def _call_tuple(arguments: tuple) -> tuple | None:
    one = arguments[0] if len(arguments) == 1 else None
    return one if isinstance(one, tuple) else None


def _plain(machine: RestrictedUnpickler, state: tuple) -> bool:
    """Whether the state of a dtype means plain little-endian numbers."""
    if len(state) < 5 or not isinstance(state[1], Chars) or state[2:5] != (None, None, None):
        return False
    return machine.text(state[1]) in ("<", "|")
