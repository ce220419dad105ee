"""Parts that corpora and tables have in common as sources: cached results, the held-out share, and
token frequencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_uniform

T = TypeVar("T")


class CachesResults:
    """A source on which tasks store what they compute from it."""

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """`make()`, called only the first time."""
        results = self.__dict__.setdefault("_cached", {})
        if name not in results:
            results[name] = make()
        return results[name]


def train_heldout_split(
    count: int,
    share: float,
    *,
    where: str,
    of: str,
    at_least_one: bool = False,
    groups: Sequence[object] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers to train on and those held out, ascending. Whether a document or row is held out
    depends only on its number, so the split is the same in every run over the same data; those of
    one of the `groups` stay together, and None is no group. `where` and `of` (what is counted) are
    for the message if nothing remains to train on."""
    numbers = np.arange(count)
    draw = held_out_draw(numbers, groups)
    out = draw < share
    if at_least_one and share > 0 and count and not out.any():
        out[draw.argmin()] = True
    if share > 0 and count and out.all():
        raise UserError(f"{where}: held_out {share} leaves none of {count} {of} to train on")
    return numbers[~out], numbers[out]


def held_out_draw(numbers: np.ndarray, groups: Sequence[object] | None = None) -> np.ndarray:
    """A uniform number in [0, 1) for every document or row: below the held-out share, it is held
    out. All of a group have the number of its first."""
    draw = keyed_uniform(derive_key("held out"), numbers, 1)[:, 0]
    if groups is None:
        return draw
    of_group: dict[str, float] = {}
    pairs = zip(group_names(groups), draw.tolist(), strict=True)
    return np.array([of_group.setdefault(*pair) for pair in pairs])


def group_names(groups: Sequence[object]) -> list[str]:
    """A name of each row's group; None is a group of its own."""
    return [f"\0{row}" if group is None else str(group) for row, group in enumerate(groups)]


def unigram_frequencies(texts: Iterable[np.ndarray], size: int) -> np.ndarray:
    """(size,) relative frequencies of token ids, one added to each count: the unigram baseline."""
    counts = np.ones(size, np.float64)
    for ids in texts:
        counts += np.bincount(ids, minlength=size)
    return counts / counts.sum()
