"""Masking: the tokens to mask, what the model sees instead of them, and baselines that ignore the
text.
"""

from __future__ import annotations

import numpy as np

from palm_ds.text.tokens import SpecialTokens


def choose_units(unit: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """(tokens,) bool: whole units in random order until `rate` of the tokens is reached. `unit`
    (tokens,) is the number of each token's unit, -1 for none.

    The unit that would exceed the rate is taken with the probability that makes the expected share
    exact. At least one unit is taken, so that every text has a prediction."""
    sizes = np.bincount(unit[unit >= 0])
    order = rng.permutation(np.flatnonzero(sizes))
    total = np.cumsum(sizes[order])
    budget = rate * total[-1]
    whole = int(np.searchsorted(total, budget, side="right"))
    left = budget - (total[whole - 1] if whole else 0)
    whole += bool(whole < len(order) and rng.random() * sizes[order[whole]] < left)
    taken = np.zeros(len(sizes), bool)
    taken[order[: max(whole, 1)]] = True
    return (unit >= 0) & taken[unit]


def shown(
    ids: np.ndarray,
    draws: np.ndarray,
    vocabulary: SpecialTokens,
    rng: np.random.Generator,
    *,
    mask_rate: float,
    random_rate: float,
) -> np.ndarray:
    """(n,) replacements for the masked tokens `ids` (n,): [MASK], a random regular token, or the
    token itself, depending on `draws` (n,) in [0, 1) (BERT, section 3.1)."""
    other = vocabulary.regular[rng.integers(len(vocabulary.regular), size=len(ids))]
    kept = np.where(draws < mask_rate + random_rate, other, ids)
    return np.where(draws < mask_rate, vocabulary.mask, kept)


def class_prior_baseline(targets: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss and accuracy per target of the class-prior baseline, which knows only how often each
    class was counted; one is added to each count."""
    share = (counts + 1) / (counts + 1).sum()
    return -np.log(share[targets]), (targets == share.argmax()).astype(float)
