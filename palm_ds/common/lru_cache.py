"""A dictionary of a limited number of values: the one that was not used for longest goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentlyUsed(Generic[K, V]):
    """Up to `most` values that are made when they are first wanted."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if it is not there."""
        value = self._values.pop(key, None)
        self._values[key] = value = make() if value is None else value
        while len(self._values) > self.most:
            self.drop_oldest()
        return value

    def values(self) -> Iterable[V]:
        """The values that are there."""
        return self._values.values()

    def drop_oldest(self) -> bool:
        """Forgets the value that was not used for longest; returns whether there was one."""
        oldest = next(iter(self._values), None)
        return oldest is not None and self._values.pop(oldest, None) is not None
