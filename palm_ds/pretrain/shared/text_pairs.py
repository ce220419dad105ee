"""Pairs of texts of which some tokens are masked on either side: translations of each other.

    corpus of pairs ──ready_made──> (pairs, 4) ──> [CLS] first [SEP] second [SEP] ──> masks in both

A corpus of pairs (`palm-ds prepare --format pairs --no_label --languages en fr`) has a document of
two sentences for each. Positions run on over both texts, as they do where pairs are fine-tuned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, build_input
from palm_ds.data.tasks.masking import Unit
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.pretrain.shared import sentence_pairs
from palm_ds.pretrain.shared.predictions import TokenPrediction
from palm_ds.pretrain.shared.unit_masking import UnitMasking


@dataclass(frozen=True, kw_only=True)
class MaskedPairs(UnitMasking, TokenPrediction, CorpusTask):
    """A task that masks tokens of both texts of a pair, and predicts them."""

    units: tuple[Unit, ...] = ("token",)
    """Units to mask as a whole, as in knowledge_masking."""

    @classmethod
    def labels_others(cls) -> bool:
        """Its labels need pairs of texts."""
        return False

    def check(self, source: CorpusSource, max_length: int) -> None:
        needed = source.vocabulary.around(2) + 2
        if max_length < needed:
            raise UserError(
                f"{self.where}: a pair needs rows of {needed} tokens or more, not {max_length}; "
                "raise `length`"
            )

    def describe(self, source: CorpusSource) -> str:
        pairs = f"{self.name}: {len(source):,} pairs of texts"
        languages = source.corpus.manifest.languages
        return f"{pairs} in {' and '.join(languages)}" if languages else pairs

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(pairs, 4) as `sentence_pairs.ready_made` has them."""
        return sentence_pairs.ready_made(source)

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        return sentence_pairs.lay_out(items, source, max_length)

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        first, tokens = int(layout["first"]), int(layout["first_tokens"])
        second, others = int(layout["second"]), int(layout["second_tokens"])
        pieces = source.read(first, first + tokens), source.read(second, second + others)
        return build_input(pieces, source.vocabulary)

    def mask_both(
        self, example: Example, source: CorpusSource, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mask tokens of either text: (n,) the places to predict, ascending; and (tokens,) which
        text a token belongs to, 0 or 1. Special tokens are of the text in front of them."""
        second = int(np.flatnonzero(np.diff(example.source_offsets >= 0))[2]) + 1
        of_second = np.arange(len(example)) >= second
        where = [self.mask(example, source, rng, free=of_second == side) for side in (False, True)]
        return np.concatenate(where), of_second.astype(np.int64)
