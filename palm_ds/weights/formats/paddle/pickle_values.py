"""Contents of a Paddle pickle for the restricted unpickler: places in the file, not values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from palm_ds.weights.formats.paddle.variable_files import MOST_DIMENSIONS, StoredVariable


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
