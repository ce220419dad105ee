"""Folds: as even as scikit-learn's, the same for the same seed, and groups stay together."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.model_selection import StratifiedKFold

from palm_ds.common.errors import UserError
from palm_ds.data.sources.folds import FoldSettings, deal_folds


def test_every_fold_has_its_share_of_every_class() -> None:
    classes = np.random.default_rng(1).choice(["yes", "no", "rare"], 101, p=[0.6, 0.3, 0.1])
    folds = deal_folds(101, 5, seed=1, classes=classes.tolist())
    sizes = np.bincount(folds)
    assert sizes.max() - sizes.min() <= 1
    theirs = StratifiedKFold(5).split(classes, classes)
    held = [classes[rows] for _, rows in theirs]
    for name in ("yes", "no", "rare"):
        ours = sorted((classes[folds == i] == name).sum() for i in range(5))
        assert ours == sorted((each == name).sum() for each in held)


def test_they_follow_the_seed_and_nothing_else() -> None:
    first, again, other = (deal_folds(50, 4, seed=seed) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
    assert (first != np.arange(50) % 4).any(), "in another order than the rows"


def test_rows_of_a_group_stay_together() -> None:
    groups = np.random.default_rng(2).integers(0, 30, 200)
    folds = deal_folds(200, 5, seed=3, groups=groups.tolist())
    assert all(len(set(folds[groups == group])) == 1 for group in groups)
    sizes = np.bincount(folds)
    assert len(sizes) == 5 and sizes.max() - sizes.min() <= np.bincount(groups).max()


def test_too_few_rows_or_groups_are_errors() -> None:
    with pytest.raises(UserError, match=r"folds.count: 5, but there are only 4 rows"):
        deal_folds(4, 5, seed=1)
    with pytest.raises(UserError, match=r"folds.count: 3, but there are only 2 groups"):
        deal_folds(9, 3, seed=1, groups=list("aaabbbaaa"))
    with pytest.raises(UserError, match=r"folds.held_out: 4, but there are 3 folds"):
        FoldSettings(count=3, held_out=4)
