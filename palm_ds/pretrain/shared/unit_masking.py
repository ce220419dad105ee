"""Masking of whole units of a text, for the tasks that predict them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.settings import InnerShare, Share
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.masking import Unit, choose_units, shown, units_of
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.pretrain.shared.spans import SpanSettings, spans_of


@dataclass(frozen=True, kw_only=True)
class UnitMasking(CorpusTask):
    """Keys of a task that masks units, and the masking."""

    rate_varies: ClassVar[bool] = True
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
        if self.mask_rate + self.random_rate > 1:
            raise UserError(
                f"{self.where}: mask_rate {self.mask_rate} and random_rate "
                f"{self.random_rate} must not be negative or add up to more than 1"
            )

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
