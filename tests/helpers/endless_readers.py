"""Readers without an end, for tests: rows of texts that begin with their class."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

from palm_ds.common.rng import keyed_generator

KILL_AT = "PALM_TEST_KILL_AT"
"""The environment variable of the row at which a reader kills its process."""
READ: list[tuple[str, int]] = []
"""(reader, the number of each row that it gave)."""


def row(number: int) -> dict[str, Any]:
    if os.environ.get(KILL_AT) == str(number):
        os.kill(os.getpid(), signal.SIGKILL)
    rng = keyed_generator(7, number)
    label = int(rng.integers(2))
    words = rng.integers(0, 20, int(rng.integers(2, 12)))
    return {"text_a": " ".join([f"w{label}", *(f"w{n}" for n in words)]), "label": f"c{label}"}


def seeking(start: int = 0) -> Iterator[dict[str, Any]]:
    """Begins at any row."""
    for number in itertools.count(start):
        READ.append(("seeking", number))
        yield row(number)


def plain() -> Iterator[dict[str, Any]]:
    """Begins at the first row."""
    for number in itertools.count():
        READ.append(("plain", number))
        yield row(number)


class Tuples:
    """Gives tuples."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((each["text_a"], each["label"]) for each in map(row, itertools.count()))


def ended() -> list[dict[str, Any]]:
    """Has an end."""
    return [row(number) for number in range(30)]


def changing() -> Iterator[dict[str, Any]]:
    """Has a new class in row 40."""
    for number in itertools.count():
        yield row(number) | ({"label": "new"} if number == 40 else {})


def other_columns() -> Iterator[dict[str, Any]]:
    """Has another column from row 16 on."""
    for number in itertools.count():
        yield row(number) | ({"text_b": "w1"} if number >= 16 else {})


def nothing() -> int:
    return 0


def needs(folder: str) -> list[Any]:
    return [folder]
