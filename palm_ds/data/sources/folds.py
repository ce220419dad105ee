"""Cross-validation: the rows of a table dealt to folds, each of which is held out once.

Classes are spread evenly over the folds, as in scikit-learn's StratifiedKFold; rows of one group
are in one fold, as in GroupKFold. Which fold a row is in depends on the seed, and on no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_uniform
from palm_ds.common.settings import Settings
from palm_ds.data.sources.source import group_names


@dataclass(frozen=True, kw_only=True)
class FoldSettings(Settings):
    """Cross-validation: the rows of a table are split into folds, and one of them is held out."""

    count: Annotated[int, Field(ge=2)]
    """Number of folds. The recipe's `seed` decides which rows are in which fold; if a task on the
    table predicts classes, each fold has its share of every class."""
    held_out: PositiveInt
    """The fold to evaluate on, counted from 1; the others are trained on."""
    group: str = ""
    """Role of the column by which rows are grouped: rows with equal values, such as `context` or
    `qid`, stay in one fold. Default: for ranking the group of its candidates, for retrieval the
    query, else none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_out > self.count:
            raise UserError(f"folds.held_out: {self.held_out}, but there are {self.count} folds")


def deal_folds(
    rows: int,
    count: int,
    *,
    seed: int,
    classes: Sequence[object] | None = None,
    groups: Sequence[object] | None = None,
) -> np.ndarray:
    """(rows,) the fold of each row, from 0.

    Without groups, the sizes of folds differ by at most one row, and so do their numbers of each
    class. With groups, each in turn, the largest first, goes to the fold with the fewest rows;
    classes are not looked at. Raises UserError for fewer rows or groups than folds."""
    if groups is not None:
        return _dealt_groups(group_names(groups), count, seed)
    _check(rows, count, "rows")
    number = np.zeros(rows, np.int64)
    if classes is not None:
        number = np.unique([str(name) for name in classes], return_inverse=True)[1]
    order = np.lexsort((_draw(rows, seed), number))
    folds = np.empty(rows, np.int64)
    folds[order] = np.arange(rows) % count
    return folds


def _dealt_groups(groups: Sequence[str], count: int, seed: int) -> np.ndarray:
    _, number, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    _check(len(sizes), count, "groups")
    rows, fold_of = np.zeros(count, np.int64), np.empty(len(sizes), np.int64)
    for group in np.lexsort((_draw(len(sizes), seed), -sizes)):
        fold_of[group] = rows.argmin()
        rows[fold_of[group]] += sizes[group]
    return fold_of[number]


def _check(there: int, count: int, of: str) -> None:
    if there < count:
        raise UserError(f"folds.count: {count}, but there are only {there} {of}")


def _draw(size: int, seed: int) -> np.ndarray:
    return keyed_uniform(derive_key(seed, "folds"), np.arange(size), 1)[:, 0]
