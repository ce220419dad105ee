"""Masking: the units of a text (entities, phrases, words and tokens), those to mask, what the model
sees instead of them, and baselines that ignore the text.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.example import Example
from palm_ds.text.tokens import SpecialTokens


def units_of(example: Example, annotations: tuple[str, ...]) -> np.ndarray:
    """(tokens,) the number of each token's unit, ascending; -1 for special tokens. `annotations`
    are those of the units; with only "token", or none, every token is a unit."""
    inside = example.source_offsets >= 0
    free = inside.copy()  # not yet in a larger unit
    begins = np.zeros(len(example), bool)
    for mark in ("entity", "phrase"):
        if mark not in annotations:
            continue
        covered = _whole_spans(example.annotations[mark], free)
        begins |= covered & (example.annotations[mark] == 1)
        free &= ~covered
    begins |= free & (example.annotations["word"] == 1) if "word" in annotations else free
    # A unit also starts where the previous one ended: after a special token or a larger unit.
    begins |= inside & ~np.concatenate([[False], inside[:-1]])
    begins |= free & ~np.concatenate([[False], free[:-1]])
    return np.where(inside, np.cumsum(begins) - 1, -1)


def _whole_spans(mark: np.ndarray, free: np.ndarray) -> np.ndarray:
    """(tokens,) bool: tokens of the spans (1 2 2 ...) whose tokens are all free. A 2 after a 0 is
    the rest of a span cut off at the start of a text and does not count."""
    before = np.concatenate([[0], mark[:-1]])
    span = np.cumsum((mark == 1) | ((mark == 2) & (before == 0)))
    broken = (mark > 0) & ~free | (mark == 2) & (before == 0)
    return (mark > 0) & (np.bincount(span, weights=broken)[span] == 0)


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


def check_mask_rates(mask_rate: float, random_rate: float, where: str) -> None:
    """Raises UserError unless both shares of the predicted tokens fit into one."""
    if mask_rate + random_rate > 1:
        raise UserError(
            f"{where}: mask_rate {mask_rate} and random_rate {random_rate} must not be negative or "
            "add up to more than 1"
        )


def shown(
    ids: np.ndarray,
    draws: np.ndarray,
    vocabulary: SpecialTokens,
    rng: np.random.Generator,
    *,
    mask_rate: float,
    random_rate: float,
    other: bool = False,
) -> np.ndarray:
    """(n,) replacements for the masked tokens `ids` (n,): [MASK], a random regular token, or the
    token itself, depending on `draws` (n,) in [0, 1) (BERT, section 3.1). A random token may be the
    token itself unless it must be another one, `other`."""
    if other:
        drawn = other_tokens(ids, vocabulary.regular, rng)
    else:
        drawn = vocabulary.regular[rng.integers(len(vocabulary.regular), size=len(ids))]
    kept = np.where(draws < mask_rate + random_rate, drawn, ids)
    return np.where(draws < mask_rate, vocabulary.mask, kept)


def mask_tokens(
    example: Example,
    name: str,
    where: np.ndarray,
    vocabulary: SpecialTokens,
    rng: np.random.Generator,
    *,
    mask_rate: float,
    random_rate: float,
) -> None:
    """Label the tokens at the places `where` (n,) for a loss, and mask them (`shown`)."""
    ids = example.unmasked_ids[where]
    example.labels[name] = where, ids
    example.input_ids[where] = shown(
        ids,
        rng.random(len(where)),
        vocabulary,
        rng,
        mask_rate=mask_rate,
        random_rate=random_rate,
    )


def other_tokens(ids: np.ndarray, regular: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(n,) a random one of the ascending `regular` tokens for each of `ids` (n,), but not that one
    itself."""
    place = np.searchsorted(regular, ids)
    known = regular[np.minimum(place, len(regular) - 1)] == ids  # [UNK] is not among them
    drawn = rng.integers(len(regular) - known)
    return regular[drawn + (known & (drawn >= place))]


def class_prior_baseline(targets: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss and accuracy per target of the class-prior baseline, which knows only how often each
    class was counted; one is added to each count."""
    share = (counts + 1) / (counts + 1).sum()
    return -np.log(share[targets]), (targets == share.argmax()).astype(float)


def unigram_baseline(targets: np.ndarray, frequency: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss and accuracy per target of the unigram baseline, which knows only the relative
    frequencies of tokens (vocabulary,). `targets` (n,) are tokens, or (n, any) with the tokens
    first."""
    tokens = targets[:, 0] if targets.ndim > 1 else targets
    return -np.log(frequency[tokens]), (tokens == frequency.argmax()).astype(float)


Unit = Literal["token", "word", "phrase", "entity"]
