"""Spans of consecutive units, with random lengths.

    units    0 0 1 2 2 2 | 3 4 5        two words of several tokens; | is a special token
    lengths  2, 1, 3, ...
    spans    0 0 0 1 1 1 | 2 2 2

The whole text is cut into spans, of which the masking takes some at random, as it takes units. The
lengths of those are distributed as drawn, but for the last span of a text, which ends with it.
SpanBERT (Joshi et al. 2020, section 3.1) and GPT-BERT draw a length and a start at a time until
enough is masked; their spans may overlap, and SpanBERT cuts the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import InnerShare, Settings


@dataclass(frozen=True, kw_only=True)
class SpanSettings(Settings):
    """The distribution of the lengths of spans, in units."""

    lengths: Literal["geometric", "uniform"] = "geometric"
    """geometric: each further unit with probability 1 - `p`, up to `longest` units. uniform: all
    lengths are equally likely."""
    p: InnerShare = 0.2
    """Parameter of the geometric distribution."""
    shortest: PositiveInt = 1
    """Units of the shortest span."""
    longest: PositiveInt = 10
    """Units of the longest span; SpanBERT: 10, which gives 3.8 on average. GPT-BERT: 3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise UserError(
                f"spans.shortest: {self.shortest} is more than longest, {self.longest}; lower it"
            )

    @cached_property
    def _cumulated(self) -> np.ndarray:
        """The probability of each length or a shorter one, from `shortest` on."""
        steps = np.arange(self.longest - self.shortest + 1)
        each = (1 - self.p) ** steps if self.lengths == "geometric" else np.ones(len(steps))
        return np.cumsum(each) / each.sum()

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count,) lengths."""
        return self.shortest + np.searchsorted(self._cumulated[:-1], rng.random(count), "right")


def spans_of(unit: np.ndarray, lengths: SpanSettings, rng: np.random.Generator) -> np.ndarray:
    """(tokens,) the number of each token's span, ascending from 0, given that of its unit, -1 for
    none. No span goes across a token without a unit."""
    inside = unit >= 0
    first = inside & (np.diff(unit, prepend=-1) != 0)  # tokens that begin a unit
    begins = inside & ~np.concatenate([[False], inside[:-1]])
    runs = np.add.reduceat(first.astype(int), np.flatnonzero(begins)) if begins.any() else []
    begins[first] = np.concatenate([_starts(int(n), lengths, rng) for n in runs] or [begins[:0]])
    return np.where(inside, np.cumsum(begins) - 1, -1)


def _starts(units: int, lengths: SpanSettings, rng: np.random.Generator) -> np.ndarray:
    """(units,) bool: which units begin a span."""
    ends = np.cumsum(lengths.draw(units, rng))
    starts = np.zeros(units, bool)
    starts[[0, *ends[ends < units]]] = True
    return starts
