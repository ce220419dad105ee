"""Masking of whole units of a text, or of spans of several units, for the tasks that predict them.

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
from palm_ds.common.settings import InnerShare, Settings, Share
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.masking import Unit, check_mask_rates, choose_units, shown, units_of
from palm_ds.data.tasks.task import CorpusTask


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


@dataclass(frozen=True, kw_only=True)
class UnitMasking(CorpusTask):
    """Keys of a task that masks units, and the masking."""

    rate_varies = True
    rate: InnerShare = 0.15
    """Share of an example's tokens to predict, special tokens excluded. A stage with its own `rate`
    replaces it."""
    units: tuple[Unit, ...] = ("word", "phrase", "entity")
    """Units to mask as a whole: a token belongs to the largest unit listed here that covers it, or
    is a unit by itself. `[token]` and `[word]` are ERNIE 1.0's basic stage, `[phrase, word]` and
    `[entity, word]` its later ones."""
    spans: SpanSettings | None = None
    """Mask spans of consecutive units instead of single ones, as in `{lengths: geometric}`
    (SpanBERT, with `units: [word]`) or `{lengths: uniform, longest: 3}` (GPT-BERT, with `units:
    [token]`)."""
    chosen: Literal["exact", "each"] = "exact"
    """How units (or spans) are chosen. exact: in random order until `rate` is reached, at least
    one. each: independently of each other, so that a short text may have no prediction (ERNIE 1.0's
    code)."""
    whole: float | str = 1.0
    """Share of the texts that are masked by `units`; in the others every token is a unit. Or the
    annotation of the corpus with each text's share in percent (`mask_word`, from ERNIE 1.0's
    files)."""
    corrupt: Literal["token", "unit", "span"] = "token"
    """Whether it is drawn per token (BERT, ERNIE), once per unit or once per span (SpanBERT) what
    is shown: [MASK], a random token or the token itself."""
    mask_rate: Share = 0.8
    """Share of the predicted tokens shown as [MASK]; 1: all of them."""
    random_rate: Share = 0.1
    """Share of the predicted tokens shown as a random token; the rest is shown unchanged, none if
    both shares add up to 1 (BabyBERTa: 0.9 and 0.1)."""
    random: Literal["any", "other"] = "any"
    """Whether a random token may be the token itself (any), as in BERT, or must be another one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.units:
            raise UserError(f"{self.where}.units: empty; name token, word, phrase or entity")
        if self.corrupt == "span" and self.spans is None:
            raise UserError(
                f"{self.where}.corrupt: span, but there are no spans; set spans: "
                "{lengths: geometric}, or corrupt: unit"
            )
        if not isinstance(self.whole, str) and not 0 <= self.whole <= 1:
            raise UserError(
                f"{self.where}.whole: {self.whole} is not a share from 0 to 1 (or an annotation)"
            )
        check_mask_rates(self.mask_rate, self.random_rate, self.where)

    def annotations(self) -> tuple[str, ...]:
        share = (self.whole,) if isinstance(self.whole, str) else ()
        return (*(unit for unit in self.units if unit != "token"), *share)

    def required_units(self) -> tuple[str, ...]:
        return tuple(unit for unit in self.units if unit != "token")

    def mask(
        self,
        example: Example,
        source: CorpusSource,
        rng: np.random.Generator,
        *,
        free: np.ndarray | None = None,
    ) -> np.ndarray:
        """(n,) the places to predict, ascending, which the example then shows masked. `free`
        (tokens,) bool: those that may be among them; None: all."""
        unit = units_of(example, self.units if self._is_whole(example, rng) else ())
        if free is not None:
            unit = np.where(free, unit, -1)
            if not (unit >= 0).any():
                return np.zeros(0, np.int64)
        group = unit if self.spans is None else spans_of(unit, self.spans, rng)
        chosen = (choose_units if self.chosen == "exact" else choose_each)(group, self.rate, rng)
        where = np.flatnonzero(chosen)
        # One draw per token; what is corrupted as a whole uses the draw of its first token.
        draws = rng.random(len(example))
        if self.corrupt != "token":
            whole = (unit if self.corrupt == "unit" else group)[where]
            first = np.unique(whole, return_index=True)[1]
            draws[where] = np.repeat(draws[where[first]], np.diff([*first, len(where)]))
        example.input_ids[where] = shown(
            example.unmasked_ids[where],
            draws[where],
            source.vocabulary,
            rng,
            mask_rate=self.mask_rate,
            random_rate=self.random_rate,
            other=self.random == "other",
        )
        return where

    def _is_whole(self, example: Example, rng: np.random.Generator) -> bool:
        """Whether this text is masked by units; of several parts the first decides."""
        if isinstance(self.whole, str):
            first = np.flatnonzero(example.source_offsets >= 0)[0]
            return bool(rng.random() * 100 < example.annotations[self.whole][first])
        return self.whole == 1 or rng.random() < self.whole


def choose_each(unit: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """(tokens,) bool: every unit with probability `rate`, using the draw of its first token."""
    draws = rng.random(len(unit))
    first = (unit >= 0) & (np.diff(unit, prepend=-1) != 0)
    return (unit >= 0) & (draws[first] < rate)[np.cumsum(first) - 1]


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
