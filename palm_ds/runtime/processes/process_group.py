"""The processes of a run, as far as their agreement needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


class ProcessGroup(Protocol):
    """A rank among `world` processes, and what all of them say."""

    rank: int
    world: int

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order, on every rank."""
        ...


@dataclass
class _SingleProcess:
    """A group of one process, whatever started it."""

    rank: int = 0
    world: int = 1

    def gather(self, value: T) -> list[T]:
        return [value]


SINGLE_PROCESS: ProcessGroup = _SingleProcess()
"""For programs that read checkpoints outside a run."""
